"""Passes over tiles of the vocabulary: each sees all tokens, and an online softmax joins them."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from llamem.losses.one_tile import (
    Gradients,
    Operands,
    Softmax,
    Tiles,
    Wanted,
    logits,
    matrices_of,
    matrix_gradients,
    project,
    raw_gradient,
    side_by_side,
    slope,
    wide,
)
from llamem.losses.online_softmax import (
    Partition,
    attended,
    head_sum,
    loss_add_ons,
    over_vocab,
    rows_of,
    softmax_over_tiles,
)


def vocab_losses(softmax: Softmax, tiles: Tiles, operands: Operands) -> tuple[dict, Partition]:
    """Rows `[N]`, and the softmax's denominators. One matrix product."""
    partition, found = softmax_over_tiles(softmax, tiles, operands, loss_add_ons(softmax, tiles, operands))
    return rows_of(softmax, partition, found), partition


def vocab_frozen(softmax: Softmax, tiles: Tiles, operands: Operands) -> tuple[dict, Array]:
    """Rows `[N]`, and the gradient of each loss for its row of hidden `[N, D]`, float32. Two matrix products."""
    _, head, targets_N = operands
    eps, vocab = softmax.label_smoothing, tiles.vocab(head)
    add_ons = loss_add_ons(softmax, tiles, operands) | {"attended": attended(softmax, operands)}
    if eps:
        add_ons["head_sum"] = head_sum(softmax, operands)
    partition, found = softmax_over_tiles(softmax, tiles, operands, add_ons)
    lse_N = partition.lse_N
    label_N = (1 - eps) * slope(softmax, found["target"]) * jnp.ones_like(lse_N)
    rows_N = targets_N - tiles.first_id(head)
    here_N = (rows_N >= 0) & (rows_N < head[0].shape[0])
    label_N = jnp.where(here_N, label_N, 0)
    own_N = jnp.where(here_N, rows_N, 0)
    label_ND = label_N[:, None] * side_by_side([matrix[own_N] for matrix in matrices_of(head)])
    dx_ND = found["attended"] * (1 + 2 * softmax.z_loss * lse_N)[:, None] - label_ND
    if eps:
        dx_ND -= (eps / vocab) * found["head_sum"]
    return rows_of(softmax, partition, found), dx_ND


def tile_gradient(
    softmax: Softmax, tiles: Tiles, operands: Operands, partition: Partition, w_N: Array, z_NU: Array, ids_U: Array
) -> Array:
    """The gradient of `sum(w * loss)` for the raw product of one tile, from its logits and their ids."""
    # Not exp(z - lse), which would lose the bits of a large lse.
    p_NU = jnp.exp(z_NU - partition.max_N[:, None]) / partition.sum_N[:, None]
    hit_NU = ids_U == operands.targets_N[:, None]
    return raw_gradient(softmax, tiles.vocab(operands.head), z_NU, p_NU, partition.lse_N, hit_NU, w_N)


def vocab_gradients(
    softmax: Softmax, tiles: Tiles, operands: Operands, partition: Partition, w_N: Array, wanted: Wanted
) -> Gradients:
    """The `wanted` gradients of `sum(w * loss)`: one product each, and one for the logits, which are made again.

    A tile holds all tokens, so its rows of the head's gradient are complete: written once, nothing accumulates.
    """
    x_ND, head, _ = operands

    def step(dx_ND: Any, tile: tuple) -> tuple[Any, list]:
        leaves, ids_U = tile
        z_NU = logits(softmax, project(softmax, x_ND, leaves))
        d_NU = tile_gradient(softmax, tiles, operands, partition, w_N, z_NU, ids_U)
        part = matrix_gradients(x_ND, leaves, d_NU, w_N, wanted)
        rows = [d if d is None else d.astype(leaf.dtype) for d, leaf in zip(part.head, head, strict=True)]
        return dx_ND + part.x if wanted.x else None, rows

    start = jnp.zeros(x_ND.shape, wide(x_ND, *head)) if wanted.x else None
    dx_ND, d_head = over_vocab(step, start, head, tiles)
    return Gradients(dx_ND.astype(x_ND.dtype) if wanted.x else None, d_head)
