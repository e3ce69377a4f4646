"""The step of a model whose layers are fetched, or updated, one by one: the same numbers as the plain step's.

1. Forward, layer by layer; what entered each layer is kept.
2. The loss, with the gradients of the head and of the last norm.
3. Backward, layer by layer. With `Plan(update="in_backward")` each layer is updated here, and no gradient stays; else
   gradients go where the weights are, and the update comes after.
4. The embedding.

Where all gradients are clipped by the norm of all, an update inside the backward pass has to know it before: then 3
and 4 are done twice, the first time for the norm alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from llamem.layers.offload import to_device, to_host
from llamem.layers.stack import group_count
from llamem.layers.streaming import backward, forward, put_back, send, take
from llamem.llama.block import rms_norm
from llamem.llama.host_memory import of_matrices
from llamem.llama.model import Llama
from llamem.llama.sharding import parameter_name
from llamem.llama.tables import embed
from llamem.train.batch_loss import loss_of_hidden
from llamem.train.on_host import in_blocks, in_turn, join, select, update_in_turn
from llamem.train.optimizers import clip_layers, clipped_by, make_update, norm_of, squares
from llamem.train.settings import TrainSettings

Rule = optax.GradientTransformation | None


def check_streamed(settings: TrainSettings) -> None:
    """Raises ValueError for settings with which layers cannot be updated one by one."""
    if settings.accumulate > 1:
        raise ValueError(
            f"TrainSettings(accumulate={settings.accumulate}) with weights on the host or an update in the backward "
            "pass: gradients of several parts would have to be kept and added, for all layers, which is the room that "
            "was to be saved. Choose accumulate=1: with layers fetched one by one a larger batch costs only its own "
            "activations."
        )


def streamed_update(
    graphdef: nnx.GraphDef, settings: TrainSettings, rule: Rule, step: Array
) -> Callable[[Any, Any, tuple[Array, Array]], tuple[Any, Any, dict[str, Array]]]:
    """`update(params, opt_state, (inputs_BT, targets_BT))`: both anew, and the metrics of `make_train_step`.

    `step` is the number of updates before this one.
    """

    def update(params: Any, opt_state: Any, batch: tuple[Array, Array]) -> tuple[Any, Any, dict[str, Array]]:
        inputs_BT, targets_BT = batch
        model = nnx.merge(graphdef, params)
        passes = Passes(model, params, inputs_BT)
        x_BTD, inputs = passes.forward()
        loss, d_head_VD, d_norm_D, dx_BTD = passes.loss(x_BTD, targets_BT)
        after = model.plan.update == "after"
        norm_first = not after and settings.clip == "global" and settings.clip_norm is not None
        top = Top(passes, d_head_VD, d_norm_D, waits=model.config.tied_head or norm_first)
        if after:
            grads, norm = _gradients(passes, settings, inputs, top, dx_BTD)
            optimizer = clipped_by(settings, rule, norm if settings.clip == "global" else None)
            change = make_update(settings, optimizer, step)
            params, opt_state = update_in_turn(change, model.plan, grads, opt_state, params)
        else:
            total = _norm(passes, inputs, top, dx_BTD) if norm_first else None
            change = _Change(settings, rule, step, total)
            params, opt_state, norm = _in_backward(passes, change, opt_state, inputs, top, dx_BTD)
        return params, opt_state, {"loss": loss, "grad_norm": norm}

    return update


class Passes:
    """The pieces of one step of a model on a batch. A tree has the place of every parameter, and None for others."""

    def __init__(self, model: Llama, params: Any, inputs_BT: Array):
        self.plan, self.config, self.params = model.plan, model.config, params
        self._embed, self._inputs_BT = model.embed, inputs_BT
        self._layer = model.layer(inputs_BT.shape[1])
        blocks = jax.tree.leaves(part(params, "blocks"))
        layer_bytes = sum(a.size * a.dtype.itemsize for a in blocks) // max(self.config.n_layers, 1)
        stream_bytes = inputs_BT.size * self.config.d_model * np.dtype(self.config.compute_dtype).itemsize
        grouped = self.plan.mode == "nested"
        self._how = {
            "weights_on_host": self.plan.weights == "host",
            "inputs_on_host": self.plan.inputs_on_host,
            "groups": group_count(self.config.n_layers, stream_bytes, layer_bytes) if grouped else 1,
        }
        self.head = "embedding" if self.config.tied_head else "untied_head"

    def forward(self) -> tuple[Array, Any]:
        """What leaves the last layer, and what entered each."""
        return forward(self.layer, part(self.params, "blocks"), self._embed(self._inputs_BT), **self._how)

    def layer(self, tree: Any, x_BTD: Array) -> Array:
        """One layer; the tree has its parameters in the place of the blocks'."""
        return self._layer(tree["blocks"], x_BTD)

    def loss(self, x_BTD: Array, targets_BT: Array) -> tuple[Array, Array, Array, Array]:
        """The loss, its gradients for the head, in the type of the products, for the last norm and for `x_BTD`."""
        head_VD, norm_D = (jax.tree.leaves(part(self.params, name))[0] for name in (self.head, "norm"))
        head_VD = (to_device(head_VD) if self.plan.weights == "host" else head_VD).astype(self.config.compute_dtype)

        def loss(head_VD: Array, norm_D: Array, x_BTD: Array) -> Array:
            hidden_BTD = rms_norm(x_BTD, norm_D, self.config.norm_eps)
            return loss_of_hidden(self.plan, hidden_BTD, head_VD, targets_BT)

        value, grads = jax.value_and_grad(loss, (0, 1, 2))(head_VD, norm_D, x_BTD)
        return value, *grads

    def backward(self, stacked_of: Callable[[Any], Any], inputs: Any, dx_BTD: Array, carry: Any, visit: Any) -> Any:
        """`llamem.layers.streaming.backward` of these layers."""
        return backward(self.layer, stacked_of, inputs, dx_BTD, carry, visit, **self._how)

    def d_embedding(self, dx_BTD: Array, top: "Top") -> Array:
        """The gradient of the embedding, with the head's share where they are tied."""
        shape, dtype = (self.config.vocab_size, self.config.d_model), self.config.compute_dtype
        _, pull = jax.vjp(lambda table_VD: embed(table_VD, self._inputs_BT, self.config), jnp.zeros(shape, dtype))
        (d_table_VD,) = pull(dx_BTD)
        if not self.config.tied_head:
            return d_table_VD
        wide = self.config.param_dtype  # as the plain step adds them
        return d_table_VD.astype(wide) + top.d_head().astype(wide)

    def tree(self, name: str, grad: Array) -> Any:
        """A gradient in the place of its parameter."""
        return jax.tree.map(lambda _: grad, part(self.params, name))


class Top:
    """The gradients that the loss left: of the head, and of the last norm.

    The head's may have to wait until a backward pass over the layers is done, and does so where the head itself is.
    """

    def __init__(self, passes: Passes, d_head_VD: Array, d_norm_D: Array, waits: bool):
        self.d_norm_D = d_norm_D
        # With tied tables the head's gradient is a summand of the embedding's.
        self.squares = squares(d_norm_D if passes.config.tied_head else (d_head_VD, d_norm_D))
        self.on_host = waits and passes.plan.weights == "host"
        self.d_head_VD = to_host(d_head_VD) if self.on_host else d_head_VD

    def d_head(self) -> Array:
        """The head's gradient, at hand."""
        return to_device(self.d_head_VD) if self.on_host else self.d_head_VD


def part(tree: Any, name: str) -> Any:
    """The tree with the leaves of "blocks", or of the one parameter of that name, and counters; None for the others."""
    return select(tree, name, lambda path: "blocks" if in_blocks(path) else str(parameter_name(path)))


def _gradients(passes: Passes, settings: TrainSettings, inputs: Any, top: Top, dx_BTD: Array) -> tuple[Any, Array]:
    """All gradients, where their weights are, and their norm. Clipped where that is each layer's own affair."""
    own = settings.clip == "layer" and settings.clip_norm is not None

    def visit(total: Array, i: Array, layer: Any, grads: Any) -> tuple[Array, Any]:
        total += squares(grads)
        return total, send(_squeezed(clip_layers(settings, _stacked(grads))) if own else grads)

    def table(name: str, d_table_VD: Array) -> Any:
        grads = passes.tree(name, d_table_VD)
        return of_matrices(clip_layers(settings, grads) if own else grads, to_host)

    d_head = None if passes.config.tied_head else table("untied_head", top.d_head_VD)
    blocks = part(passes.params, "blocks")
    dx_BTD, total, grads = passes.backward(lambda _: blocks, inputs, dx_BTD, jnp.zeros(()), visit)
    d_embedding_VD = passes.d_embedding(dx_BTD, top)
    rest = [table("embedding", d_embedding_VD), table("norm", top.d_norm_D), d_head]
    grads = blocks if grads is None else grads  # without layers there is nothing in either
    for one in rest:
        grads = grads if one is None else join(grads, one)
    return grads, jnp.sqrt(total + top.squares + squares(d_embedding_VD))


def _norm(passes: Passes, inputs: Any, top: Top, dx_BTD: Array) -> Array:
    """The norm of all gradients, by a backward pass that keeps none of them."""

    def visit(total: Array, i: Array, layer: Any, grads: Any) -> tuple[Array, None]:
        return total + squares(grads), None

    blocks = part(passes.params, "blocks")
    dx_BTD, total, _ = passes.backward(lambda _: blocks, inputs, dx_BTD, jnp.zeros(()), visit)
    return jnp.sqrt(total + top.squares + squares(passes.d_embedding(dx_BTD, top)))


class _Change:
    """The update of any part of the model: of its gradients, its share of the optimizer's state, its parameters."""

    def __init__(self, settings: TrainSettings, rule: Rule, step: Array, total: Array | None):
        self._settings, self._rule, self._step, self._total = settings, rule, step, total

    def by_norm_of(self, grads: Any) -> Any:
        """The update that clips as the settings say: by the norm of these gradients, by that of all, or not at all."""
        norm = norm_of(grads) if self._settings.clip == "layer" and self._settings.clip_norm else self._total
        return make_update(self._settings, clipped_by(self._settings, self._rule, norm), self._step)


def _in_backward(
    passes: Passes, change: _Change, opt_state: Any, inputs: Any, top: Top, dx_BTD: Array
) -> tuple[Any, Any, Array]:
    """New parameters, the optimizer's new state and the norm of all gradients; every part is updated when it can be."""
    plan, params = passes.plan, passes.params
    weights_there, moments_there = plan.weights == "host", plan.moments == "host"
    counters, moments = _apart(part(opt_state, "blocks"))

    def update_table(name: str, grads: Any, there: bool = False) -> tuple[Any, Any]:
        # Of what waited on the host no norm is taken: it waited because the norm of all came first.
        update = change.by_norm_of(grads)
        return in_turn(update, plan, grads, part(opt_state, name), part(params, name), grads_on_host=there)

    def visit(carry: tuple[Any, Any, Array], i: Array, layer: Any, grads: Any) -> tuple[tuple[Any, Any, Array], None]:
        stacked, moments, total = carry
        state = join(counters, _stacked(take(moments, i, moments_there)))
        new_layer, new_state = change.by_norm_of(grads)(_stacked(grads), state, _stacked(layer), i)
        stacked = put_back(stacked, _squeezed(new_layer), i, weights_there)
        moments = put_back(moments, _squeezed(_apart(new_state)[1]), i, moments_there)
        return (stacked, moments, total + squares(grads)), None

    done: list[tuple[Any, Any]] = []
    if not passes.config.tied_head:  # now, so that its gradient need not stay
        done.append(update_table("untied_head", passes.tree("untied_head", top.d_head_VD), top.on_host))
    carry = part(params, "blocks"), moments, jnp.zeros(())
    dx_BTD, (blocks, moments, total), _ = passes.backward(lambda carry: carry[0], inputs, dx_BTD, carry, visit)
    d_embedding_VD = passes.d_embedding(dx_BTD, top)
    done += [(blocks, join(counters, moments)), update_table("embedding", passes.tree("embedding", d_embedding_VD))]
    d_norm = passes.tree("norm", top.d_norm_D)
    # Counters, which every part counts alike, are taken from this one.
    new = change.by_norm_of(d_norm)(d_norm, part(opt_state, "norm"), part(params, "norm"))
    for more in done:
        new = join(new[0], more[0]), join(new[1], more[1])
    return *new, jnp.sqrt(total + top.squares + squares(d_embedding_VD))


def _apart(opt_state: Any) -> tuple[Any, Any]:
    """Counters, and moments, of an optimizer's state: each tree with None for the other."""
    counters = jax.tree.map_with_path(lambda path, a: a if parameter_name(path) is None else None, opt_state)
    moments = jax.tree.map_with_path(lambda path, a: None if parameter_name(path) is None else a, opt_state)
    return counters, moments


def _stacked(layer: Any) -> Any:
    """One layer as a stack of one: optimizers see the shapes that they know."""
    return jax.tree.map(lambda a: a[None], layer)


def _squeezed(stacked: Any) -> Any:
    return jax.tree.map(lambda a: a[0], stacked)
