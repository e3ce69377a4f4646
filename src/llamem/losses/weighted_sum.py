"""The weighted sum of any loss of a token's rows, over tiles of tokens or of the vocabulary."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llamem.layers.tiling import tiled_sum
from llamem.losses.rows import Rows, Softmax, make_logits, power_of_two, rows_of
from llamem.losses.vocab_tiles import VocabTiles, vocab_rows

RowLoss = Callable[[Rows, Any], Array]  # the rows of some tokens and what else belongs to them, to losses `[T]`


def sum_over_tokens(
    loss_of: RowLoss,
    softmax: Softmax,
    num_tiles: int,
    x_ND: Array,
    head: list,
    targets_N: Array,
    weights_N: Array,
    extras: Any = (),
) -> Array:
    """Return `sum(weights * loss_of(rows, extras))` over tiles of tokens: 3 matrix products, 2 with a frozen head.

    A tile sees the whole vocabulary, so `tiled_sum` makes its gradients while its logits are there.
    """
    scale = power_of_two(softmax, weights_N)

    def tile(head: list, xs: tuple) -> Array:
        x_TD, targets_T, w_T, extras = xs
        silent_T = (w_T == 0) & ~jnp.all(jnp.isfinite(x_TD), -1)  # 0 * NaN would be NaN
        x_TD = jnp.where(silent_T[:, None], 0, x_TD)
        rows = rows_of(softmax, make_logits(softmax, x_TD, head), targets_T)
        return jnp.sum(w_T * loss_of(quiet(rows, w_T), extras))

    xs = _whole_tiles((x_ND, targets_N, weights_N * scale, extras), num_tiles)
    return tiled_sum(tile, head, xs, num_tiles, accumulate_dtype=softmax.wide) / scale


def _whole_tiles(xs: Any, num_tiles: int) -> Any:
    """Return the rows with zeros after them, so that all tiles are equal and run in one loop."""
    tokens = jax.tree.leaves(xs)[0].shape[0]
    rows_per_tile = max(1, -(-tokens // num_tiles))
    missing = -tokens % rows_per_tile
    return jax.tree.map(lambda a: jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)), xs) if missing else xs


def sum_over_vocab(
    loss_of: RowLoss,
    softmax: Softmax,
    tiles: VocabTiles,
    x_ND: Array,
    head: list,
    targets_N: Array,
    weights_N: Array,
    extras: Any = (),
) -> Array:
    """Return the same over tiles of the vocabulary: 4 matrix products, and no sum in the shape of the head."""
    rows = vocab_rows(softmax, tiles, x_ND, head, targets_N)
    return jnp.sum(weights_N * loss_of(quiet(rows, weights_N), extras))


def quiet(rows: Rows, weights_N: Array) -> Rows:
    """Return the rows with 0 for those that are not finite and have a weight of 0, which add nothing to a sum."""
    return jax.tree.map(lambda r_N: jnp.where((weights_N == 0) & ~jnp.isfinite(r_N), 0, r_N), rows)
