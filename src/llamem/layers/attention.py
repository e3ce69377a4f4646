"""Causal grouped-query attention: one function over XLA's program, a tiled one, Splash (TPU) and cuDNN (GPU).

The tiled one is FlashAttention's algorithm in plain JAX: an online softmax, forward and backward.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmem.chips.chip import compiling_for

# Queries and keys that meet at once. Larger tiles read less, smaller ones waste less along the diagonal. For Llama 3.2
# 1B's heads and 8,192 tokens, tiles of 1,024 and 2,048 take 1.11 GiB on an h100 instead of 0.27, 18 % more products, as
# many seconds to compile (2.4), and three times as long on a CPU (jax 0.10.2; not run on a GPU).
QUERY_TILE, KEY_TILE = 256, 512
# Not -inf: a row of a tile may be hidden altogether, and -inf - (-inf) is NaN. What such a row adds is multiplied by
# exp(-1e30 - maximum) = 0 as soon as the row meets a key that it sees; each row meets one.
HIDDEN = -1e30
_F32 = jnp.float32


def flash_attention(
    q_BTHh: Float[Array, "B T H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    positions_BT: Int[Array, "B T"] | None = None,
    segments_BT: Int[Array, "B T"] | None = None,
    *,
    causal: bool = True,
    pairs: Int[Array, "P 2"] | None = None,
) -> Float[Array, "B T H h"]:
    """Return softmax attention in memory linear in T and S: no array of scores is larger than `[B, H, 256, 512]`.

    Causal as `causal_attention` is. Without `positions_BT` queries and keys are then the same T tokens, and tiles above
    the diagonal are not computed: about half the products. With them every tile is, or those of `pairs`: see
    `visible_pairs`. With `causal=False` every query sees every key, or those of its own number in `segments_BT`: an
    encoder's or a diffusion transformer's attention, or (without segments) one over other tokens. The backward pass
    keeps the output and one logsumexp per row, and computes scores again. Both are named "attn" for `llamem.Policy`:
    saved, the forward pass is not repeated. Reverse mode only.
    Raise ValueError for shapes that do not fit, and for causal attention over other tokens without their positions.
    Source: Dao et al. 2022 (arXiv 2205.14135) and Dao 2023 (arXiv 2307.08691); Milakov & Gimelshein 2018.
    """
    T, S = _check_shapes(q_BTHh, k_BSKh, v_BSKh, segments_BT, placed=positions_BT is not None or not causal)
    if not causal:  # a query that stands at the last key sees all of them
        positions_BT = jnp.full(q_BTHh.shape[:2], S - 1)
    if segments_BT is not None and T != S:
        raise ValueError(f"segments_BT number tokens that are queries and keys, but there are {T} queries, {S} keys.")
    if pairs is None:
        pairs = jnp.asarray(visible_pairs(np.arange(T)[None] if positions_BT is None else np.full((1, T), S - 1), S)[0])
    if positions_BT is None:
        positions_BT = jnp.broadcast_to(jnp.arange(T), q_BTHh.shape[:2])
    return _attend(q_BTHh, k_BSKh, v_BSKh, positions_BT, segments_BT, pairs)


def visible_pairs(places: Int[np.ndarray, "devices T"], keys: int) -> Int[np.ndarray, "devices P 2"]:
    """Return the pairs of a tile of queries and one of keys in which a query at its place may see a key.

    Where devices share the queries each has its pairs, as many as the others: the rest are tiles beyond all keys,
    which nobody sees.
    """
    n_keys = -(-keys // KEY_TILE)

    def pairs_of(places_T: np.ndarray) -> list[tuple[int, int]]:
        last = [places_T[start : start + QUERY_TILE].max() for start in range(0, len(places_T), QUERY_TILE)]
        return [(i, j) for i in range(len(last)) for j in range(n_keys) if j * KEY_TILE <= last[i]]

    lists = [pairs_of(places_T) for places_T in places]
    longest = max(map(len, lists))
    return np.array([pairs + [(0, n_keys)] * (longest - len(pairs)) for pairs in lists], np.int32)


def _not_followed(pairs: Array) -> Array:
    """Return the same pairs, no constants to a compiler. XLA for GPUs (jax 0.10.2) follows a loop's slices of
    constants step by step as it compiles: a million tokens have two million pairs, and took it many minutes.
    """
    return jax.lax.optimization_barrier(pairs)


@jax.custom_vjp
def _attend(q: Array, k: Array, v: Array, positions: Array, segments: Array | None, pairs: Array) -> Array:
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


_attend.defvjp(_forward, _backward)


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


Implementation = Literal["auto", "xla", "tiled", "splash", "cudnn"]

# Splash computes on whole blocks of this many tokens; a multiple of the TPU's 128 lanes.
SPLASH_BLOCK = 512


def causal_attention(
    q_BTHh: Float[Array, "B T H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    *,
    q_positions: Int[Array, "*B T"] | None = None,
    segments_BT: Int[Array, "B T"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T H h"]:
    """Compute softmax attention in which a query at position p sees the keys at positions 0..p.

    Each of the K key/value heads serves H / K query heads. Scores and softmax are f32. `q_positions` are the queries'
    places among the S keys, `[T]` or `[B, T]`; by default 0..T-1, with T = S. `segments_BT` numbers packed documents:
    a query then sees keys of its own number only. Padding is a document like any other; leave it out of the loss.
    The result is named "attn" for `llamem.Policy`.

    `implementation`: "xla" keeps the scores `[B, H, T, S]`; "tiled" is `flash_attention`, linear in T and S;
    "splash" is JAX's Pallas kernel for TPUs, "cudnn" NVIDIA's flash attention through `jax.nn.dot_product_attention`
    (bf16 or f16). "auto": Splash on (or compiling for) a TPU where T is a multiple of 512, else "tiled" for more than
    1,024 queries, else "xla". Raises ValueError where the named one cannot do it.
    """
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation={implementation!r}: expected 'auto', 'xla', 'tiled', 'splash' or 'cudnn'.")
    whole = q_positions is None
    T, _ = _check_shapes(q_BTHh, k_BSKh, v_BSKh, segments_BT, placed=not whole)
    if segments_BT is not None and not whole:
        raise ValueError("segments_BT number the tokens of whole sequences: leave q_positions out.")
    if implementation == "auto":
        implementation = choose_attention(T, tpu=whole and "TPU" in compiling_for())
    if implementation in ("splash", "cudnn") and not whole:
        raise ValueError(
            f"implementation={implementation!r} computes whole sequences; with q_positions use 'xla' or 'tiled'."
        )
    if implementation == "splash":
        return splash_attention(q_BTHh, k_BSKh, v_BSKh, segments_BT)
    if implementation == "cudnn":
        if segments_BT is not None:
            raise ValueError("implementation='cudnn' knows no packed documents: with segments_BT use 'tiled' or 'xla'.")
        out_BTHh = jax.nn.dot_product_attention(q_BTHh, k_BSKh, v_BSKh, is_causal=True, implementation="cudnn")
        return checkpoint_name(out_BTHh, "attn")
    positions_BT = None if q_positions is None else jnp.broadcast_to(q_positions, q_BTHh.shape[:2])
    if implementation == "tiled":
        return flash_attention(q_BTHh, k_BSKh, v_BSKh, positions_BT, segments_BT)
    return checkpoint_name(_xla(q_BTHh, k_BSKh, v_BSKh, positions_BT, segments_BT), "attn")


def _check_shapes(
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


def choose_attention(T: int, *, tpu: bool, block: int = SPLASH_BLOCK) -> Implementation:
    """Return what "auto" is for T queries: Splash on a TPU where blocks divide them, else by their number."""
    if tpu and T % block == 0:
        return "splash"
    return "tiled" if T > 1024 else "xla"


def _xla(q_BTHh: Array, k_BSKh: Array, v_BSKh: Array, positions_BT: Array | None, segments_BT: Array | None) -> Array:
    B, T, H, h = q_BTHh.shape
    K = k_BSKh.shape[2]
    q_BTKGh = q_BTHh.reshape(B, T, K, H // K, h)
    scores_BKGTS = jnp.einsum("BTKGh,BSKh->BKGTS", q_BTKGh, k_BSKh, preferred_element_type=jnp.float32) * h**-0.5
    positions_BT = jnp.arange(T)[None] if positions_BT is None else positions_BT
    visible_BTS = jnp.arange(k_BSKh.shape[1]) <= positions_BT[..., None]
    if segments_BT is not None:
        visible_BTS &= segments_BT[..., None] == segments_BT[:, None, :]
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    probs_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKh.dtype)
    out_BTKGh = jnp.einsum("BKGTS,BSKh->BTKGh", probs_BKGTS, v_BSKh)
    return out_BTKGh.reshape(B, T, H, h)


def splash_attention(
    q_BTHh: Float[Array, "B T H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    segments_BT: Int[Array, "B T"] | None = None,
    *,
    places: np.ndarray | None = None,
    axis: str | None = None,
) -> Float[Array, "B T H h"]:
    """Compute `causal_attention` by JAX's Pallas kernel for TPUs.

    Raise ValueError where T is no multiple of its block, and in a program for another chip.

    Where the devices of a mesh axis share the queries, `places` `[devices, T]` says where those of each stand among
    the S keys, which every device holds; a block of queries stands together.
    """
    T, H, h = q_BTHh.shape[1:]
    if T % SPLASH_BLOCK:
        raise ValueError(
            f"Splash attention needs T to be a multiple of {SPLASH_BLOCK}, got T={T}: pad, or use 'tiled'."
        )
    if "TPU" not in (kind := compiling_for()):
        raise ValueError(
            f"Splash attention is a kernel for TPUs, and this program is for {kind!r}. Use 'tiled', 'xla' or 'auto', "
            "which is Splash on a TPU alone. A TPU that is not here is named by compile_report(..., chip='v5e-1')."
        )
    kernels, kernel = _splash_kernel(H, np.arange(T)[None] if places is None else places, axis)
    segments = None if segments_BT is None else kernels.SegmentIds(segments_BT, segments_BT)
    q_BHTh, k_BKSh, v_BKSh = (jnp.swapaxes(a, 1, 2) for a in (q_BTHh * h**-0.5, k_BSKh, v_BSKh))
    out_BHTh = jax.vmap(kernel, (0, 0, 0, None if segments is None else 0))(q_BHTh, k_BKSh, v_BKSh, segments)
    return jnp.swapaxes(out_BHTh, 1, 2)


def _splash_kernel(n_heads: int, places: np.ndarray, axis: str | None) -> tuple[Any, Callable[..., Array]]:
    # Imported here: Pallas takes a second to import and only TPU programs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = _causal_mask()((places.size, places.size))
    mask.q_sequence = places.reshape(-1).astype(np.int32)
    fields = dataclasses.fields(kernels.BlockSizes)
    sizes: dict[str, Any] = {field.name: SPLASH_BLOCK for field in fields if field.name.startswith("block_")}
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * n_heads),
        block_sizes=kernels.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=len(places),
        # Named in the kernel, with its logsumexp: a policy that saves "attn" spares the backward pass the forward one.
        residual_checkpoint_name="attn",
    )
    return kernels, kernel if axis is None else _own_part(kernel, axis)  # pyrefly: ignore[bad-return]


@functools.cache
def _causal_mask() -> Any:
    """Return the class of the masks. There is one: Splash remembers what it read off a mask by its class, too."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    class Causal(masks.CausalMask):
        """Queries at any places. Of a block that is seen whole, or not at all, one element says so.

        Else the comparison of every query with every key takes minutes for long sequences.
        """

        def __getitem__(self, idx: Any) -> np.ndarray:
            queries, keys = idx
            if self.q_sequence[queries.start] >= keys.stop - 1:
                return np.ones((1, 1), bool)
            if self.q_sequence[queries.stop - 1] < keys.start:
                return np.zeros((1, 1), bool)
            return super().__getitem__(idx)

    return Causal


def _own_part(kernel: Any, axis: str) -> Any:
    """Return the kernel for this device's queries: of its tables, which are in the devices' order, the own rows."""
    devices = jax.lax.axis_size(axis)

    def rows(table: Array) -> Array:
        dim = 1 if table.ndim == 3 else 0  # [heads, queries, keys] in blocks, or the places of queries
        count = table.shape[dim] // devices
        return jax.lax.dynamic_slice_in_dim(table, jax.lax.axis_index(axis) * count, count, dim)

    return jax.tree.map(rows, kernel)
