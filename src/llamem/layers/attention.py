"""Causal grouped-query attention: one function over XLA's program, a tiled one, Splash (TPU) and cuDNN (GPU)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmem.chips import compiling_for
from llamem.layers.tiled_attention import flash_attention

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
    _check_shapes(q_BTHh, k_BSKh, v_BSKh, segments_BT)
    T, S = q_BTHh.shape[1], k_BSKh.shape[1]
    whole = q_positions is None
    if whole and T != S:
        raise ValueError(f"attention of {T} queries over {S} keys needs q_positions: where do the queries stand?")
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


def _check_shapes(q_BTHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BT: Array | None) -> None:
    q, k, v = q_BTHh.shape, k_BSKh.shape, v_BSKh.shape
    fit = len(q) == len(k) == 4 and k == v and (q[0], q[3]) == (k[0], k[3])
    if not fit or k[2] == 0 or q[2] % k[2]:
        raise ValueError(
            f"attention of queries {q}, keys {k} and values {v}: expected queries [B, T, H, h] and keys and values "
            "[B, S, K, h] with the same B and h, where K key/value heads divide the H query heads."
        )
    if segments_BT is not None and segments_BT.shape != q[:2]:
        raise ValueError(f"segments_BT has shape {segments_BT.shape}: expected one number per token, {q[:2]}.")


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
