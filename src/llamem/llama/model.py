"""Llama 3: embedding, L blocks whose weights are stacked, a norm, a head. Shapes stand in names.

Its matrices, tables and norms (RMSNorm) are asked, and never looked into: see `llamem.llama.weights`. What a plan cuts
into groups of heads and tiles of tokens is cut in `llamem.llama.in_parts`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from llamem.layers.attention import Implementation, causal_attention
from llamem.layers.host_memory import name_in_pieces
from llamem.layers.partial_sums import order_gradients
from llamem.layers.stack import apply_stack
from llamem.layers.tile_loops import explicit_mesh, partitioned
from llamem.llama.checked_inputs import check_cache, check_inputs, check_length, check_model
from llamem.llama.config import LlamaConfig
from llamem.llama.in_parts import in_groups_of_heads, in_tiles_of_tokens
from llamem.llama.plan import Plan
from llamem.llama.weights import MATRICES, Matrix, Norm, Table, whole_logits

Rope = tuple[Float[Array, "*B T _"], Float[Array, "*B T _"]]


def rope_tables(config: LlamaConfig, positions: Int[Array, "*B T"]) -> Rope:
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


def rotate(x_BTNh: Float[Array, "B T N h"], rope: Rope) -> Float[Array, "B T N h"]:
    """Turn channel pairs (i, i + h/2) by RoPE's angles: Hugging Face's pairing, so its weights fit unpermuted."""
    cos, sin = (table[..., :, None, :] for table in rope)
    a, b = jnp.split(x_BTNh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNh.dtype)


@dataclasses.dataclass(frozen=True)
class Attend:
    """How queries meet keys and values: causally, over the whole sequence, documents packed into it apart."""

    implementation: Implementation = "auto"

    def own(self, tokens_BT: Int[Array, "B T"]) -> tuple[Int[Array, "B t"], Int[Array, " t"]]:
        """Return the tokens that are computed here, and where in the sequence they stand."""
        return tokens_BT, jnp.arange(tokens_BT.shape[1])

    def __call__(self, q_BTHh: Array, k_BTKh: Array, v_BTKh: Array, segments_BT: Array | None = None) -> Array:
        """Return what each query found, `[B, T, H, h]`."""
        return causal_attention(q_BTHh, k_BTKh, v_BTKh, segments_BT=segments_BT, implementation=self.implementation)


class Attention(NamedTuple):
    """Grouped-query attention of one layer, whose matrices are ready."""

    norm: Norm
    q: Matrix  # [D, H, h]
    k: Matrix  # [D, K, h]
    v: Matrix  # [D, K, h]
    o: Matrix  # [H, h, D]
    q_norm: Norm | None  # Qwen3's
    k_norm: Norm | None

    def __call__(self, x_BTD: Array, rope: Rope, segments_BT: Array | None, attend: Attend) -> Float[Array, "B T D"]:
        """Add to the stream what the queries of a whole sequence find."""
        return self.add(x_BTD, attend(*self.qkv(x_BTD, rope), segments_BT))

    def qkv(self, x_BTD: Array, rope: Rope) -> tuple[Array, Array, Array]:
        """Return queries `[B, T, H, h]`, keys and values `[B, T, K, h]`, rotated to their positions."""
        y_BTD = self.norm(x_BTD)
        q_BTHh, k_BTKh, v_BTKh = self.rotated([m.linear(y_BTD) for m in (self.q, self.k, self.v)], rope)
        return checkpoint_name(q_BTHh, "q"), checkpoint_name(k_BTKh, "k"), checkpoint_name(v_BTKh, "v")

    def rotated(self, products: list[Array], rope: Rope) -> tuple[Array, Array, Array]:
        """Return queries and keys at their positions, and values as they are."""
        q_BTHh, k_BTKh, v_BTKh = products
        q_BTHh = q_BTHh if self.q_norm is None else self.q_norm(q_BTHh)
        k_BTKh = k_BTKh if self.k_norm is None else self.k_norm(k_BTKh)
        return rotate(q_BTHh, rope), rotate(k_BTKh, rope), v_BTKh

    def add(self, x_BTD: Array, attn_BTHh: Array) -> Float[Array, "B T D"]:
        """Add to the stream what the queries found."""
        return self.add_output(x_BTD, self.o.linear(attn_BTHh))

    def add_output(self, x_BTD: Array, attn_out_BTD: Array) -> Float[Array, "B T D"]:
        """Add to the stream attention's output, or the summands of it."""
        return x_BTD + checkpoint_name(self.o.total(attn_out_BTD), "attn_out")


class FeedForward(NamedTuple):
    """SwiGLU of one layer, whose matrices are ready: each token by itself."""

    norm: Norm
    gate: Matrix  # [D, F]
    up: Matrix  # [D, F]
    down: Matrix  # [F, D]

    def __call__(self, x_BTD: Array) -> Float[Array, "B T D"]:
        """Add the feed-forward to the stream."""
        return self.add_output(x_BTD, self.swiglu(self.norm(x_BTD)))

    def swiglu(self, y_BTD: Array) -> Float[Array, "B T D"]:
        """Return `down(silu(gate(y)) * up(y))`."""
        gate, up, down = self.gate, self.up, self.down
        if down.is_trained:
            # Gradients of the weights first, then that of y: else the three [N, F] that they are products of stay.
            y_BTD, (gate, up, down) = order_gradients(y_BTD, (gate, up, down))
        gate_BTF = checkpoint_name(gate.linear(y_BTD), "gate")
        up_BTF = checkpoint_name(up.linear(y_BTD), "up")
        return down.linear(jax.nn.silu(gate_BTF) * up_BTF)

    def add_output(self, x_BTD: Array, mlp_out_BTD: Array) -> Float[Array, "B T D"]:
        """Add to the stream the feed-forward's output, or the summands of it."""
        return x_BTD + checkpoint_name(self.down.total(mlp_out_BTD), "mlp_out")


class Block(nnx.Module):
    """One Llama layer. `Llama.blocks` is one such module whose every parameter has the layers as a first axis more."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        D, H, K, h, F = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff

        # Unit-variance inputs give unit-variance outputs; projections that write into the residual stream start
        # smaller, so that its variance does not grow with depth.
        def matrix(*shape: int, n_in: int = 1, scale: float = 1.0) -> Matrix:
            spread = scale * math.prod(shape[:n_in]) ** -0.5
            return Matrix(spread * jax.random.normal(rngs.params(), shape, c.param_dtype), n_in=n_in)

        def norm(size: int) -> Norm:
            return Norm(jnp.ones((size,), c.param_dtype), eps=c.norm_eps)

        self.attn_norm, self.mlp_norm = norm(D), norm(D)
        into_residual = 0.1 / math.sqrt(2 * max(c.n_layers, 1))
        self.wq, self.wk, self.wv = (matrix(D, heads, h) for heads in (H, K, K))
        self.wo = matrix(H, h, D, n_in=2, scale=into_residual)
        if c.qk_norm:
            self.q_norm, self.k_norm = norm(h), norm(h)
        self.w_gate, self.w_up = matrix(D, F), matrix(D, F)
        self.w_down = matrix(F, D, scale=into_residual)

    def ready(self) -> tuple[Attention, FeedForward]:
        """Return the layer's two halves, their matrices in the type of the products."""
        dtype = self.config.compute_dtype
        q, k, v, o, gate, up, down = (getattr(self, name).ready(dtype) for name in MATRICES)
        q_norm, k_norm = (self.q_norm, self.k_norm) if self.config.qk_norm else (None, None)
        attention = Attention(self.attn_norm, q, k, v, o, q_norm, k_norm)
        return attention, FeedForward(self.mlp_norm, gate, up, down)

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        rope: Rope,
        segments_BT: Int[Array, "B T"] | None = None,
        attend: Attend = Attend(),
        plan: Plan = Plan(),
    ) -> Float[Array, "B T D"]:
        """Compute the layer over a whole sequence; `ACTIVATIONS` lists the names it gives for `llamem.Policy`."""
        attention, feed_forward = self.ready()
        x_BTD = (name_in_pieces if "block_in" in plan.offload else checkpoint_name)(x_BTD, "block_in")
        x_BTD = in_groups_of_heads(attention, plan.head_groups)(x_BTD, rope, segments_BT, attend)
        return in_tiles_of_tokens(feed_forward, plan.mlp_tiles)(x_BTD)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of what was read so far: `[L, B, S, K, h]` each, the first `length` of the S places filled."""

    k_LBSKh: Any  # an Array; Any, since JAX also builds pytrees of placeholders
    v_LBSKh: Any
    length: Any


class Llama(nnx.Module):
    """A Llama-shaped language model.

    `plan` says how it is computed, never what. Rematerialisation applies while training: `model.eval()` turns it off,
    `model.train()` on again.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, plan: Plan = Plan()):
        check_model(config, rngs, plan)
        self.config, self.plan, self.attend = config, plan, Attend(plan.attention)
        self.deterministic = False  # the attribute that nnx's train() and eval() set
        V, D = config.vocab_size, config.d_model

        def table() -> Table:
            return Table(0.02 * jax.random.normal(rngs.params(), (V, D), config.param_dtype))

        self.embedding = table()
        keys_L = jax.random.split(rngs.params(), config.n_layers)
        block = nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0)))
        self.blocks = nnx.merge(
            nnx.graphdef(block), jax.vmap(lambda key: nnx.state(Block(config, rngs=nnx.Rngs(key))))(keys_L)
        )
        self.norm = Norm(jnp.ones((D,), config.param_dtype), eps=config.norm_eps)
        if not config.tied_head:
            self.untied_head = table()

    @property
    def head_table(self) -> Any:
        """The `Table` that makes logits, or what answers in its place; the embedding itself where they are tied."""
        return self.embedding if self.config.tied_head else self.untied_head

    @property
    def head(self) -> Float[Array, "V D"]:
        """The numbers of `head_table`."""
        return self.head_table.at_hand()

    def hidden(
        self, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"] | None = None, *, return_hidden: bool = False
    ) -> Any:
        """Return the last layer's output after the final norm, `[B, T, D]`: what the loss multiplies with the head.

        `segments_BT` numbers documents packed into one sequence (padding counts as one): they do not see each other.
        Positions need not start again with each, since RoPE is relative.
        With `return_hidden=True` also `[L + 1, B, T, D]`, what entered each layer and what left the last, before the
        norm. Raises ValueError for sequences beyond `config.max_seq_len`, and for a token id outside the vocabulary
        where it is known. In a program that is traced it is not: there such an id gives NaN.
        """
        check_inputs(tokens_BT, segments_BT, self.config)
        graphdef, state = nnx.split(self)
        if explicit_mesh((state, tokens_BT)) is None:
            return self._hidden(tokens_BT, segments_BT, return_hidden)

        def of_arrays(state: nnx.State, tokens_BT: Array, segments_BT: Array | None) -> Any:
            return nnx.merge(graphdef, state)._hidden(tokens_BT, segments_BT, return_hidden)

        rows = jax.typeof(tokens_BT).sharding.spec  # results lie as the tokens do
        specs = (PartitionSpec(*rows), PartitionSpec(None, *rows)) if return_hidden else PartitionSpec(*rows)
        return partitioned(of_arrays, specs, state, tokens_BT, segments_BT)

    def _hidden(self, tokens_BT: Array, segments_BT: Array | None, return_hidden: bool) -> Any:
        own_BT, positions_T = self.attend.own(tokens_BT)
        layer, remat = self.layer(positions_T, segments_BT), None if self.deterministic else self.plan.policy
        options = {"mode": self.plan.mode, "remat": remat, "return_hidden": return_hidden}
        result = apply_stack(layer, nnx.state(self.blocks), self.embed(own_BT), **options)
        return (self.norm(result[0]), result[1]) if return_hidden else self.norm(result)

    def embed(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return what enters the first layer, in the products' type."""
        return self.embedding.look_up(tokens_BT, self.config.compute_dtype)

    def layer(self, positions_T: Int[Array, " T"], segments_BT: Int[Array, "B T"] | None = None) -> Any:
        """Return `layer(params, x_BTD)`: one layer, of its parameters without the axis of layers, over tokens."""
        graphdef, rope = nnx.graphdef(self.blocks), rope_tables(self.config, positions_T)

        def layer(params: nnx.State, x_BTD: Array) -> Array:
            return nnx.merge(graphdef, params)(x_BTD, rope, segments_BT, self.attend, self.plan)

        return layer

    def __call__(
        self, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Return all logits, f32. To train use `hidden` and a tiled loss: this array is the one the course is about."""
        return self.logits(self.hidden(tokens_BT, segments_BT))

    def logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return all logits of what `hidden` returned."""
        x_BTW, matrices = self.head_table.ready(self.config.compute_dtype).beside(x_BTD)
        ends = np.cumsum([matrix.shape[1] for matrix in matrices])[:-1]
        return sum(map(whole_logits, jnp.split(x_BTW, ends, axis=-1), matrices))  # pyrefly: ignore

    def empty_cache(self, batch_size: int, max_len: int) -> KVCache:
        """Return a cache for `batch_size` sequences of up to `max_len` tokens: 2 L B S K h of the compute type."""
        c = self.config
        check_length(max_len, c, batch_size)
        shape = (c.n_layers, batch_size, max_len, c.n_kv_heads, c.head_dim)
        # Two calls, two buffers: a donated cache may not hold one buffer twice.
        return KVCache(jnp.zeros(shape, c.compute_dtype), jnp.zeros(shape, c.compute_dtype), jnp.zeros((), jnp.int32))

    def decode(self, tokens_BT: Int[Array, "B T"], cache: KVCache) -> tuple[Float[Array, "B V"], KVCache]:
        """Read T more tokens after those in the cache; return the logits that follow the last, and the longer cache.

        Raises TypeError for no cache, ValueError where `cache.length + T` is known to be beyond its S places. In a
        program that is traced the length is not known: there the logits are NaN. No training option touches this path.
        """
        check_cache(cache, KVCache, self.config, tokens_BT)
        positions_T = cache.length + jnp.arange(tokens_BT.shape[1])
        graphdef, rope = nnx.graphdef(self.blocks), rope_tables(self.config, positions_T)

        def layer(params: nnx.State, carry: tuple[Array, Array, Array], i: Array) -> tuple[Array, Array, Array]:
            x_BTD, k_LBSKh, v_LBSKh = carry
            attention, feed_forward = nnx.merge(graphdef, params).ready()
            q_BTHh, k_BTKh, v_BTKh = attention.qkv(x_BTD, rope)
            # The cache rides in the carry and is written before it is read: XLA then updates it in place.
            start = (i, 0, cache.length, 0, 0)
            k_LBSKh = jax.lax.dynamic_update_slice(k_LBSKh, k_BTKh[None], start)
            v_LBSKh = jax.lax.dynamic_update_slice(v_LBSKh, v_BTKh[None], start)
            attn_BTHh = causal_attention(q_BTHh, k_LBSKh[i], v_LBSKh[i], q_positions=positions_T)
            return feed_forward(attention.add(x_BTD, attn_BTHh)), k_LBSKh, v_LBSKh

        carry, numbers = (self.embed(tokens_BT), cache.k_LBSKh, cache.v_LBSKh), jnp.arange(self.config.n_layers)
        x_BTD, k_LBSKh, v_LBSKh = apply_stack(layer, nnx.state(self.blocks), carry, numbers)
        logits_BV = self.logits(self.norm(x_BTD[:, -1:]))[:, 0]
        length = cache.length + tokens_BT.shape[1]
        return jnp.where(length <= k_LBSKh.shape[2], logits_BV, jnp.nan), KVCache(k_LBSKh, v_LBSKh, length)
