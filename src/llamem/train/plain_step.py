"""One update of a model's parameters: the loss of a batch and its gradients, the step.

The loss is a sum over tokens of cross-entropy times a weight of the token's sequence. With weights of one over the
number of tokens that count it is the mean; with those of each adapter's own tokens, the sum of the adapters' means.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from llamem.layers.custom_rules import add_to, cast_like, combine, wide_zeros
from llamem.layers.partial_sums import order_gradients
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.llama.weights import whole_logits
from llamem.losses.cross_entropy import tiled_cross_entropy
from llamem.train.optimizers import clip, make_update, split_counters
from llamem.train.place import ONE_DEVICE, Place
from llamem.train.settings import TrainSettings

IGNORED = -100  # a target that does not count


def mean_weights(targets_BT: Int[Array, "B T"], place: Place = ONE_DEVICE) -> Float[Array, " B"]:
    """Return the weight of each sequence with which `summed_loss` is the mean over all tokens that count."""
    counted = place.sum_sequences(jnp.sum(targets_BT != IGNORED).astype(jnp.float32))
    return jnp.broadcast_to(1 / jnp.maximum(counted, 1), targets_BT.shape[:1])


def summed_loss(
    model: Llama,
    weights_B: Float[Array, " B"],
    inputs_BT: Int[Array, "B T"],
    targets_BT: Int[Array, "B T"],
    segments_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Return the sum over tokens of cross-entropy times the weight of the token's sequence.

    It is linear in the weights: its gradient for `weights_B` is the summed loss of each sequence.
    """
    hidden_BTD, head = model.hidden(inputs_BT, segments_BT), model.head_table
    if head.is_trained:
        # Else its whole gradient, not yet in its type nor divided, would stay for all layers' backward passes.
        hidden_BTD, head = order_gradients(hidden_BTD, head)
    own_BT, _ = model.attend.own(targets_BT)
    # Made ready once, before the loop over tiles.
    hidden_BTD, matrices = head.ready(hidden_BTD.dtype).beside(hidden_BTD)
    return loss_of_hidden(
        model.plan,
        hidden_BTD,
        matrices,
        own_BT,
        weights_B,
        head_trained=head.is_trained,
        vocab_axis=head.vocab_axis,
    )


def loss_of_hidden(
    plan: Plan,
    hidden_BTD: Float[Array, "B T D"],
    head: tuple[Float[Array, "V _"], ...],
    targets_BT: Int[Array, "B T"],
    weights_B: Float[Array, " B"],
    *,
    head_trained: bool = True,
    vocab_axis: str | None = None,
) -> Float[Array, ""]:
    """Compute `summed_loss` from the last hidden states, normed, and the head: matrices that stand side by side."""
    weights_BT = jnp.broadcast_to(weights_B[:, None], targets_BT.shape)
    if plan.loss_tiles is None and not vocab_axis:
        with jax.named_scope("logits"):  # by this name a timeline knows them
            logits_BTV = whole_logits(hidden_BTD, jnp.concatenate([w.astype(hidden_BTD.dtype) for w in head], axis=1))
        counts_BT = targets_BT != IGNORED
        loss_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, jnp.where(counts_BT, targets_BT, 0))
        return jnp.sum(jnp.where(counts_BT, loss_BT * weights_BT, 0))
    return tiled_cross_entropy(
        hidden_BTD,
        head,
        targets_BT,
        weights=weights_BT,
        reduction="sum",
        ignore_index=IGNORED,
        num_tiles=plan.loss_tiles or 1,
        axis="vocab" if vocab_axis else plan.loss_axis,
        head_trained=head_trained,
        vocab_axis_name=vocab_axis,
    )


def loss_and_grads(
    loss: Callable[..., Array], trained: Any, weights_B: Float[Array, " B"], batch: tuple[Array, ...], accumulate: int
) -> tuple[Float[Array, " B"], Any]:
    """Return the summed loss of each sequence, and the gradients of `loss(trained, weights_B, *batch)` for `trained`.

    `trained` is whatever is trained, all of a model or adapters; gradients have the types of its arrays. With
    `accumulate > 1` gradients of parts of the batch are made and added inside a scan, in f32: autodiff through a loop
    over them, or a Python loop, would keep the residuals of all.
    """
    grad = jax.grad(loss, argnums=(0, 1))
    if accumulate == 1:
        grads, losses_B = grad(trained, weights_B, *batch)
        return losses_B, grads
    parts = jax.tree.map(lambda a: a.reshape(accumulate, -1, *a.shape[1:]), (weights_B, *batch))

    def add(total: Any, part: tuple[Array, ...]) -> tuple[Any, Array]:
        grads, losses_B = grad(trained, *part)
        return add_to(total, grads), losses_B

    grads, losses = lax.scan(add, wide_zeros(trained), parts)
    return losses.reshape(-1), cast_like(grads, trained)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes: the number of updates done, what is trained, the optimizer's state."""

    step: Any  # an int32 scalar; Any, since JAX also builds pytrees of placeholders
    params: Any
    opt_state: Any


Step = Callable[[TrainState, tuple[Array, ...]], tuple[TrainState, dict[str, Array]]]


def make_model(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()) -> Llama:
    """Return a freshly initialised model, computed as the plan says. Same seed, same parameters."""
    return Llama(config, rngs=nnx.Rngs(settings.seed), plan=plan)


def make_step(graphdef: nnx.GraphDef, settings: TrainSettings, place: Place = ONE_DEVICE) -> Step:
    """Return `step(state, (inputs_BT, targets_BT)) -> state, metrics`: one update of the parameters of `graphdef`.

    A third array in the batch, `segments_BT`, numbers documents that are packed into one sequence.
    """

    def step(state: TrainState, batch: tuple[Array, ...]) -> tuple[TrainState, dict[str, Array]]:
        counters, moments = split_counters(state.opt_state)
        loss, grads = weights_loss_and_grads(graphdef, settings, place, state.params, batch)
        norm = place.norm(grads)
        update = make_update(settings, state.step, counters, place.start_of_part)
        params, moments = place.update(update, clip(settings, grads, norm), moments, state.params)
        counters = jax.tree.map(lambda count: count + 1, counters)
        return TrainState(state.step + 1, params, combine(counters, moments)), {"loss": loss, "grad_norm": norm}

    return step


def weights_loss_and_grads(
    graphdef: nnx.GraphDef, settings: TrainSettings, place: Place, params: Any, batch: tuple[Array, ...]
) -> tuple[Float[Array, ""], Any]:
    """Return the mean loss of a batch and the gradients of all weights, of one device their parts."""

    def loss(params: Any, weights_B: Array, *batch: Array) -> Array:
        return summed_loss(place.put(nnx.merge(graphdef, params)), weights_B, *batch)

    weights_B = mean_weights(batch[1], place)
    losses_B, grads = loss_and_grads(loss, params, weights_B, batch, settings.accumulate)
    return place.sum_tokens(jnp.vdot(losses_B, weights_B)), place.sum_gradients(grads)
