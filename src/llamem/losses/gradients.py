"""Differentiation rules of the tiled losses: which pass runs when.

| | forward | backward | matrix products |
|---|---|---|---|
| not differentiated | losses | - | 1 |
| `summed_loss` (tiles of tokens) | losses and all gradients | scaling | 3; 2 where head or hidden is frozen |
| `loss_rows`, head trained | losses | logits again, gradients | 4 |
| `loss_rows`, head frozen | losses and unit gradients of `hidden` | scaling | 2 |
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llamem.layers.tiling import scale_gradient
from llamem.layers.varying import varying_axes
from llamem.losses.one_tile import Gradients, Operands, Softmax, Tiles, Wanted, quiet, wide
from llamem.losses.online_softmax import Partition
from llamem.losses.token_tiles import token_pass
from llamem.losses.vocab_tiles import vocab_frozen, vocab_gradients, vocab_losses

# With symbolic_zeros a forward rule is told which arguments are being differentiated: each leaf has `.perturbed`.


def _values(x: Any, head: list, targets: Any) -> Operands:
    return Operands(x.value, [leaf.value for leaf in head], targets.value)


def _ones(operands: Operands) -> Array:
    return jnp.ones(operands.x_ND.shape[0], wide(operands.x_ND, *operands.head))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("gradients",),
    meta_fields=("x_type", "head_types", "weights_type"),
)
@dataclasses.dataclass(frozen=True)
class Unscaled:
    """Gradients made for a cotangent of 1, wide enough to be scaled, and the types in which they are returned."""

    gradients: Gradients
    x_type: Any
    head_types: tuple
    weights_type: Any


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def summed_loss(
    softmax: Softmax, tiles: Tiles, x_ND: Array, head: list, targets_N: Array, weights_N: Array
) -> tuple[Array, dict]:
    """`sum_n weights[n] * loss[n]`, differentiable, and the rows `[N]`, which are not. Tiles of tokens."""
    return token_pass(softmax, tiles, Operands(x_ND, head, targets_N), weights_N)[:2]


def _summed_forward(softmax, tiles, x, head, targets, weights):
    wanted = Wanted(x.perturbed, tuple(leaf.perturbed for leaf in head), weights.perturbed)
    operands = _values(x, head, targets)
    total, rows, grads = token_pass(softmax, tiles, operands, weights.value, wanted)
    types = operands.x_ND.dtype, tuple(leaf.dtype for leaf in operands.head), weights.value.dtype
    return (total, rows), Unscaled(grads, *types)


def _summed_backward(softmax, tiles, residuals, cotangents):
    cotangent, _ = cotangents
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return (None,) * 4
    grads = residuals.gradients
    x = scale_gradient(grads.x, cotangent, residuals.x_type)
    head = [scale_gradient(g, cotangent, dtype) for g, dtype in zip(grads.head, residuals.head_types, strict=True)]
    return x, head, None, scale_gradient(grads.weights, cotangent, residuals.weights_type)


summed_loss.defvjp(_summed_forward, _summed_backward, symbolic_zeros=True)


@partial(jax.tree_util.register_dataclass, data_fields=("operands", "partition"), meta_fields=("wanted",))
@dataclasses.dataclass(frozen=True)
class Recompute:
    """Residuals of a trained head: what makes the logits, and from them the `wanted` gradients, a second time."""

    operands: Operands
    partition: Partition | None  # of the vocabulary's tiles; a tile of tokens finds its own again
    wanted: Wanted


@partial(jax.tree_util.register_dataclass, data_fields=("dx_ND",), meta_fields=("x_type",))
@dataclasses.dataclass(frozen=True)
class UnitGradient:
    """Residuals of a frozen head: the gradient of each loss for its row of hidden, to be scaled."""

    dx_ND: Array
    x_type: Any


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss_rows(softmax: Softmax, tiles: Tiles, x_ND: Array, head: list, targets_N: Array) -> dict:
    """Rows `[N]`: "loss" is differentiable, statistics are not. Tiles along `tiles.axis`."""
    return _rows_and_partition(softmax, tiles, Operands(x_ND, head, targets_N))[0]


def _rows_and_partition(softmax: Softmax, tiles: Tiles, operands: Operands) -> tuple[dict, Partition | None]:
    if tiles.axis == "vocab":
        return vocab_losses(softmax, tiles, operands)
    return token_pass(softmax, tiles, operands, _ones(operands))[1], None


def _rows_forward(softmax, tiles, x, head, targets):
    wanted = Wanted(x.perturbed, tuple(leaf.perturbed for leaf in head))
    operands = _values(x, head, targets)
    if any(wanted.head):
        rows, partition = _rows_and_partition(softmax, tiles, operands)
        return rows, Recompute(operands, partition, wanted)
    if tiles.axis == "vocab":
        rows, dx_ND = vocab_frozen(softmax, tiles, operands)
    else:
        _, rows, grads = token_pass(softmax, tiles, operands, _ones(operands), wanted)
        dx_ND = grads.x
    assert dx_ND is not None  # the head is frozen, so hidden is what is differentiated
    return rows, UnitGradient(dx_ND, operands.x_ND.dtype)


def _rows_backward(softmax, tiles, residuals, cotangents):
    cotangent_N = cotangents["loss"]
    if isinstance(cotangent_N, jax.custom_derivatives.SymbolicZero):
        return (None,) * 3
    if isinstance(residuals, UnitGradient):
        dx_ND = scale_gradient(quiet(residuals.dx_ND, cotangent_N), cotangent_N[:, None], residuals.x_type)
        return _of_whole_head(tiles, dx_ND), None, None
    # Else XLA sees that a remainder tile outside the loops was computed before, and keeps its logits until now.
    x_ND, head, targets_N = residuals.operands
    operands = Operands(jax.lax.optimization_barrier(x_ND), head, targets_N)
    grads: Gradients
    if residuals.partition is not None:
        grads = vocab_gradients(softmax, tiles, operands, residuals.partition, cotangent_N, residuals.wanted)
    else:
        grads = token_pass(softmax, tiles, operands, cotangent_N, residuals.wanted)[2]
    dx_ND = _of_whole_head(tiles, _in_type_of(x_ND, grads.x))
    return dx_ND, [_in_type_of(leaf, g) for leaf, g in zip(head, grads.head, strict=True)], None


def _of_whole_head(tiles: Tiles, dx_ND: Array | None) -> Array | None:
    """Hidden's gradient, the sum of what devices find that hold some rows of the head each.

    With `check_vma=True` JAX takes the sum: hidden is said to differ over that axis, which it does not.
    """
    if dx_ND is None or tiles.vocab_axis is None or tiles.vocab_axis in varying_axes(dx_ND):
        return dx_ND
    return jax.lax.psum(dx_ND, tiles.vocab_axis)


def _in_type_of(leaf: Array, gradient: Array | None) -> Array | None:
    return None if gradient is None else gradient.astype(leaf.dtype)


loss_rows.defvjp(_rows_forward, _rows_backward, symbolic_zeros=True)
