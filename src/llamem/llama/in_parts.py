"""The halves of a layer part by part, where a plan says so: attention in groups of heads, the feed-forward in tiles.

Then the queries, keys and values of one group, and the gate and up of one tile, are alive at a time.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from llamem.layers.partial_sums import order_gradients, sum_parts
from llamem.layers.tiling import tiled_map
from llamem.llama.weights import linear_together


def in_groups_of_heads(attention: Any, groups: int) -> Callable[..., Float[Array, "B T D"]]:
    """Return what computes a layer's attention one group of heads after the other; itself for one group.

    Each group runs again in the backward pass. What the groups add, and the gradients of what they share, are summed in
    f32.
    """
    if groups == 1:
        return attention

    def one_by_one(x_BTD: Array, rope: Any, segments_BT: Array | None, attend: Any) -> Float[Array, "B T D"]:
        qkv = [matrix.cut(groups, "output") for matrix in (attention.q, attention.k, attention.v)]
        heads = qkv, attention.o.cut(groups, "input")
        shared = attention.q_norm, attention.k_norm, attention.norm(x_BTD), rope, segments_BT

        def group(shared: Any, heads: Any, dtype: Any) -> Array:
            (q_norm, k_norm, y_BTD, rope, segments_BT), (qkv, o) = shared, heads
            # One product, whose gradients go back at once: three lay out a [B, T, D] each.
            products = linear_together(qkv, y_BTD)
            q_BTHh, k_BTKh, v_BTKh = attention._replace(q_norm=q_norm, k_norm=k_norm).rotated(products, rope)
            (q_BTHh, k_BTKh), v_BTKh = order_gradients((q_BTHh, k_BTKh), v_BTKh)
            return o.linear(attend(q_BTHh, k_BTKh, v_BTKh, segments_BT), dtype)

        return attention.add_output(x_BTD, sum_parts(group, shared, heads, x_BTD.dtype))

    return one_by_one


def in_tiles_of_tokens(feed_forward: Any, tiles: int) -> Callable[[Array], Float[Array, "B T D"]]:
    """Return what computes a layer's feed-forward one tile of tokens after the other; itself for one tile."""
    if tiles == 1:
        return feed_forward

    def one_by_one(x_BTD: Array) -> Float[Array, "B T D"]:
        if feed_forward.down.is_whole:
            return _tiled(type(feed_forward).__call__, feed_forward, x_BTD, tiles)
        # Where devices compute summands, they add up those of all tiles at once.
        out_BTD = _tiled(type(feed_forward).swiglu, feed_forward, feed_forward.norm(x_BTD), tiles)
        return feed_forward.add_output(x_BTD, out_BTD)

    return one_by_one


def _tiled(fn: Callable[..., Any], weights: Any, x_BTD: Array, tiles: int) -> Float[Array, "B T D"]:
    """Return `fn(weights, x_BTD)`, which works on tokens one by one, tile by tile."""
    if not weights.down.tells_sequences_apart:

        def rows(weights: Any, x_ND: Array) -> Array:
            return fn(weights, x_ND[None])[0]

        return tiled_map(rows, weights, x_BTD.reshape(-1, x_BTD.shape[-1]), tiles).reshape(x_BTD.shape)

    def columns(weights: Any, x_TBD: Array) -> Array:
        return fn(weights, x_TBD.swapaxes(0, 1)).swapaxes(0, 1)

    # A tile is some tokens of every sequence.
    return tiled_map(columns, weights, x_BTD.swapaxes(0, 1), tiles).swapaxes(0, 1)
