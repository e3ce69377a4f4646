"""Causal grouped-query attention: one function over XLA's program, one in tiles, Splash (TPU) and cuDNN (GPU)."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmem.chips.chip import compiling_for
from llamem.layers.attention_splash import SPLASH_BLOCK, splash_attention
from llamem.layers.attention_tiles import check_shapes, flash_attention

Implementation = Literal["auto", "xla", "tiled", "splash", "cudnn"]


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
    T, _ = check_shapes(q_BTHh, k_BSKh, v_BSKh, segments_BT, placed=not whole)
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
