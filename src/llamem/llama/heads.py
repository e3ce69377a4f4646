"""Attention of a Llama layer as functions of arrays: all heads at once, or groups of heads one after the other."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llamem.layers.attention import Implementation, causal_attention
from llamem.layers.context import context_attention
from llamem.layers.parts import order_gradients, sum_parts
from llamem.llama.config import LlamaConfig
from llamem.llama.lora_products import NO_ADAPTERS, LayerAdapters
from llamem.llama.sharding import MeshShape

# A layer's weights that attention reads beside its first norm, and which of their axes has the heads.
QKV, OUT = ("wq", "wk", "wv", "q_norm", "k_norm"), ("wo",)
ATTENTION = QKV + OUT
_HEADS = {"wq": 1, "wk": 1, "wv": 1, "wo": 0}
Weights = Mapping[str, Any]  # arrays by name, in the types in which they are stored


def rms_norm(x: Float[Array, "*N D"], scale_D: Float[Array, " D"], eps: float) -> Float[Array, "*N D"]:
    """Return `x / rms(x) * scale` over the last axis, computed in f32, in the type of `x`. Zhang & Sennrich 2019."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * scale_D.astype(jnp.float32)).astype(x.dtype)


def rope_tables(
    config: LlamaConfig, positions: Int[Array, "*B T"]
) -> tuple[Float[Array, "*B T _"], Float[Array, "*B T _"]]:
    """Return cosines and sines `[.., T, h / 2]` of RoPE's angles, f32, with Llama 3.1's scaling where configured.

    Source: Su et al. 2021; the scaling is Meta's llama-models, `apply_scaling`.
    """
    half = config.head_dim // 2
    frequencies = config.rope_theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # over the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = frequencies * (keep + (1 - keep) / scaling.factor)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTNh: Float[Array, "B T N h"], rope: tuple[Array, Array]) -> Float[Array, "B T N h"]:
    """Turn channel pairs (i, i + h/2) by RoPE's angles: Hugging Face's pairing, so its weights fit unpermuted."""
    cos, sin = (table[..., :, None, :] for table in rope)
    a, b = jnp.split(x_BTNh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNh.dtype)


@dataclasses.dataclass(frozen=True)
class Attention:
    """How a layer attends: its type of products and norms, an implementation, and a mesh inside `shard_map`."""

    config: LlamaConfig
    implementation: Implementation = "auto"
    mesh: MeshShape = MeshShape()

    def project_qkv(
        self,
        weights: Weights,
        y_BTD: Float[Array, "B T D"],
        rope: tuple[Array, Array],
        lora: LayerAdapters = NO_ADAPTERS,
        one_product: bool = False,
    ) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
        """Return queries, keys and values of the normed stream, rotated to their positions.

        With `one_product` their gradients go back at once: three products lay out a `[B, T, D]` each.
        """
        dtype, eps = self.config.compute_dtype, self.config.norm_eps
        matrices = [weights[name].astype(dtype) for name in ("wq", "wk", "wv")]
        if one_product:
            heads = np.cumsum([w.shape[1] for w in matrices])
            product_BTNh = jnp.einsum("BTD,DNh->BTNh", y_BTD, jnp.concatenate(matrices, axis=1))
            products = jnp.split(product_BTNh, heads[:-1], axis=2)
        else:
            products = [jnp.einsum("BTD,DNh->BTNh", y_BTD, w) for w in matrices]
        q_BTHh, k_BTKh, v_BTKh = (lora.add(name, y_BTD, out) for name, out in zip("qkv", products, strict=True))
        if self.config.qk_norm:
            q_BTHh = rms_norm(q_BTHh, weights["q_norm"], eps)
            k_BTKh = rms_norm(k_BTKh, weights["k_norm"], eps)
        q_BTHh, k_BTKh = rotate(q_BTHh, rope), rotate(k_BTKh, rope)
        if one_product:
            (q_BTHh, k_BTKh), v_BTKh = order_gradients((q_BTHh, k_BTKh), v_BTKh)
        return checkpoint_name(q_BTHh, "q"), checkpoint_name(k_BTKh, "k"), checkpoint_name(v_BTKh, "v")

    def project_out(
        self, weights: Weights, attn_BTHh: Float[Array, "B T H h"], lora: LayerAdapters, dtype: Any = None
    ) -> Float[Array, "B T D"]:
        """Return what attention adds to the stream, in `dtype` or that of the products; a device's summand of it."""
        wo_HhD = weights["wo"].astype(self.config.compute_dtype)
        return lora.add("o", attn_BTHh, jnp.einsum("BTHh,HhD->BTD", attn_BTHh, wo_HhD, preferred_element_type=dtype))

    def attend(
        self,
        weights: Weights,
        y_BTD: Float[Array, "B T D"],
        rope: tuple[Array, Array],
        segments_BT: Int[Array, "B T"] | None,
        lora: LayerAdapters = NO_ADAPTERS,
        *,
        one_product: bool = False,
        dtype: Any = None,
    ) -> Float[Array, "B T D"]:
        """Return what attention of the normed stream adds to it, all heads at once."""
        q_BTHh, k_BTKh, v_BTKh = self.project_qkv(weights, y_BTD, rope, lora, one_product)
        how = self.implementation
        if self.mesh.context_axis:
            attn_BTHh = context_attention(q_BTHh, k_BTKh, v_BTKh, axis=self.mesh.context_axis, implementation=how)
        else:
            attn_BTHh = causal_attention(q_BTHh, k_BTKh, v_BTKh, segments_BT=segments_BT, implementation=how)
        return self.project_out(weights, attn_BTHh, lora, dtype)

    def attend_in_groups(
        self,
        weights: Weights,
        y_BTD: Float[Array, "B T D"],
        rope: tuple[Array, Array],
        segments_BT: Int[Array, "B T"] | None,
        lora: LayerAdapters,
        groups: int,
        in_blocks: frozenset[str] = frozenset(),
    ) -> Float[Array, "B T D"]:
        """Return what `attend` returns, at the memory of one group of heads: their results are summed in f32.

        Each group is computed again in the backward pass. Gradients of what groups share grow in f32. The weights
        `in_blocks`, dequantised, enter the loop over groups outputs first, as their blocks lie: else XLA for GPUs would
        copy those of all layers.
        """

        def turned(name: str, w: Array, start: int, end: int) -> Array:  # D is the input of wq, the output of wo
            start, end = (end, start) if name == "wo" else (start, end)
            return jnp.moveaxis(w, start, end) if name in in_blocks else w

        heads = {name: turned(name, _cut(weights[name], axis, groups), -3, -1) for name, axis in _HEADS.items()}
        norms = {name: weight for name, weight in weights.items() if name not in heads}
        channels = {name[1]: math.prod(weights[name].shape[1:]) for name in ("wq", "wk", "wv")}
        lora_heads, lora_shared = lora.in_groups_of_heads(groups, {**channels, "o": channels["q"]})

        def group(shared: Any, part: Any, dtype: Any) -> Array:
            (norms, lora_shared, y_BTD, rope, segments_BT), (heads, lora_heads) = shared, part
            mine = lora_heads.with_shared(lora_shared)
            heads = {name: turned(name, w, -1, -3) for name, w in heads.items()}
            return self.attend({**norms, **heads}, y_BTD, rope, segments_BT, mine, one_product=True, dtype=dtype)

        return sum_parts(group, (norms, lora_shared, y_BTD, rope, segments_BT), (heads, lora_heads), y_BTD.dtype)


def _cut(weight: Array, axis: int, groups: int) -> Array:
    """Cut the axis of heads into groups, and put them first: `[groups, ...]`."""
    return jnp.moveaxis(weight.reshape(*weight.shape[:axis], groups, -1, *weight.shape[axis + 1 :]), axis, 0)
