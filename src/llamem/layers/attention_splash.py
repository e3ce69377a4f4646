"""Splash attention: JAX's Pallas kernel for TPUs, for causal masks of queries at any places."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmem.chips.chip import compiling_for

# Splash computes on whole blocks of this many tokens; a multiple of the TPU's 128 lanes.
SPLASH_BLOCK = 512


def splash_attention(
    q_BTHh: Float[Array, "B T H h"],
    k_BSKh: Float[Array, "B S K h"],
    v_BSKh: Float[Array, "B S K h"],
    segments_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H h"]:
    """Compute `causal_attention` by JAX's Pallas kernel for TPUs.

    Raise ValueError where T is no multiple of its block, and in a program for another chip.
    """
    T, H = q_BTHh.shape[1:3]
    check_splash(T)
    return through_kernel(splash_kernel(H, np.arange(T)[None]), q_BTHh, k_BSKh, v_BSKh, segments_BT)


def check_splash(T: int) -> None:
    """Raise ValueError where T queries are no multiple of the kernel's block, and in a program for another chip."""
    if T % SPLASH_BLOCK:
        raise ValueError(
            f"Splash attention needs T to be a multiple of {SPLASH_BLOCK}, got T={T}: pad, or use 'tiled'."
        )
    if "TPU" not in (kind := compiling_for()):
        raise ValueError(
            f"Splash attention is a kernel for TPUs, and this program is for {kind!r}. Use 'tiled', 'xla' or 'auto', "
            "which is Splash on a TPU alone. A TPU that is not here is named by compile_report(..., chip='v5e-1')."
        )


def through_kernel(
    kernel: Callable[..., Array], q_BTHh: Array, k_BSKh: Array, v_BSKh: Array, segments_BT: Array | None = None
) -> Float[Array, "B T H h"]:
    """Return what a kernel of `splash_kernel` makes of whole batches."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    segments = None if segments_BT is None else kernels.SegmentIds(segments_BT, segments_BT)
    q_BHTh, k_BKSh, v_BKSh = (jnp.swapaxes(a, 1, 2) for a in (q_BTHh * q_BTHh.shape[-1] ** -0.5, k_BSKh, v_BSKh))
    out_BHTh = jax.vmap(kernel, (0, 0, 0, None if segments is None else 0))(q_BHTh, k_BKSh, v_BKSh, segments)
    return jnp.swapaxes(out_BHTh, 1, 2)


def splash_kernel(n_heads: int, places: Int[np.ndarray, "shards T"]) -> Any:
    """Return the kernel for queries at these places, block by block; a pytree, whose tables have shards in order."""
    # Imported here: Pallas takes a second to import and only TPU programs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = _causal_mask()((places.size, places.size))
    mask.q_sequence = places.reshape(-1).astype(np.int32)
    fields = dataclasses.fields(kernels.BlockSizes)
    sizes: dict[str, Any] = {field.name: SPLASH_BLOCK for field in fields if field.name.startswith("block_")}
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * n_heads),
        block_sizes=kernels.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=len(places),
        # Named in the kernel, with its logsumexp: a policy that saves "attn" spares the backward pass the forward one.
        residual_checkpoint_name="attn",
    )


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
