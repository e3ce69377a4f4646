"""Llama 3 in flax nnx: embedding, L blocks whose parameters are stacked once, a norm, a head `[V, D]`, tied or not."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from llamem._checks import check_whole, show
from llamem.layers.attention import causal_attention
from llamem.layers.context import local_positions
from llamem.layers.stack import apply_stack
from llamem.layers.streaming import fetch
from llamem.llama.block import Block
from llamem.llama.config import LlamaConfig
from llamem.llama.heads import rms_norm, rope_tables
from llamem.llama.inputs import check_of_sequences, check_tokens
from llamem.llama.lora import Adapters, check_adapters
from llamem.llama.lora_products import NO_ADAPTERS, LayerAdapters, adapted_head, layers_of
from llamem.llama.plan import Plan
from llamem.llama.sharding import gather_weights
from llamem.llama.tables import embed, whole_logits


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

    def __init__(
        self,
        config: LlamaConfig,
        *,
        rngs: nnx.Rngs,
        plan: Plan = Plan(),
    ):
        if not isinstance(config, LlamaConfig) or not isinstance(rngs, nnx.Rngs) or not isinstance(plan, Plan):
            raise TypeError(
                f"Llama({config!r}, rngs={rngs!r}, plan={plan!r}): expected a llamem.LlamaConfig, such as "
                "LlamaConfig.from_name('tiny'), an nnx.Rngs, such as nnx.Rngs(0), and a llamem.Plan."
            )
        check_heads(config, plan)
        self.config, self.plan = config, plan
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
        """The output head; the embedding itself where they are tied. With weights on the host it is fetched."""
        return self.table("embedding" if self.config.tied_head else "untied_head")

    def table(self, name: str) -> Float[Array, "V D"]:
        """Return the embedding or the untied head, by its name; with weights on the host it is fetched."""
        return self._at_hand(getattr(self, name)[...])

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
        *,
        return_hidden: bool = False,
        adapters: Adapters | None = None,
        adapter_B: Int[Array, " B"] | None = None,
    ) -> Any:
        """Return the last layer's output after the final norm, `[B, T, D]`: what the loss multiplies with the head.

        With `return_hidden=True` also `[L + 1, B, T, D]`, what entered each layer and what left the last, before the
        norm.

        `segments_BT` numbers documents packed into one sequence (padding counts as one): they do not see each other.
        Positions need not start again with each, since RoPE is relative.
        `adapters` add to what they adapt; `adapter_B` says which of them each sequence uses, and may be left out where
        there is one. Those of the head are not in here but in `llamem.llama.adapted_head`.
        With a mesh in the plan this is one device's part of it, inside `shard_map`: the parameters are its parts, the
        tokens whole sequences of its part of the batch, and the result is for its `local_positions`.
        Raises ValueError for sequences beyond `config.max_seq_len`, for adapters of another model, and for a token id
        outside the vocabulary or an adapter that is not there, where they are known. In a program that is traced they
        are not: there such an id gives NaN.
        """
        check_tokens(tokens_BT, self.config.vocab_size)
        adapter_B = check_adapters(adapters, adapter_B, tokens_BT.shape[0], self.config)
        if segments_BT is not None:
            check_of_sequences("segments_BT", segments_BT, tokens_BT.shape, "the document of each token")
        mesh = self.plan.mesh
        mesh.check_inside()
        self._check_length(tokens_BT.shape[1])
        positions_T = local_positions(tokens_BT.shape[1], mesh.context_axis)
        if mesh.context_axis:
            if segments_BT is not None:
                raise ValueError(
                    "segments_BT: packed documents are not computed with context parallelism. Give every document a "
                    "sequence of its own, or choose a mesh with context=1."
                )
            tokens_BT = tokens_BT[:, positions_T]
        graphdef, stacked = nnx.split(self.blocks)
        compute = self._layer(graphdef, rope_tables(self.config, positions_T), segments_BT)

        def layer(params: nnx.State, x_BTD: Array, part: Any = None) -> Array:
            lora = LayerAdapters.of(part, adapter_B, mesh.tensor_axis)
            return compute(self._at_hand(params), x_BTD, lora)

        result = apply_stack(
            layer,
            stacked,
            self.embed(tokens_BT),
            layers_of(adapters),
            mode=self.plan.mode,
            remat=None if self.deterministic else self.plan.policy,
            return_hidden=return_hidden,
        )
        x_BTD, hidden = result if return_hidden else (result, None)
        x_BTD = rms_norm(x_BTD, self.norm[...], self.config.norm_eps)
        return (x_BTD, hidden) if return_hidden else x_BTD

    def embed(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return what enters the first layer, in the products' type. On a mesh inside `shard_map`, as `hidden`."""
        return embed(self.table("embedding"), tokens_BT, self.config, self.plan.mesh)

    def layer(self, length: int, segments_BT: Int[Array, "B T"] | None = None) -> Callable[[nnx.State, Array], Array]:
        """Return `layer(params, x_BTD)`: one layer over sequences of `length` tokens, without a mesh or adapters.

        `params` are those of `blocks`, without the axis of layers, on the device.
        """
        self._check_length(length)
        return self._layer(nnx.graphdef(self.blocks), rope_tables(self.config, jnp.arange(length)), segments_BT)

    def _layer(
        self, graphdef: nnx.GraphDef, rope: tuple[Array, Array], segments_BT: Array | None
    ) -> Callable[..., Array]:
        """Compute one layer as the plan says, of its parameters, what enters it, and what adapters add."""
        plan, mesh = self.plan, self.plan.mesh
        tools = {name: getattr(plan, name) for name in ("head_groups", "mlp_tiles", "offload")}

        def layer(params: nnx.State, x_BTD: Array, lora: LayerAdapters = NO_ADAPTERS) -> Array:
            # Gathered in here: rematerialised with the layer, and so never whole for more than one layer.
            params = gather_weights(params, mesh, self.config.compute_dtype)
            return nnx.merge(graphdef, params)(x_BTD, rope, segments_BT, plan.attention, mesh, lora, **tools)

        return layer

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"] | None = None,
        *,
        adapters: Adapters | None = None,
        adapter_B: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Return all logits, f32. To train use `hidden` and a tiled loss: this array is the one the course is about."""
        x_BTD = self.hidden(tokens_BT, segments_BT, adapters=adapters, adapter_B=adapter_B)
        return self._logits(x_BTD, adapters, check_adapters(adapters, adapter_B, tokens_BT.shape[0], self.config))

    def empty_cache(self, batch_size: int, max_len: int) -> KVCache:
        """Return a cache for `batch_size` sequences of up to `max_len` tokens: 2 L B S K h of the compute type."""
        c = self.config
        batch_size, max_len = check_whole("batch_size", batch_size), check_whole("max_len", max_len)
        self._check_length(max_len)
        shape = (c.n_layers, batch_size, max_len, c.n_kv_heads, c.head_dim)
        # Two calls, two buffers: a donated cache may not hold one buffer twice.
        return KVCache(jnp.zeros(shape, c.compute_dtype), jnp.zeros(shape, c.compute_dtype), jnp.zeros((), jnp.int32))

    def decode(
        self,
        tokens_BT: Int[Array, "B T"],
        cache: KVCache,
        *,
        adapters: Adapters | None = None,
        adapter_B: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B V"], KVCache]:
        """Read T more tokens after those in the cache; return the logits that follow the last, and the longer cache.

        Raises TypeError for no cache, ValueError where `cache.length + T` is known to be beyond its S places. In a
        program that is traced the length is not known: there the logits are NaN. No training option touches this path.
        A cache belongs to the adapters with which it was filled: see `hidden`.
        """
        check_tokens(tokens_BT, self.config.vocab_size)
        adapter_B = check_adapters(adapters, adapter_B, tokens_BT.shape[0], self.config)
        T = tokens_BT.shape[1]
        places = self._check_cache(cache, *tokens_BT.shape)
        positions_T = cache.length + jnp.arange(T)
        rope = rope_tables(self.config, positions_T)
        graphdef, stacked = nnx.split(self.blocks)

        def layer(
            params: nnx.State, carry: tuple[Array, Array, Array], per_layer: tuple[Array, Any]
        ) -> tuple[Array, Array, Array]:
            block = nnx.merge(graphdef, self._at_hand(params))
            i, part = per_layer
            lora = LayerAdapters.of(part, adapter_B)
            x_BTD, k_LBSKh, v_LBSKh = carry
            q_BTHh, k_BTKh, v_BTKh = block.qkv(x_BTD, rope, lora=lora)
            # The cache rides in the carry and is written before it is read: XLA then updates it in place.
            start = (i, 0, cache.length, 0, 0)
            k_LBSKh = jax.lax.dynamic_update_slice(k_LBSKh, k_BTKh[None], start)
            v_LBSKh = jax.lax.dynamic_update_slice(v_LBSKh, v_BTKh[None], start)
            attn_BTHh = causal_attention(q_BTHh, k_LBSKh[i], v_LBSKh[i], q_positions=positions_T)
            return block.finish(x_BTD, attn_BTHh, lora=lora), k_LBSKh, v_LBSKh

        x_BTD = embed(self.table("embedding"), tokens_BT, self.config)
        per_layer = jnp.arange(self.config.n_layers), layers_of(adapters)
        x_BTD, k_LBSKh, v_LBSKh = apply_stack(layer, stacked, (x_BTD, cache.k_LBSKh, cache.v_LBSKh), per_layer)
        x_BTD = rms_norm(x_BTD[:, -1:], self.norm[...], self.config.norm_eps)
        logits_BV = jnp.where(cache.length + T <= places, self._logits(x_BTD, adapters, adapter_B)[:, 0], jnp.nan)
        return logits_BV, KVCache(k_LBSKh, v_LBSKh, cache.length + T)

    def _at_hand(self, params: Any) -> Any:
        """Return parameters, or one of them, where they are computed with: fetched, if the weights are on the host."""
        return fetch(params) if self.plan.weights == "host" else params

    def _logits(self, x_BTD: Array, adapters: Adapters | None, adapter_B: Array | None) -> Array:
        head_VD = self.head.astype(self.config.compute_dtype)
        logits_BTV = whole_logits(x_BTD, head_VD)
        x_BTW, (_, *added) = adapted_head(x_BTD, head_VD, adapters, adapter_B)
        for b_VR in added:
            z_BTR = x_BTW[..., x_BTD.shape[-1] :]
            logits_BTV += whole_logits(z_BTR, b_VR)
        return logits_BTV

    def _check_cache(self, cache: KVCache, batch_size: int, T: int) -> int:
        """Return how many places the cache has.

        Raise TypeError for no cache, ValueError for another model's, and where it is known that T more do not fit.
        """
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache={show(cache)}: expected model.empty_cache({batch_size}, max_len).")
        c, shape = self.config, jnp.shape(cache.k_LBSKh)
        places = shape[2]
        expected = (c.n_layers, batch_size, places, c.n_kv_heads, c.head_dim)
        if shape != expected:
            raise ValueError(
                f"the cache has the shape {shape}; for {batch_size} sequences this model needs [L, B, S, K, h] = "
                f"{expected}: model.empty_cache({batch_size}, max_len)."
            )
        if not isinstance(cache.length, jax.core.Tracer) and (length := int(cache.length)) + T > places:
            raise ValueError(
                f"the cache has {places} places, {length} of them filled: {T} more tokens do not fit. Make it longer: "
                f"model.empty_cache(batch_size, max_len={length + T})."
            )
        return places

    def _check_length(self, T: int) -> None:
        if self.config.max_seq_len < T:
            raise ValueError(
                f"a sequence of {T} tokens is longer than this model's max_seq_len={self.config.max_seq_len}: RoPE "
                "was not set up for such positions. Shorten the sequence, or "
                "config.replace(max_seq_len=..., rope_scaling=...)."
            )


def check_heads(config: LlamaConfig, plan: Plan) -> None:
    """Raise ValueError where the plan's groups of heads would not be equal."""
    tensor = plan.mesh.tensor
    heads = config.n_kv_heads // tensor
    if heads % plan.head_groups:
        each = f"{config.n_kv_heads} key/value heads" + (
            f", {heads} on each of tensor={tensor} devices" if tensor > 1 else ""
        )
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"Plan(head_groups={plan.head_groups}) of a model with {each}: groups of heads are equal, and keep "
            f"the queries of a key/value head together. Choose {divisors}."
        )
