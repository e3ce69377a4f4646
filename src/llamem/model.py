"""Llama 3 in flax nnx: embedding, L blocks whose parameters are stacked once, a norm, a head `[V, D]`, tied or not."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llamem.attention import Implementation, attention
from llamem.config import LlamaConfig
from llamem.moe import mixture
from llamem.remat import Policy
from llamem.stack import Mode, apply_stack


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
    ) -> Float[Array, "B T D"]:
        """The layer over a whole sequence; `ACTIVATIONS` lists the names it gives for `llamem.Policy`."""
        x_BTD = checkpoint_name(x_BTD, "block_in")
        attn_BTHh = attention(*self.qkv(x_BTD, rope), segments_BT=segments_BT, implementation=implementation)
        return self.finish(x_BTD, attn_BTHh)

    def qkv(self, x_BTD: Float[Array, "B T D"], rope: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Queries `[B, T, H, h]`, keys and values `[B, T, K, h]`, rotated to their positions."""
        y_BTD = rms_norm(x_BTD, self.attn_norm[...], self.config.norm_eps)
        q_BTHh = jnp.einsum("BTD,DHh->BTHh", y_BTD, self._compute(self.wq))
        k_BTKh = jnp.einsum("BTD,DKh->BTKh", y_BTD, self._compute(self.wk))
        v_BTKh = jnp.einsum("BTD,DKh->BTKh", y_BTD, self._compute(self.wv))
        if self.config.qk_norm:
            q_BTHh = rms_norm(q_BTHh, self.q_norm[...], self.config.norm_eps)
            k_BTKh = rms_norm(k_BTKh, self.k_norm[...], self.config.norm_eps)
        q_BTHh, k_BTKh = rotate(q_BTHh, rope), rotate(k_BTKh, rope)
        return checkpoint_name(q_BTHh, "q"), checkpoint_name(k_BTKh, "k"), checkpoint_name(v_BTKh, "v")

    def finish(self, x_BTD: Float[Array, "B T D"], attn_BTHh: Float[Array, "B T H h"]) -> Float[Array, "B T D"]:
        """What follows attention: output projection and feed-forward (SwiGLU, or experts), each added to the stream."""
        attn_out_BTD = jnp.einsum("BTHh,HhD->BTD", attn_BTHh, self._compute(self.wo))
        x_BTD = x_BTD + checkpoint_name(attn_out_BTD, "attn_out")
        y_BTD = rms_norm(x_BTD, self.mlp_norm[...], self.config.norm_eps)
        w_gate, w_up, w_down = map(self._compute, (self.w_gate, self.w_up, self.w_down))
        if k := self.config.experts_per_token:
            mlp_out_BTD = mixture(y_BTD, self._compute(self.w_router), w_gate, w_up, w_down, k)
        else:
            gate_BTF = checkpoint_name(y_BTD @ w_gate, "gate")
            up_BTF = checkpoint_name(y_BTD @ w_up, "up")
            mlp_out_BTD = (jax.nn.silu(gate_BTF) * up_BTF) @ w_down
        return x_BTD + checkpoint_name(mlp_out_BTD, "mlp_out")

    def _compute(self, param: nnx.Param) -> Array:
        return param[...].astype(self.config.compute_dtype)


# What a block names; with experts also "router".
ACTIVATIONS = ("block_in", "q", "k", "v", "attn", "attn_out", "gate", "up", "mlp_out")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of what was read so far: `[L, B, S, K, h]` each, the first `length` of the S places filled."""

    k_LBSKh: Any  # an Array; Any, since JAX also builds pytrees of placeholders
    v_LBSKh: Any
    length: Any


class Llama(nnx.Module):
    """A Llama-shaped language model.

    `mode`, `remat` (see `apply_stack`) and `attention` (see `attention.attention`) choose how it is computed, never
    what. Rematerialisation applies while training: `model.eval()` turns it off, `model.train()` on again.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        rngs: nnx.Rngs,
        mode: Mode = "scan",
        remat: str | Policy | None = "nothing",
        attention: Implementation = "auto",
    ):
        self.config, self.mode, self.remat, self.attention = config, mode, remat, attention
        self.deterministic = False  # the attribute that nnx's train() and eval() set
        V, D = config.vocab_size, config.d_model

        def table() -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), (V, D), config.param_dtype))

        self.embedding = table()
        keys_L = jax.random.split(rngs.params(), config.n_layers)
        one = nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0)))
        self.blocks = nnx.merge(
            nnx.graphdef(one), jax.vmap(lambda key: nnx.state(Block(config, rngs=nnx.Rngs(key))))(keys_L)
        )
        self.norm = nnx.Param(jnp.ones((D,), config.param_dtype))
        if not config.tied_head:
            self.untied_head = table()

    @property
    def head(self) -> Float[Array, "V D"]:
        """The output head; the embedding itself where they are tied."""
        return (self.embedding if self.config.tied_head else self.untied_head)[...]

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
        *,
        return_hidden: bool = False,
    ) -> Any:
        """The last layer's output after the final norm, `[B, T, D]`: what the loss multiplies with the head.

        `segments_BT` numbers documents packed into one sequence (padding counts as one): they do not see each other.
        Positions need not start again with each, since RoPE is relative.
        With `return_hidden=True` also `[L + 1, B, T, D]`, what entered each layer and what left the last, before the
        norm.
        Raises ValueError for sequences beyond `config.max_seq_len`. A token id outside the vocabulary gives NaN.
        """
        self._check_length(tokens_BT.shape[1])
        rope = rope_tables(self.config, jnp.arange(tokens_BT.shape[1]))
        graphdef, stacked = nnx.split(self.blocks)

        def layer(params: nnx.State, x_BTD: Array) -> Array:
            return nnx.merge(graphdef, params)(x_BTD, rope, segments_BT, self.attention)

        result = apply_stack(
            layer,
            stacked,
            self._embed(tokens_BT),
            mode=self.mode,
            remat=None if self.deterministic else self.remat,
            return_hidden=return_hidden,
        )
        x_BTD, hidden = result if return_hidden else (result, None)
        x_BTD = rms_norm(x_BTD, self.norm[...], self.config.norm_eps)
        return (x_BTD, hidden) if return_hidden else x_BTD

    def __call__(
        self, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Logits, f32. For training use `hidden` and a tiled loss: this array is the one the course is about."""
        return self._logits(self.hidden(tokens_BT, segments_BT))

    def empty_cache(self, batch_size: int, max_len: int) -> KVCache:
        """A cache for `batch_size` sequences of up to `max_len` tokens: 2 L B S K h elements of the compute type."""
        c = self.config
        self._check_length(max_len)
        shape = (c.n_layers, batch_size, max_len, c.n_kv_heads, c.head_dim)
        # Two calls, two buffers: a donated cache may not hold one buffer twice.
        return KVCache(jnp.zeros(shape, c.compute_dtype), jnp.zeros(shape, c.compute_dtype), jnp.zeros((), jnp.int32))

    def decode(self, tokens_BT: Int[Array, "B T"], cache: KVCache) -> tuple[Float[Array, "B V"], KVCache]:
        """Reads T more tokens after those in the cache: the logits that follow the last one, and the longer cache.

        The caller keeps `cache.length + T` within the cache's S places. No training option touches this path.
        """
        T = tokens_BT.shape[1]
        positions_T = cache.length + jnp.arange(T)
        rope = rope_tables(self.config, positions_T)
        graphdef, stacked = nnx.split(self.blocks)

        def layer(params: nnx.State, carry: tuple[Array, Array, Array], i: Array) -> tuple[Array, Array, Array]:
            block = nnx.merge(graphdef, params)
            x_BTD, k_LBSKh, v_LBSKh = carry
            q_BTHh, k_BTKh, v_BTKh = block.qkv(x_BTD, rope)
            # The cache rides in the carry and is written before it is read: XLA then updates it in place.
            start = (i, 0, cache.length, 0, 0)
            k_LBSKh = jax.lax.dynamic_update_slice(k_LBSKh, k_BTKh[None], start)
            v_LBSKh = jax.lax.dynamic_update_slice(v_LBSKh, v_BTKh[None], start)
            attn_BTHh = attention(q_BTHh, k_LBSKh[i], v_LBSKh[i], q_positions=positions_T)
            return block.finish(x_BTD, attn_BTHh), k_LBSKh, v_LBSKh

        start = (self._embed(tokens_BT), cache.k_LBSKh, cache.v_LBSKh)
        x_BTD, k_LBSKh, v_LBSKh = apply_stack(layer, stacked, start, jnp.arange(self.config.n_layers))
        x_BTD = rms_norm(x_BTD[:, -1:], self.norm[...], self.config.norm_eps)
        return self._logits(x_BTD)[:, 0], KVCache(k_LBSKh, v_LBSKh, cache.length + T)

    def _embed(self, tokens_BT: Array) -> Array:
        return self.embedding[...].astype(self.config.compute_dtype)[tokens_BT]

    def _logits(self, x_BTD: Array) -> Array:
        head_VD = self.head.astype(self.config.compute_dtype)
        return jnp.einsum("BTD,VD->BTV", x_BTD, head_VD, preferred_element_type=jnp.float32)

    def _check_length(self, T: int) -> None:
        if self.config.max_seq_len < T:
            raise ValueError(
                f"a sequence of {T} tokens is longer than this model's max_seq_len={self.config.max_seq_len}: RoPE "
                f"was not "
                "set up for such positions. Shorten the sequence, or config.replace(max_seq_len=..., rope_scaling=...)."
            )
