"""Any loss of a token's own log-probability and entropy: all gradients in one pass over tiles of tokens.

With `p` the softmax of a token's logits, `H` its entropy, `g` and `h` the derivatives of the token's loss for its
log-probability and for `H`, the gradient of its logits is

    dlogits = g * (onehot - p) - h * p * (log p + H)

`g` and `h` need the whole row of logits; then the row, which is still there, becomes its own gradient. So a tile of
tokens takes three matrix products: the logits, `dlogits @ head`, `dlogits.T @ hidden`. Two, where the head is frozen.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llamem.layers.tiling import fold_tiles, scale_gradient, tile_size
from llamem.losses.one_tile import (
    NOTHING,
    Operands,
    Softmax,
    Tiles,
    Wanted,
    columns_met,
    matrix_gradients,
    quiet,
    slope,
    waiting_type,
    wide,
)
from llamem.losses.online_softmax import Partition, entropy, over_vocab, softmax_over_tiles, target_logit
from llamem.losses.sixteen_bits import SteppedSum, WideSum, keep, kept, scratch, stepped_sum, two_bytes
from llamem.losses.token_tiles import TOKEN_ALIGN, accumulator

TokenLoss = Callable[[Array, Array, Any], Array]


class Pull(NamedTuple):
    """What a row's loss passes down to its logits: its derivatives for log-probability and entropy, weighted."""

    logp_N: Array
    entropy_N: Array


def token_policy_pass(
    fn: TokenLoss, softmax: Softmax, tiles: Tiles, operands: Operands, w_N: Array, extras: Any, wanted: Wanted = NOTHING
) -> tuple[Array, dict, Array | None, list]:
    """`sum(w * loss)`, the rows `[N]`, and the `wanted` gradients of the sum, of the head as what grew."""
    x_ND, head, targets_N = operands
    assert tiles.columns is not None
    in_columns = dataclasses.replace(tiles, num_tiles=-(-len(head[0]) // tiles.columns))
    columns = tile_size(len(head[0]), in_columns.num_tiles, in_columns.vocab_align)

    def step(carry: tuple, tile: tuple) -> tuple[tuple, tuple]:
        total, head_sums, room = carry
        x_TD, targets_T, w_T, extras_T = tile
        here = Operands(x_TD, head, targets_T)
        add_ons = {"target": target_logit(here), "entropy": entropy(here)}
        if room is not None:
            add_ons["kept"] = keep(room, columns)
        partition, found = softmax_over_tiles(softmax, in_columns, here, add_ons)
        logp_T, entropy_T = found["target"] - partition.lse_N, found["entropy"]
        loss_T, slopes = jax.vmap(jax.value_and_grad(fn, argnums=(0, 1)))(logp_T, entropy_T, extras_T)
        total = total + jnp.sum(w_T * quiet(loss_T, w_T))
        rows = {"loss": loss_T, "logprob": logp_T, "entropy": entropy_T}
        if room is None:
            return (total, head_sums, None), (rows, None)
        pull = Pull(*(jnp.where(w_T == 0, 0, w_T * slope_T) for slope_T in slopes))
        size_T = jnp.abs(pull.logp_N) + jnp.abs(pull.entropy_N)  # how large the row's gradient is

        def gradients(carry: tuple, tile: tuple) -> tuple[tuple, tuple]:
            dx_TD, head_sums, room = carry
            leaves, ids_U = tile
            z_TU = kept(room, columns, len(x_TD), ids_U)
            d_TU = _raw_gradient(softmax, here, partition, entropy_T, pull, z_TU, ids_U)
            part = matrix_gradients(x_TD, leaves, d_TU, size_T, wanted)
            grown = [s if s is None else s.grow(d, ids_U[0]) for s, d in zip(head_sums, part.head, strict=True)]
            return (dx_TD + part.x if wanted.x else None, grown, room), ()

        start = jnp.zeros(x_TD.shape, wide(x_TD, *head)) if wanted.x else None
        # The room goes through the loop, which only reads it: left outside, it would be copied.
        carry = (start, head_sums, found["kept"])
        (dx_TD, head_sums, room), _ = over_vocab(gradients, carry, head, in_columns)
        dx_TD = dx_TD.astype(waiting_type(x_TD.dtype)) if wanted.x else None
        return (total, head_sums, room), (rows, dx_TD)

    met = columns_met(x_ND, head)
    head_sums = [
        _empty_sum(tiles, leaf, part_ND, w_N) if is_wanted else None
        for leaf, part_ND, is_wanted in zip(head, met, wanted.head or (False,) * len(head), strict=True)
    ]
    rows_per_tile = tile_size(len(x_ND), tiles.num_tiles, TOKEN_ALIGN)
    room = scratch(operands, rows_per_tile, columns) if wanted.of_logits else None
    start = (jnp.zeros((), wide(x_ND, *head, w_N)), head_sums, room)
    xs = (x_ND, targets_N, w_N, extras)
    (total, head_sums, _), (rows, dx_ND) = fold_tiles(step, start, xs, tiles.num_tiles, align=TOKEN_ALIGN)
    return total, rows, dx_ND, head_sums


def _empty_sum(tiles: Tiles, head_VD: Array, x_ND: Array, w_N: Array) -> WideSum | SteppedSum:
    if tiles.accumulate_dtype == "auto":
        if two_bytes(head_VD):
            return stepped_sum(head_VD, x_ND, w_N)
        return WideSum(jnp.zeros(head_VD.shape, wide(head_VD)))
    return WideSum(jnp.zeros(head_VD.shape, accumulator(tiles, head_VD)))


def _raw_gradient(
    softmax: Softmax, here: Operands, partition: Partition, entropy_N: Array, pull: Pull, z_NU: Array, ids_U: Array
) -> Array:
    """The gradient of some columns of the raw product, through soft-cap and temperature."""
    below_NU = z_NU - partition.max_N[:, None]
    p_NU = jnp.exp(below_NU) / partition.sum_N[:, None]
    logp_NU = below_NU - jnp.log(partition.sum_N)[:, None]
    hit_NU = ids_U == here.targets_N[:, None]
    g_N1, h_N1 = pull.logp_N[:, None], pull.entropy_N[:, None]
    d_NU = jnp.where(hit_NU, g_N1, 0) - p_NU * (g_N1 + h_N1 * (logp_NU + entropy_N[:, None]))
    silent_N1 = (g_N1 == 0) & (h_N1 == 0)  # also where the row is not finite
    return jnp.where(silent_N1, 0, d_NU * slope(softmax, z_NU))


@partial(jax.tree_util.register_dataclass, data_fields=("dx_ND", "head_sums"), meta_fields=("x_type", "head_types"))
@dataclasses.dataclass(frozen=True)
class Unscaled:
    """Gradients for a cotangent of 1, and the types in which they are returned."""

    dx_ND: Array | None
    head_sums: list[WideSum | SteppedSum | None]
    x_type: Any
    head_types: tuple


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def summed_policy(
    fn: TokenLoss,
    softmax: Softmax,
    tiles: Tiles,
    x_ND: Array,
    head: list,
    targets_N: Array,
    w_N: Array,
    extras: Any,
) -> tuple[Array, dict]:
    """`sum_n w[n] * fn(logp[n], entropy[n], extras[n])`, differentiable for hidden and head; rows, which are not."""
    return token_policy_pass(fn, softmax, tiles, Operands(x_ND, head, targets_N), w_N, extras)[:2]


def _forward(fn, softmax, tiles, x, head, targets, w, extras):
    data = {"weights": [w], "extras": jax.tree.leaves(extras, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))}
    for name, leaves in data.items():
        if any(leaf.perturbed for leaf in leaves):
            raise TypeError(
                f"A gradient for {name} of a token loss is asked for, and none is made: they are data, such as "
                "advantages, the log-probabilities of another policy, a mask. Pass them through jax.lax.stop_gradient, "
                "or take the loss apart with tiled_logprobs, which is differentiable in every way."
            )
    wanted = Wanted(x.perturbed, tuple(leaf.perturbed for leaf in head))
    operands = Operands(x.value, [leaf.value for leaf in head], targets.value)
    values = jax.tree.map(lambda leaf: leaf.value, extras, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
    total, rows, dx_ND, head_sums = token_policy_pass(fn, softmax, tiles, operands, w.value, values, wanted)
    return (total, rows), Unscaled(dx_ND, head_sums, x.value.dtype, tuple(leaf.dtype for leaf in operands.head))


def _backward(fn, softmax, tiles, residuals, cotangents):
    cotangent, _ = cotangents
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return (None,) * 5
    sums = zip(residuals.head_sums, residuals.head_types, strict=True)
    d_head = [s if s is None else s.scaled(cotangent, dtype) for s, dtype in sums]
    return scale_gradient(residuals.dx_ND, cotangent, residuals.x_type), d_head, None, None, None


summed_policy.defvjp(_forward, _backward, symbolic_zeros=True)
