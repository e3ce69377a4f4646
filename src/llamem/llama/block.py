"""One Llama layer: norms, rotary positions, attention, feed-forward."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llamem.layers.attention import Implementation, causal_attention
from llamem.layers.collectives import enter, leave
from llamem.layers.context import context_attention
from llamem.layers.experts import mixture
from llamem.layers.offload import name_in_pieces
from llamem.layers.parts import map_rows, order_gradients, sum_parts
from llamem.llama.config import LlamaConfig
from llamem.llama.lora_products import NO_ADAPTERS, LayerAdapters
from llamem.llama.quantized import QuantizedMatrix
from llamem.llama.sharding import PARAMETERS, MeshShape, parameter_name

# What attention reads of a block beside its first norm, and what the feed-forward reads.
_ATTENTION = ("wq", "wk", "wv", "wo", "q_norm", "k_norm")
_FEED_FORWARD = ("mlp_norm", "w_router", "w_gate", "w_up", "w_down")


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
        *,
        head_groups: int = 1,
        mlp_tiles: int = 1,
        offload: tuple[str, ...] = (),
    ) -> Float[Array, "B T D"]:
        """The layer over a whole sequence; `ACTIVATIONS` lists the names it gives for `llamem.Policy`.

        `head_groups`, `mlp_tiles` and `offload`: see `llamem.Plan`.

        On a mesh, inside `shard_map`, the weights are this device's part of the heads and of F, whole along D, and
        the sequence is this device's part of it. `lora` adds to the seven projections.
        """
        x_BTD = name_in_pieces(x_BTD, "block_in") if "block_in" in offload else checkpoint_name(x_BTD, "block_in")
        y_BTD = enter(rms_norm(x_BTD, self.attn_norm[...], self.config.norm_eps), mesh.tensor_axis)
        if head_groups == 1:
            attn_BTHh = self._attend(y_BTD, rope, segments_BT, implementation, mesh, lora)
            return self.finish(x_BTD, attn_BTHh, mesh.tensor_axis, mlp_tiles, lora)
        graphdef, mine, others = nnx.split(self._in_numbers(_ATTENTION), lambda path, _: path[0] in _ATTENTION, ...)
        heads, shared = _groups_of_heads(mine, head_groups)
        channels = {t: math.prod(w.shape[-2:]) for t, w in (("q", self.wq), ("k", self.wk), ("v", self.wv))}
        lora_heads, lora_shared = lora.in_groups_of_heads(head_groups, {**channels, "o": channels["q"]})

        def group(shared: Any, heads: Any, dtype: Any) -> Array:
            (weights, lora), y_BTD, rope, segments_BT = shared
            heads, lora_heads = heads
            weights = jax.tree.map(lambda a, b: b if a is None else a, weights, heads, is_leaf=lambda a: a is None)
            block, lora = nnx.merge(graphdef, weights, others), lora_heads.with_shared(lora)
            attn_BTHh = block._attend(y_BTD, rope, segments_BT, implementation, mesh, lora, together=True)
            return lora.add("o", attn_BTHh, block._project(attn_BTHh, dtype))

        everywhere = (shared, lora_shared), y_BTD, rope, segments_BT
        attn_out_BTD = sum_parts(group, everywhere, (heads, lora_heads), x_BTD.dtype)
        return self._feed_forward(
            self._after_attention(x_BTD, attn_out_BTD, mesh.tensor_axis), mesh.tensor_axis, mlp_tiles, lora
        )

    def qkv(
        self, x_BTD: Float[Array, "B T D"], rope: tuple[Array, Array], lora: LayerAdapters = NO_ADAPTERS
    ) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
        """Queries `[B, T, H, h]`, keys and values `[B, T, K, h]`, rotated to their positions."""
        return self._qkv(rms_norm(x_BTD, self.attn_norm[...], self.config.norm_eps), rope, lora)

    def _attend(
        self,
        y_BTD: Array,
        rope: tuple[Array, Array],
        segments_BT: Array | None,
        how: Implementation,
        mesh: MeshShape,
        lora: LayerAdapters = NO_ADAPTERS,
        together: bool = False,
    ) -> Array:
        q_BTHh, k_BTKh, v_BTKh = self._qkv(y_BTD, rope, lora, together)
        if mesh.context_axis:
            return context_attention(q_BTHh, k_BTKh, v_BTKh, axis=mesh.context_axis, implementation=how)
        return causal_attention(q_BTHh, k_BTKh, v_BTKh, segments_BT=segments_BT, implementation=how)

    def _qkv(
        self, y_BTD: Array, rope: tuple[Array, Array], lora: LayerAdapters, together: bool = False
    ) -> tuple[Array, Array, Array]:
        """`together`: in one product, whose gradients go back at once: three lay out a `[B, T, D]` each."""
        weights = [self._compute(w) for w in (self.wq, self.wk, self.wv)]
        if together:
            heads = np.cumsum([w.shape[1] for w in weights])
            product_BTNh = jnp.einsum("BTD,DNh->BTNh", y_BTD, jnp.concatenate(weights, axis=1))
            products = jnp.split(product_BTNh, heads[:-1], axis=2)
        else:
            products = [jnp.einsum("BTD,DNh->BTNh", y_BTD, w) for w in weights]
        q_BTHh, k_BTKh, v_BTKh = (lora.add(name, y_BTD, out) for name, out in zip("qkv", products, strict=True))
        if self.config.qk_norm:
            q_BTHh = rms_norm(q_BTHh, self.q_norm[...], self.config.norm_eps)
            k_BTKh = rms_norm(k_BTKh, self.k_norm[...], self.config.norm_eps)
        q_BTHh, k_BTKh = rotate(q_BTHh, rope), rotate(k_BTKh, rope)
        if together:
            (q_BTHh, k_BTKh), v_BTKh = order_gradients((q_BTHh, k_BTKh), v_BTKh)
        return checkpoint_name(q_BTHh, "q"), checkpoint_name(k_BTKh, "k"), checkpoint_name(v_BTKh, "v")

    def finish(
        self,
        x_BTD: Float[Array, "B T D"],
        attn_BTHh: Float[Array, "B T H h"],
        tensor_axis: str | None = None,
        mlp_tiles: int = 1,
        lora: LayerAdapters = NO_ADAPTERS,
    ) -> Float[Array, "B T D"]:
        """What follows attention: output projection and feed-forward (SwiGLU, or experts), each added to the stream."""
        x_BTD = self._after_attention(x_BTD, lora.add("o", attn_BTHh, self._project(attn_BTHh)), tensor_axis)
        return self._feed_forward(x_BTD, tensor_axis, mlp_tiles, lora)

    def _project(self, attn_BTHh: Array, dtype: Any = None) -> Array:
        return jnp.einsum("BTHh,HhD->BTD", attn_BTHh, self._compute(self.wo), preferred_element_type=dtype)

    def _after_attention(self, x_BTD: Array, attn_out_BTD: Array, tensor_axis: str | None) -> Array:
        return x_BTD + checkpoint_name(leave(attn_out_BTD, tensor_axis), "attn_out")

    def _feed_forward(
        self, x_BTD: Array, tensor_axis: str | None, tiles: int = 1, lora: LayerAdapters = NO_ADAPTERS
    ) -> Array:
        if tiles > 1 and tensor_axis is None:
            whole = lambda block, x_BTD, lora: block._feed_forward(x_BTD, None, lora=lora)  # noqa: E731
            return self._in_tiles(whole, x_BTD, tiles, lora)
        y_BTD = enter(rms_norm(x_BTD, self.mlp_norm[...], self.config.norm_eps), tensor_axis)
        if tiles > 1:  # devices meet once, and not once per tile
            mlp_out_BTD = self._in_tiles(lambda block, y_BTD, lora: block._mlp(y_BTD, lora), y_BTD, tiles, lora)
        else:
            mlp_out_BTD = self._mlp(y_BTD, lora)
        return x_BTD + checkpoint_name(leave(mlp_out_BTD, tensor_axis), "mlp_out")

    def _in_tiles(
        self, fn: Callable[["Block", Array, LayerAdapters], Array], x_BTD: Array, tiles: int, lora: LayerAdapters
    ) -> Array:
        """`fn(self, x_BTD, lora)` for a `fn` of the feed-forward's weights, over tiles of tokens."""
        whole = self._in_numbers(_FEED_FORWARD)  # once, and not for every tile
        graphdef, mine, others = nnx.split(whole, lambda path, _: path[0] in _FEED_FORWARD, ...)

        if not lora.a:

            def rows(weights: nnx.State, x_ND: Array) -> Array:
                return fn(nnx.merge(graphdef, weights, others), x_ND[None], lora)[0]

            return map_rows(rows, mine, x_BTD.reshape(-1, x_BTD.shape[-1]), tiles).reshape(x_BTD.shape)

        def columns(params: tuple[nnx.State, LayerAdapters], x_TBD: Array) -> Array:
            weights, lora = params
            return fn(nnx.merge(graphdef, weights, others), x_TBD.swapaxes(0, 1), lora).swapaxes(0, 1)

        # Adapters belong to sequences: a tile is some tokens of each of them.
        return map_rows(columns, (mine, lora), x_BTD.swapaxes(0, 1), tiles).swapaxes(0, 1)

    def _mlp(self, y_BTD: Array, lora: LayerAdapters = NO_ADAPTERS) -> Array:
        w_gate, w_up, w_down = map(self._compute, (self.w_gate, self.w_up, self.w_down))
        if not lora.a:
            y_BTD, (w_gate, w_up, w_down) = order_gradients(y_BTD, (w_gate, w_up, w_down))
        if k := self.config.experts_per_token:
            experts = lora.of_experts(w_up.shape[-1])
            return mixture(y_BTD, self._compute(self.w_router), w_gate, w_up, w_down, k, experts)
        gate_BTF = checkpoint_name(lora.add("gate", y_BTD, y_BTD @ w_gate), "gate")
        up_BTF = checkpoint_name(lora.add("up", y_BTD, y_BTD @ w_up), "up")
        inner_BTF = jax.nn.silu(gate_BTF) * up_BTF
        return lora.add("down", inner_BTF, inner_BTF @ w_down)

    def _in_numbers(self, names: tuple[str, ...]) -> "Block":
        """This layer with these matrices dequantised, where they are in blocks: what cuts weights cuts numbers."""
        found = [name for name in names if isinstance(getattr(self, name, None), QuantizedMatrix)]
        block = nnx.clone(self) if found else self
        for name in found:
            setattr(block, name, nnx.Param(self._compute(getattr(self, name))))
        return block

    def _compute(self, param: nnx.Param | QuantizedMatrix) -> Array:
        if isinstance(param, QuantizedMatrix):
            return param.dequantize(self.config.compute_dtype)
        return param[...].astype(self.config.compute_dtype)


def _groups_of_heads(weights: nnx.State, groups: int) -> tuple[nnx.State, nnx.State]:
    """Weights that have heads, cut into groups of them, `[groups, ...]`; and those that all heads share. Each with None
    for the others.
    """

    def axis_of_heads(path: tuple[Any, ...], weight: Array) -> int | None:
        names = PARAMETERS[str(parameter_name(path))]
        found = [i for i, name in enumerate(names) if name in ("heads", "kv_heads")]
        return weight.ndim - len(names) + found[0] if found else None

    def cut(path: tuple[Any, ...], weight: Array) -> Array | None:
        axis = axis_of_heads(path, weight)
        if axis is None:
            return None
        shape = (*weight.shape[:axis], groups, -1, *weight.shape[axis + 1 :])
        return jnp.moveaxis(weight.reshape(shape), axis, 0)

    def shared(path: tuple[Any, ...], weight: Array) -> Array | None:
        return weight if axis_of_heads(path, weight) is None else None

    return jax.tree.map_with_path(cut, weights), jax.tree.map_with_path(shared, weights)


# What a block names; with experts also "router".
ACTIVATIONS = ("block_in", "q", "k", "v", "attn", "attn_out", "gate", "up", "mlp_out")
