"""The step of a model whose layers are fetched, computed and updated one by one.

1. Forward, layer by layer; what entered each layer is kept.
2. The loss, with the gradients of the head and of the last norm.
3. Backward, layer by layer: each is updated as soon as its gradient is there, and no gradient stays.
4. The embedding.

Gradients are clipped by each layer's own norm or not at all: the norm of all would be known too late.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from llamem.host.memory import update_by_rows
from llamem.host.streaming import backward, forward, put_back, take
from llamem.host.waiting_weights import tables_wait_on_host
from llamem.layers.custom_rules import combine, partition
from llamem.layers.host_memory import to_device, to_host
from llamem.layers.partial_sums import order_gradients
from llamem.layers.stack import group_count
from llamem.llama.checked_inputs import check_length, check_tokens
from llamem.llama.model import Llama
from llamem.llama.weights import Table, parameter_name, rms_norm
from llamem.train.optimizers import UpdateRule, is_stacked, make_update, norm_of, split_counters, sum_of_squares, within
from llamem.train.plain_step import Step, TrainState, loss_of_hidden, mean_weights
from llamem.train.settings import TrainSettings


def make_streamed_step(graphdef: nnx.GraphDef, settings: TrainSettings) -> Step:
    """Return `step(state, batch) -> state, metrics` of a model whose plan goes layer by layer."""

    def step(state: TrainState, batch: tuple[Array, ...]) -> tuple[TrainState, dict[str, Array]]:
        counters, moments = split_counters(state.opt_state)
        update, params = make_update(settings, state.step, counters), state.params
        model = nnx.merge(graphdef, params)
        if model.plan.weights == "host":  # layers are fetched here, and once for both passes
            model = tables_wait_on_host(model)
        params, moments, metrics = streamed_update(model, settings, update, params, moments, batch)
        counters = jax.tree.map(lambda count: count + 1, counters)
        return TrainState(state.step + 1, params, combine(counters, moments)), metrics

    return step


def streamed_update(
    model: Llama, settings: TrainSettings, update: UpdateRule, params: Any, moments: Any, batch: tuple[Array, ...]
) -> tuple[Any, Any, dict[str, Array]]:
    """Return new parameters, new moments and the metrics of `make_train_step`.

    `params` are those of `model`, which is computed as its plan says. `update`: see `make_update`.
    """
    plan, config = model.plan, model.config
    inputs_BT, targets_BT, *segments = batch
    check_tokens(inputs_BT, config.vocab_size)
    check_length(inputs_BT.shape[1], config)
    layer, options = model.layer(jnp.arange(inputs_BT.shape[1]), *segments), _loop_options(model, inputs_BT)
    weights_there, moments_there = plan.weights == "host", plan.moments == "host"

    def compute(tree: Any, x_BTD: Array) -> Array:
        return layer(tree["blocks"], x_BTD)

    def clipped_by(norm: Array) -> UpdateRule:
        return lambda grads, *args: update(within(grads, norm, settings.clip_norm), *args)

    def update_table(name: str, d_table_VD: Array) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda _: d_table_VD, _part(params, name))
        return update_by_rows(clipped_by(norm_of(grads)), plan, grads, _part(moments, name), _part(params, name))

    def visit(carry: tuple[Any, Any, Array], i: Array, layer: Any, grads: Any) -> tuple[tuple[Any, Any, Array], None]:
        blocks, of_blocks, squares = carry
        own = _stacked(take(of_blocks, i, moments_there))
        new_layer, new_own = clipped_by(norm_of(grads))(_stacked(grads), own, _stacked(layer), i)
        blocks = put_back(blocks, _squeezed(new_layer), i, weights_there)
        of_blocks = put_back(of_blocks, _squeezed(new_own), i, moments_there)
        return (blocks, of_blocks, squares + sum_of_squares(grads)), None

    x_BTD, inputs = forward(compute, _part(params, "blocks"), model.embed(inputs_BT), **options)
    loss, d_head_VD, d_norm_D, dx_BTD = _loss_and_grads(model, x_BTD, targets_BT)
    d_norm = jax.tree.map(lambda _: d_norm_D, _part(params, "norm"))
    done = [clipped_by(norm_of(d_norm))(d_norm, _part(moments, "norm"), _part(params, "norm"))]
    squares = sum_of_squares(d_norm)
    if not config.tied_head:  # now, so that its gradient need not stay
        done.append(update_table("untied_head", d_head_VD))
        squares += sum_of_squares(d_head_VD)
    elif weights_there:  # a part of the embedding's gradient: it waits for the rest where the table does
        d_head_VD = to_host(d_head_VD)
    carry = _part(params, "blocks"), _part(moments, "blocks"), squares
    dx_BTD, (blocks, of_blocks, squares), _ = backward(
        compute, lambda carry: carry[0], inputs, dx_BTD, carry, visit, **options
    )
    d_table_VD = _d_embedding(model, inputs_BT, dx_BTD)
    if config.tied_head:  # added in the type in which the plain step adds them
        d_head_VD = to_device(d_head_VD) if weights_there else d_head_VD
        d_table_VD = d_table_VD.astype(config.param_dtype) + d_head_VD.astype(config.param_dtype)
    done += [(blocks, of_blocks), update_table("embedding", d_table_VD)]
    return *functools.reduce(combine, done), {"loss": loss, "grad_norm": jnp.sqrt(squares + sum_of_squares(d_table_VD))}


def _loop_options(model: Llama, inputs_BT: Array) -> dict[str, Any]:
    plan, config = model.plan, model.config
    layer_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(nnx.state(model.blocks)))
    layer_bytes //= max(config.n_layers, 1)
    stream_bytes = inputs_BT.size * config.d_model * np.dtype(config.compute_dtype).itemsize
    grouped = plan.mode == "nested"
    return {
        "weights_on_host": plan.weights == "host",
        "inputs_on_host": plan.inputs_on_host,
        "groups": group_count(config.n_layers, stream_bytes, layer_bytes) if grouped else 1,
    }


def _loss_and_grads(model: Llama, x_BTD: Array, targets_BT: Array) -> tuple[Array, Array, Array, Array]:
    """Return the loss, its gradients for the head, in the type of the products, for the last norm and for `x_BTD`."""

    def loss(head_VD: Array, norm_D: Array, x_BTD: Array) -> Array:
        hidden_BTD, head_VD = order_gradients(rms_norm(x_BTD, norm_D, model.config.norm_eps), head_VD)
        weights_B = mean_weights(targets_BT)
        return loss_of_hidden(model.plan, hidden_BTD, (head_VD,), targets_BT, weights_B)

    head_VD = model.head.astype(model.config.compute_dtype)
    value, grads = jax.value_and_grad(loss, (0, 1, 2))(head_VD, model.norm[...], x_BTD)
    return value, *grads


def _d_embedding(model: Llama, inputs_BT: Array, dx_BTD: Array) -> Array:
    """Return the gradient of the embedding, without the head's share of it."""
    config = model.config
    table_VD = jnp.zeros((config.vocab_size, config.d_model), config.compute_dtype)
    return jax.vjp(lambda table_VD: Table(table_VD).look_up(inputs_BT, config.compute_dtype), table_VD)[1](dx_BTD)[0]


def _part(tree: Any, name: str) -> Any:
    """Return the tree with the leaves of "blocks", or of one parameter by name; None for the others."""
    return partition(tree, lambda path, _: name == ("blocks" if is_stacked(path) else str(parameter_name(path))))[0]


def _stacked(layer: Any) -> Any:
    """Return one layer as a stack of one: optimizers see the shapes that they know."""
    return jax.tree.map(lambda a: a[None], layer)


def _squeezed(stacked: Any) -> Any:
    return jax.tree.map(lambda a: a[0], stacked)
