"""One Llama layer: norms, rotary positions, attention, feed-forward."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llamem.layers.attention import Implementation, causal_attention
from llamem.layers.collectives import enter, leave
from llamem.layers.context import context_attention
from llamem.layers.experts import mixture
from llamem.llama.config import LlamaConfig
from llamem.llama.lora_products import NO_ADAPTERS, LayerAdapters
from llamem.llama.sharding import MeshShape


def rms_norm(x: Float[Array, "*N D"], scale_D: Float[Array, " D"], eps: float) -> Float[Array, "*N D"]:
    """`x / rms(x) * scale` over the last axis, computed in f32, returned in the type of `x`. Zhang & Sennrich 2019."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * scale_D.astype(jnp.float32)).astype(x.dtype)


def rope_tables(
    config: LlamaConfig, positions: Int[Array, "*B T"]
) -> tuple[Float[Array, "*B T _"], Float[Array, "*B T _"]]:
    """Cosines and sines `[.., T, h / 2]` of RoPE's angles, f32, with Llama 3.1's frequency scaling where configured.

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
    """Turns channel pairs (i, i + h/2) by RoPE's angles: Hugging Face's pairing, so its weights fit unpermuted."""
    cos, sin = (table[..., :, None, :] for table in rope)
    a, b = jnp.split(x_BTNh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNh.dtype)


class Block(nnx.Module):
    """One Llama layer. `Llama.blocks` is one such module whose every parameter has the layers as a first axis more."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        D, H, K, h = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim
        experts, F = ((c.n_experts,), c.moe_d_ff) if c.n_experts else ((), c.d_ff)

        # Unit-variance inputs give unit-variance outputs; projections that write into the residual stream start
        # smaller, so that its variance does not grow with depth.
        def normal(*shape: int, fan_in: int, scale: float = 1.0) -> nnx.Param:
            return nnx.Param(scale * fan_in**-0.5 * jax.random.normal(rngs.params(), shape, c.param_dtype))

        def ones(size: int) -> nnx.Param:
            return nnx.Param(jnp.ones((size,), c.param_dtype))

        self.attn_norm, self.mlp_norm = ones(D), ones(D)
        into_residual = 0.1 / math.sqrt(2 * max(c.n_layers, 1))
        self.wq, self.wk, self.wv = (normal(D, heads, h, fan_in=D) for heads in (H, K, K))
        self.wo = normal(H, h, D, fan_in=H * h, scale=into_residual)
        if c.qk_norm:
            self.q_norm, self.k_norm = ones(h), ones(h)
        if c.n_experts:
            self.w_router = normal(D, c.n_experts, fan_in=D)
        self.w_gate, self.w_up = (normal(*experts, D, F, fan_in=D) for _ in range(2))
        self.w_down = normal(*experts, F, D, fan_in=F, scale=into_residual)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        rope: tuple[Array, Array],
        segments_BT: Int[Array, "B T"] | None = None,
        implementation: Implementation = "auto",
        mesh: MeshShape = MeshShape(),
        lora: LayerAdapters = NO_ADAPTERS,
    ) -> Float[Array, "B T D"]:
        """The layer over a whole sequence; `ACTIVATIONS` lists the names it gives for `llamem.Policy`.

        On a mesh, inside `shard_map`, the weights are this device's part of the heads and of F, whole along D, and
        the sequence is this device's part of it. `lora` adds to the seven projections.
        """
        x_BTD = checkpoint_name(x_BTD, "block_in")
        q_BTHh, k_BTKh, v_BTKh = self.qkv(x_BTD, rope, mesh.tensor_axis, lora)
        if mesh.context_axis:
            attn_BTHh = context_attention(q_BTHh, k_BTKh, v_BTKh, axis=mesh.context_axis, implementation=implementation)
        else:
            attn_BTHh = causal_attention(q_BTHh, k_BTKh, v_BTKh, segments_BT=segments_BT, implementation=implementation)
        return self.finish(x_BTD, attn_BTHh, mesh.tensor_axis, lora)

    def qkv(
        self,
        x_BTD: Float[Array, "B T D"],
        rope: tuple[Array, Array],
        tensor_axis: str | None = None,
        lora: LayerAdapters = NO_ADAPTERS,
    ) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
        """Queries `[B, T, H, h]`, keys and values `[B, T, K, h]`, rotated to their positions."""
        y_BTD = enter(rms_norm(x_BTD, self.attn_norm[...], self.config.norm_eps), tensor_axis)
        q_BTHh = lora.add("q", y_BTD, jnp.einsum("BTD,DHh->BTHh", y_BTD, self._compute(self.wq)))
        k_BTKh = lora.add("k", y_BTD, jnp.einsum("BTD,DKh->BTKh", y_BTD, self._compute(self.wk)))
        v_BTKh = lora.add("v", y_BTD, jnp.einsum("BTD,DKh->BTKh", y_BTD, self._compute(self.wv)))
        if self.config.qk_norm:
            q_BTHh = rms_norm(q_BTHh, self.q_norm[...], self.config.norm_eps)
            k_BTKh = rms_norm(k_BTKh, self.k_norm[...], self.config.norm_eps)
        q_BTHh, k_BTKh = rotate(q_BTHh, rope), rotate(k_BTKh, rope)
        return checkpoint_name(q_BTHh, "q"), checkpoint_name(k_BTKh, "k"), checkpoint_name(v_BTKh, "v")

    def finish(
        self,
        x_BTD: Float[Array, "B T D"],
        attn_BTHh: Float[Array, "B T H h"],
        tensor_axis: str | None = None,
        lora: LayerAdapters = NO_ADAPTERS,
    ) -> Float[Array, "B T D"]:
        """What follows attention: output projection and feed-forward (SwiGLU, or experts), each added to the stream."""
        attn_out_BTD = lora.add("o", attn_BTHh, jnp.einsum("BTHh,HhD->BTD", attn_BTHh, self._compute(self.wo)))
        x_BTD = x_BTD + checkpoint_name(leave(attn_out_BTD, tensor_axis), "attn_out")
        y_BTD = enter(rms_norm(x_BTD, self.mlp_norm[...], self.config.norm_eps), tensor_axis)
        w_gate, w_up, w_down = map(self._compute, (self.w_gate, self.w_up, self.w_down))
        if k := self.config.experts_per_token:
            mlp_out_BTD = mixture(y_BTD, self._compute(self.w_router), w_gate, w_up, w_down, k)
        else:
            gate_BTF = checkpoint_name(lora.add("gate", y_BTD, y_BTD @ w_gate), "gate")
            up_BTF = checkpoint_name(lora.add("up", y_BTD, y_BTD @ w_up), "up")
            inner_BTF = jax.nn.silu(gate_BTF) * up_BTF
            mlp_out_BTD = lora.add("down", inner_BTF, inner_BTF @ w_down)
        return x_BTD + checkpoint_name(leave(mlp_out_BTD, tensor_axis), "mlp_out")

    def _compute(self, param: nnx.Param) -> Array:
        return param[...].astype(self.config.compute_dtype)


# What a block names; with experts also "router".
ACTIVATIONS = ("block_in", "q", "k", "v", "attn", "attn_out", "gate", "up", "mlp_out")
