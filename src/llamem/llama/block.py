"""One Llama layer: attention and a feed-forward, each after a norm and added to the stream."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llamem.layers.attention import Implementation
from llamem.layers.collectives import enter, leave
from llamem.layers.experts import mixture
from llamem.layers.offload import name_in_pieces
from llamem.layers.parts import order_gradients
from llamem.layers.tiling import tiled_map
from llamem.llama.config import LlamaConfig
from llamem.llama.heads import ATTENTION, OUT, QKV, Attention, Weights, rms_norm
from llamem.llama.lora_products import NO_ADAPTERS, LayerAdapters
from llamem.llama.quantized import QuantizedMatrix
from llamem.llama.sharding import MeshShape

_FEED_FORWARD = ("mlp_norm", "w_router", "w_gate", "w_up", "w_down")


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
        """Compute the layer over a whole sequence; `ACTIVATIONS` lists the names it gives for `llamem.Policy`.

        `head_groups`, `mlp_tiles` and `offload`: see `llamem.Plan`.

        On a mesh, inside `shard_map`, the weights are this device's part of the heads and of F, whole along D, and
        the sequence is this device's part of it. `lora` adds to the seven projections.
        """
        x_BTD = name_in_pieces(x_BTD, "block_in") if "block_in" in offload else checkpoint_name(x_BTD, "block_in")
        y_BTD = enter(rms_norm(x_BTD, self.attn_norm[...], self.config.norm_eps), mesh.tensor_axis)
        attention, weights = Attention(self.config, implementation, mesh), self._weights(ATTENTION)
        if head_groups == 1:
            attn_out_BTD = attention.attend(weights, y_BTD, rope, segments_BT, lora)
        else:
            in_blocks = self._in_blocks(ATTENTION)
            attn_out_BTD = attention.attend_in_groups(weights, y_BTD, rope, segments_BT, lora, head_groups, in_blocks)
        return self._after_attention(x_BTD, attn_out_BTD, mesh.tensor_axis, mlp_tiles, lora)

    def qkv(
        self, x_BTD: Float[Array, "B T D"], rope: tuple[Array, Array], lora: LayerAdapters = NO_ADAPTERS
    ) -> tuple[Float[Array, "B T H h"], Float[Array, "B T K h"], Float[Array, "B T K h"]]:
        """Return queries `[B, T, H, h]`, keys and values `[B, T, K, h]`, rotated to their positions."""
        y_BTD = rms_norm(x_BTD, self.attn_norm[...], self.config.norm_eps)
        return Attention(self.config).project_qkv(self._weights(QKV), y_BTD, rope, lora)

    def finish(
        self, x_BTD: Float[Array, "B T D"], attn_BTHh: Float[Array, "B T H h"], lora: LayerAdapters = NO_ADAPTERS
    ) -> Float[Array, "B T D"]:
        """Add what follows attention: output projection and feed-forward (SwiGLU, or experts)."""
        attn_out_BTD = Attention(self.config).project_out(self._weights(OUT), attn_BTHh, lora)
        return self._after_attention(x_BTD, attn_out_BTD, None, 1, lora)

    def _weights(self, names: tuple[str, ...]) -> Weights:
        """Return weights of the layer as they are stored, or dequantised, once for all tiles and groups."""

        def array(weight: nnx.Param | QuantizedMatrix) -> Array:
            in_blocks = isinstance(weight, QuantizedMatrix)
            return weight.dequantize(self.config.compute_dtype) if in_blocks else weight[...]

        return {name: array(getattr(self, name)) for name in names if hasattr(self, name)}

    def _in_blocks(self, names: tuple[str, ...]) -> frozenset[str]:
        """Return which of these parameters are in blocks of few bits."""
        return frozenset(name for name in names if isinstance(getattr(self, name, None), QuantizedMatrix))

    def _after_attention(
        self, x_BTD: Array, attn_out_BTD: Array, tensor_axis: str | None, tiles: int, lora: LayerAdapters
    ) -> Array:
        x_BTD = x_BTD + checkpoint_name(leave(attn_out_BTD, tensor_axis), "attn_out")
        weights, in_blocks = self._weights(_FEED_FORWARD), self._in_blocks(_FEED_FORWARD)

        def norm(weights: Weights, x_BTD: Array) -> Array:
            return enter(rms_norm(x_BTD, weights["mlp_norm"], self.config.norm_eps), tensor_axis)

        def add(x_BTD: Array, mlp_out_BTD: Array) -> Array:
            return x_BTD + checkpoint_name(leave(mlp_out_BTD, tensor_axis), "mlp_out")

        def whole(weights: Weights, x_BTD: Array, lora: LayerAdapters) -> Array:
            return add(x_BTD, self._feed_forward(weights, norm(weights, x_BTD), lora))

        if tiles == 1:
            return whole(weights, x_BTD, lora)
        if tensor_axis is None:
            return _in_tiles(whole, weights, x_BTD, lora, tiles, in_blocks)
        # Devices meet once, and not once per tile.
        return add(x_BTD, _in_tiles(self._feed_forward, weights, norm(weights, x_BTD), lora, tiles, in_blocks))

    def _feed_forward(self, weights: Weights, y_BTD: Array, lora: LayerAdapters) -> Array:
        dtype = self.config.compute_dtype
        w_gate, w_up, w_down = (weights[name].astype(dtype) for name in ("w_gate", "w_up", "w_down"))
        if not lora.a:  # beside adapters they are frozen
            y_BTD, (w_gate, w_up, w_down) = order_gradients(y_BTD, (w_gate, w_up, w_down))
        if k := self.config.experts_per_token:
            return mixture(y_BTD, weights["w_router"].astype(dtype), w_gate, w_up, w_down, k)
        gate_BTF = checkpoint_name(lora.add("gate", y_BTD, y_BTD @ w_gate), "gate")
        up_BTF = checkpoint_name(lora.add("up", y_BTD, y_BTD @ w_up), "up")
        inner_BTF = jax.nn.silu(gate_BTF) * up_BTF
        return lora.add("down", inner_BTF, inner_BTF @ w_down)


def _in_tiles(
    fn: Callable[[Weights, Array, LayerAdapters], Array],
    weights: Weights,
    x_BTD: Array,
    lora: LayerAdapters,
    tiles: int,
    in_blocks: frozenset[str],
) -> Array:
    """Return `fn(weights, x_BTD, lora)`, which works on tokens one by one, tile by tile.

    What is dequantised enters the loop over tiles outputs first, as its blocks lie: else XLA for GPUs would bring the
    blocks of all layers into the other order before the loop over layers, in a copy.
    """

    def turned(weights: Weights) -> Weights:
        return {name: w.swapaxes(-1, -2) if name in in_blocks else w for name, w in weights.items()}

    if not lora.a:

        def rows(weights: Weights, x_ND: Array) -> Array:
            return fn(turned(weights), x_ND[None], lora)[0]

        return tiled_map(rows, turned(weights), x_BTD.reshape(-1, x_BTD.shape[-1]), tiles).reshape(x_BTD.shape)

    def columns(params: Any, x_TBD: Array) -> Array:
        weights, lora = params
        return fn(turned(weights), x_TBD.swapaxes(0, 1), lora).swapaxes(0, 1)

    # Adapters belong to sequences: a tile is some tokens of each of them.
    return tiled_map(columns, (turned(weights), lora), x_BTD.swapaxes(0, 1), tiles).swapaxes(0, 1)
