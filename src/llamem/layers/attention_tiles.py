"""Attention in tiles: FlashAttention's algorithm in plain JAX, an online softmax forward and backward."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llamem.layers.tile_loops import partitioned

# Queries and keys that meet at once. Larger tiles read less, smaller ones waste less along the diagonal. For Llama 3.2
# 1B's heads and 8,192 tokens, tiles of 1,024 and 2,048 take 1.11 GiB on an h100 instead of 0.27, 18 % more products, as
# many seconds to compile (2.4), and three times as long on a CPU (jax 0.10.2; not run on a GPU).
QUERY_TILE, KEY_TILE = 256, 512
# Not -inf: a row of a tile may be hidden altogether, and -inf - (-inf) is NaN. What such a row adds is multiplied by
# exp(-1e30 - maximum) = 0 as soon as the row meets a key that it sees; each row meets one.
HIDDEN = -1e30
_F32 = jnp.float32


def check_shapes(
    q_BTHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BT: Array | None, *, placed: bool
) -> tuple[int, int]:
    """Return T and S of what fits. `placed`: it is said, or does not matter, where the queries stand."""
    q, k, v = q_BTHh.shape, k_BSKh.shape, v_BSKh.shape
    fit = len(q) == len(k) == 4 and k == v and (q[0], q[3]) == (k[0], k[3])
    if not fit or 0 in q[1:] + k[1:] or q[2] % k[2]:
        raise ValueError(
            f"attention of queries {q}, keys {k} and values {v}: expected queries [B, T, H, h] and keys and values "
            "[B, S, K, h] with the same B and h, where K key/value heads divide the H query heads; T and S at least 1."
        )
    if segments_BT is not None and segments_BT.shape != q[:2]:
        raise ValueError(f"segments_BT has shape {segments_BT.shape}: expected one number per token, {q[:2]}.")
    T, S = q[1], k[1]
    if T != S and not placed:
        raise ValueError(f"attention of {T} queries over {S} keys needs their positions: where do the queries stand?")
    return T, S


def flash_attention(
    q_BTHh: Float[Array, "B T H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    positions_BT: Int[Array, "B T"] | None = None,
    segments_BT: Int[Array, "B T"] | None = None,
    *,
    causal: bool = True,
) -> Float[Array, "B T H h"]:
    """Return softmax attention in memory linear in T and S: no array of scores is larger than `[B, H, 256, 512]`.

    Causal as `causal_attention` is. Without `positions_BT` queries and keys are then the same T tokens, and tiles above
    the diagonal are not computed: about half the products. With them every tile is. With `causal=False` every query
    sees every key, or those of its own number in `segments_BT`: an encoder's or a diffusion transformer's attention, or
    (without segments) one over other tokens. The backward pass keeps the output and one logsumexp per row, and computes
    scores again. Both are named "attn" for `llamem.Policy`: saved, the forward pass is not repeated. Reverse mode only.
    Raise ValueError for shapes that do not fit, and for causal attention over other tokens without their positions.
    Source: Dao et al. 2022 (arXiv 2205.14135) and Dao 2023 (arXiv 2307.08691); Milakov & Gimelshein 2018.
    """
    T, S = check_shapes(q_BTHh, k_BSKh, v_BSKh, segments_BT, placed=positions_BT is not None or not causal)
    if not causal:  # a query that stands at the last key sees all of them
        positions_BT = jnp.full(q_BTHh.shape[:2], S - 1)
    if segments_BT is not None and T != S:
        raise ValueError(f"segments_BT number tokens that are queries and keys, but there are {T} queries, {S} keys.")
    pairs = jnp.asarray(visible_pairs(np.arange(T) if positions_BT is None else np.full(T, S - 1), S), jnp.int32)
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(T), q_BTHh.shape[:2])
    args = q_BTHh, k_BSKh, v_BSKh, positions_BT, segments_BT, pairs
    return partitioned(attend_in_tiles, jax.typeof(q_BTHh).sharding.spec, *args)


def visible_pairs(places_T: Int[np.ndarray, " T"], keys: int) -> list[tuple[int, int]]:
    """Return the pairs of a tile of queries and one of keys in which a query at its place may see a key."""
    last = [places_T[start : start + QUERY_TILE].max() for start in range(0, len(places_T), QUERY_TILE)]
    return [(i, j) for i in range(len(last)) for j in range(-(-keys // KEY_TILE)) if j * KEY_TILE <= last[i]]


def _not_followed(pairs: Array) -> Array:
    """Return the same pairs, no constants to a compiler. XLA for GPUs (jax 0.10.2) follows a loop's slices of
    constants step by step as it compiles: a million tokens have two million pairs, and took it many minutes.
    """
    return jax.lax.optimization_barrier(pairs)


@jax.custom_vjp
def attend_in_tiles(q: Array, k: Array, v: Array, positions: Array, segments: Array | None, pairs: Array) -> Array:
    """Return attention of queries at `positions` over the keys, tile by tile of `pairs` `[P, 2]`."""
    return _forward(q, k, v, positions, segments, pairs)[0]


def _forward(q: Array, k: Array, v: Array, positions: Array, segments: Array | None, pairs: Array) -> tuple[Any, Any]:
    B, T, H, h = q.shape
    K = k.shape[2]
    tiles = _Tiles(q, k, v, positions, segments)

    def step(carry: tuple[Array, ...], pair: Array) -> tuple[tuple[Array, ...], None]:
        i, j = pair
        scores = tiles.scores(i, j)
        out, top, total = (_get(a, i) for a in carry)
        new_top = jnp.maximum(top, scores.max(-1))
        shrink, probs = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
        seen = jnp.einsum("BKGts,BsKh->BKGth", probs.astype(v.dtype), _get(tiles.v, j), preferred_element_type=_F32)
        new = out * shrink[..., None] + seen, new_top, total * shrink + probs.sum(-1)
        return tuple(_put(a, part, i) for a, part in zip(carry, new, strict=True)), None

    rows = (len(tiles.q), B, K, H // K, QUERY_TILE)
    start = jnp.zeros((*rows, h), _F32), jnp.full(rows, HIDDEN, _F32), jnp.zeros(rows, _F32)
    (out, top, total), _ = jax.lax.scan(step, start, _not_followed(pairs))
    out_BTHh = _untile((out / total[..., None]).transpose(0, 1, 4, 2, 3, 5), T).reshape(q.shape).astype(q.dtype)
    out_BTHh, logsumexp = (checkpoint_name(a, "attn") for a in (out_BTHh, top + jnp.log(total)))
    return out_BTHh, (q, k, v, positions, segments, pairs, out_BTHh, logsumexp)


def _backward(residuals: tuple[Any, ...], d_out: Array) -> tuple[Any, ...]:
    q, k, v, positions, segments, pairs, out, logsumexp = residuals
    tiles = _Tiles(q, k, v, positions, segments)
    d_out_tiles = _tile(d_out.reshape(tiles.grouped), QUERY_TILE)
    # sum(P * dP) over a row of the softmax, which is the same for all keys: Dao 2023, equation 4.
    inner = jnp.sum(d_out.astype(_F32) * out.astype(_F32), axis=-1).reshape(tiles.grouped[:-1])
    inner = _tile(inner, QUERY_TILE).transpose(0, 1, 3, 4, 2)
    product = partial(jnp.einsum, preferred_element_type=_F32)

    def step(carry: tuple[Array, ...], pair: Array) -> tuple[tuple[Array, ...], None]:
        i, j = pair
        dq, dk, dv = carry
        do = _get(d_out_tiles, i)
        probs = jnp.exp(tiles.scores(i, j) - _get(logsumexp, i)[..., None])
        d_probs = product("BtKGh,BsKh->BKGts", do, _get(tiles.v, j))
        d_scores = (probs * (d_probs - _get(inner, i)[..., None]) * tiles.scale).astype(q.dtype)
        dq = _put(dq, _get(dq, i) + product("BKGts,BsKh->BtKGh", d_scores, _get(tiles.k, j)), i)
        dk = _put(dk, _get(dk, j) + product("BKGts,BtKGh->BsKh", d_scores, _get(tiles.q, i)), j)
        dv = _put(dv, _get(dv, j) + product("BKGts,BtKGh->BsKh", probs.astype(v.dtype), do), j)
        return (dq, dk, dv), None

    start = tuple(jnp.zeros(a.shape, _F32) for a in (tiles.q, tiles.k, tiles.v))
    (dq, dk, dv), _ = jax.lax.scan(step, start, _not_followed(pairs))
    dq, dk, dv = (_untile(a, like.shape[1]).reshape(like.shape) for a, like in ((dq, q), (dk, k), (dv, v)))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


attend_in_tiles.defvjp(_forward, _backward)


class _Tiles:
    """Queries `[n, B, t, K, G, h]`, keys and values `[m, B, s, K, h]`, and what is visible where."""

    def __init__(self, q: Array, k: Array, v: Array, positions: Array, segments: Array | None):
        # Tied to q: masks depend on no weight, so JAX would compute them ahead for all pairs of tiles, and store them.
        q, positions, segments = jax.lax.optimization_barrier((q, positions, segments))
        B, T, H, h = q.shape
        self.scale = h**-0.5
        self.grouped = (B, T, k.shape[2], H // k.shape[2], h)
        self.q = _tile(q.reshape(self.grouped), QUERY_TILE)
        self.k, self.v = _tile(k, KEY_TILE), _tile(v, KEY_TILE)
        # What pads the queries stands at position 0, and what pads the keys after every position.
        self.positions = _tile(positions, QUERY_TILE)
        self.segments = None if segments is None else (_tile(segments, QUERY_TILE), _tile(segments, KEY_TILE))

    def scores(self, i: Array, j: Array) -> Array:
        """Return scaled scores `[B, K, G, t, s]` of query tile i and key tile j, f32, `HIDDEN` where invisible."""
        scores = jnp.einsum("BtKGh,BsKh->BKGts", _get(self.q, i), _get(self.k, j), preferred_element_type=_F32)
        keys = j * KEY_TILE + jnp.arange(KEY_TILE)
        visible_Bts = keys <= _get(self.positions, i)[..., None]
        if self.segments is not None:
            of_queries, of_keys = self.segments
            visible_Bts &= _get(of_queries, i)[..., None] == _get(of_keys, j)[:, None, :]
        return jnp.where(visible_Bts[:, None, None], scores * self.scale, HIDDEN)


def _tile(a: Array, size: int) -> Array:
    """Return `[B, T, ...]`, padded, as `[tiles, B, size, ...]`."""
    padded = jnp.pad(a, [(0, 0), (0, -a.shape[1] % size), *[(0, 0)] * (a.ndim - 2)])
    return padded.reshape(a.shape[0], padded.shape[1] // size, size, *a.shape[2:]).swapaxes(0, 1)


def _untile(a: Array, T: int) -> Array:
    return a.swapaxes(0, 1).reshape(a.shape[1], a.shape[0] * a.shape[2], *a.shape[3:])[:, :T]


def _get(a: Array, i: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(a, i, keepdims=False)


def _put(a: Array, part: Array, i: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(a, part, i, axis=0)
