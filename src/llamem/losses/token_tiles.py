"""Passes over tiles of tokens: each sees the whole vocabulary, so its gradients can be made at once.

On a CPU a tile is worked on a cache-full of columns at a time: what works on its logits finds them in the cache.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from llamem.layers.tiling import fold_tiles, tile_size
from llamem.losses.one_tile import (
    NOTHING,
    Gradients,
    Operands,
    Softmax,
    Tiles,
    Wanted,
    logits,
    matrix_gradients,
    project,
    project_with_pullback,
    quiet,
    raw_gradient,
    row_losses,
    waiting_type,
    wide,
)
from llamem.losses.online_softmax import kept_logits, kept_tile, loss_add_ons, over_vocab, rows_of, softmax_over_tiles
from llamem.losses.vocab_tiles import tile_gradient

TOKEN_ALIGN = 16  # rows of a tile are a multiple of this


def token_pass(
    softmax: Softmax, tiles: Tiles, operands: Operands, w_N: Array, wanted: Wanted = NOTHING
) -> tuple[Array, dict, Gradients]:
    """`sum(w * loss)`, the rows `[N]`, and the `wanted` gradients of the sum, in the types they wait or grow in.

    One matrix product, and one more each for hidden and the head's matrix.
    """
    x_ND, head, targets_N = operands
    in_columns = softmax.callable_head is None and tiles.columns is not None and head[0].shape[0] > tiles.columns
    one_tile = _in_columns if in_columns else _whole_rows

    def step(carry: tuple, tile: tuple) -> tuple[tuple, tuple]:
        total, head_sums = carry
        x_TD, targets_T, w_T = tile
        if softmax.callable_head is not None:
            x_TD = quiet(x_TD, w_T)  # what the callable makes of a NaN is not ours to mask
        rows, dx_TD, head_sums = one_tile(softmax, tiles, Operands(x_TD, head, targets_T), w_T, wanted, head_sums)
        dw_T = quiet(rows["loss"], w_T)
        total = total + jnp.sum(w_T * dw_T)
        dx_TD = None if dx_TD is None else dx_TD.astype(waiting_type(x_TD.dtype))
        return (total, head_sums), (rows, Gradients(dx_TD, [], dw_T.astype(w_T.dtype) if wanted.weights else None))

    total = jnp.zeros((), wide(x_ND, *head, w_N))
    head_sums = [
        jnp.zeros(leaf.shape, _accumulator(tiles, leaf)) if is_wanted else None
        for leaf, is_wanted in zip(head, wanted.head or (False,) * len(head), strict=True)
    ]
    start = (total, head_sums)
    xs = (x_ND, targets_N, w_N)
    (total, head_sums), (rows, by_row) = fold_tiles(step, start, xs, tiles.num_tiles, align=TOKEN_ALIGN)
    return total, rows, by_row._replace(head=head_sums)


def _accumulator(tiles: Tiles, leaf: Array) -> Any:
    return leaf.dtype if leaf.dtype == jnp.float64 else tiles.accumulate_dtype


def _whole_rows(
    softmax: Softmax, tiles: Tiles, operands: Operands, w_T: Array, wanted: Wanted, head_sums: list
) -> tuple[dict, Array | None, list]:
    """A tile of tokens at once: its rows, its gradient of hidden if wanted, and the head's sums of gradients, grown."""
    x_TD, head, targets_T = operands
    pull_back = None
    if wanted.of_logits:
        raw_TV, pull_back = project_with_pullback(softmax, x_TD, head, wanted)
    else:
        raw_TV = project(softmax, x_TD, head)
    z_TV = logits(softmax, raw_TV)
    max_T1 = jnp.max(z_TV, -1, keepdims=True)
    exp_TV = jnp.exp(z_TV - max_T1)
    sum_T1 = jnp.sum(exp_TV, -1, keepdims=True)
    lse_T = (max_T1 + jnp.log(sum_T1))[:, 0]
    target_T = jnp.take_along_axis(z_TV, targets_T[:, None], 1)[:, 0]
    stats = {}
    if softmax.with_stats:
        stats["entropy"] = lse_T - jnp.sum(jnp.where(exp_TV == 0, 0, exp_TV * z_TV), -1) / sum_T1[:, 0]
        stats["accuracy"] = (jnp.argmax(z_TV, -1) == targets_T).astype(lse_T.dtype)
    rows = row_losses(softmax, lse_T, target_T, jnp.mean(z_TV, -1) if softmax.label_smoothing else None, stats)
    if pull_back is None:
        return rows, None, head_sums
    vocab = z_TV.shape[1]
    hit_TV = jnp.arange(vocab) == targets_T[:, None]
    part = pull_back(raw_gradient(softmax, vocab, z_TV, exp_TV / sum_T1, lse_T, hit_TV, w_T), w_T)
    grown = [None if s is None else s + d.astype(s.dtype) for s, d in zip(head_sums, part.head, strict=True)]
    return rows, part.x, grown


def _in_columns(
    softmax: Softmax, tiles: Tiles, operands: Operands, w_T: Array, wanted: Wanted, head_sums: list
) -> tuple[dict, Array | None, list]:
    """The same, its logits made and later used a few columns at a time, and kept in between: no product runs twice."""
    x_TD, head, _ = operands
    vocab = head[0].shape[0]
    assert tiles.columns is not None
    in_columns = dataclasses.replace(tiles, num_tiles=-(-vocab // tiles.columns))
    columns = tile_size(vocab, in_columns.num_tiles, in_columns.vocab_align)
    add_ons = loss_add_ons(softmax, tiles, operands)
    if wanted.of_logits:
        add_ons["kept"] = kept_logits(operands, columns)
    partition, found = softmax_over_tiles(softmax, in_columns, operands, add_ons)
    rows = rows_of(softmax, partition, found)
    if not wanted.of_logits:
        return rows, None, head_sums

    def step(carry: tuple, tile: tuple) -> tuple[tuple, tuple]:
        dx_TD, head_sums = carry
        leaves, ids_U = tile
        z_TU = kept_tile(found["kept"], ids_U)
        d_TU = tile_gradient(softmax, tiles, operands, partition, w_T, z_TU, ids_U)
        part = matrix_gradients(x_TD, leaves, d_TU, w_T, wanted)
        grown = [None if s is None else _add_rows(s, d, ids_U[0]) for s, d in zip(head_sums, part.head, strict=True)]
        return (dx_TD + part.x if wanted.x else None, grown), ()

    start = jnp.zeros(x_TD.shape, wide(x_TD, *head)) if wanted.x else None
    (dx_TD, head_sums), _ = over_vocab(step, (start, head_sums), head, in_columns)
    return rows, dx_TD, head_sums


def _add_rows(total: Array, rows: Array, start: Array) -> Array:
    old = lax.dynamic_slice_in_dim(total, start, len(rows))
    return lax.dynamic_update_slice_in_dim(total, old + rows.astype(total.dtype), start, 0)
