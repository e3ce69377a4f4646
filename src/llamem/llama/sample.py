"""Text out of a model: a prompt read at once, then one token at a time through the KV cache."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from llamem.llama.inputs import check_key, check_tokens, count, finite
from llamem.llama.lora import Adapters, check_adapters
from llamem.llama.model import Llama


def generate(
    model: Llama,
    prompt_BT: Int[Array, "B T"],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    key: Array | None = None,
    adapters: Adapters | None = None,
    adapter_B: Int[Array, " B"] | None = None,
) -> Int[Array, "B M"]:
    """The prompt's continuation, `[B, max_new_tokens]`.

    `temperature=0` takes the likeliest token; above 0 tokens are drawn with `key` from `softmax(logits / temperature)`,
    of which `top_p` keeps the likeliest that together reach that probability (Holtzman et al. 2020). Each sequence uses
    its own of the `adapters`, which `adapter_B` names; one adapter alone serves all. Raises ValueError
    for a prompt without tokens or with ids outside the vocabulary, a temperature below 0, a top_p outside (0, 1],
    drawing without a key, and for more tokens than `config.max_seq_len` in all; TypeError for what is no key.
    """
    if not isinstance(model, Llama):
        raise TypeError(f"generate({type(model).__name__}, ...): expected a llamem.Llama.")
    check_tokens(prompt_BT, model.config.vocab_size, "the prompt")
    max_new_tokens = count("max_new_tokens", max_new_tokens)
    temperature, top_p = finite("temperature", temperature), finite("top_p", top_p)
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature={temperature} must be at least 0, and top_p={top_p} above 0 and at most 1.")
    if temperature > 0 and key is None:
        raise ValueError("drawing at a temperature above 0 needs a key: pass key=jax.random.key(0), or temperature=0.")
    if key is not None:
        check_key(key)
    adapter_B = check_adapters(adapters, adapter_B, prompt_BT.shape[0], model.config)
    cache = model.empty_cache(prompt_BT.shape[0], prompt_BT.shape[1] + max_new_tokens)
    graphdef, state = nnx.split(model)
    key = jax.random.key(0) if key is None else key  # unused at temperature 0, where nothing is drawn
    lora = {"adapters": adapters, "adapter_B": adapter_B}
    return _generate(graphdef, state, prompt_BT, cache, key, max_new_tokens, temperature, top_p, lora)


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7))
def _generate(graphdef, state, prompt_BT, cache, key, max_new_tokens, temperature, top_p, lora):
    model = nnx.merge(graphdef, state)
    logits_BV, cache = model.decode(prompt_BT, cache, **lora)

    def one(carry, key):
        logits_BV, cache = carry
        token_B = pick_token(logits_BV, key, temperature, top_p)
        return model.decode(token_B[:, None], cache, **lora), token_B

    keys = jax.random.split(key, max_new_tokens)
    # The last token needs no further reading: its logits would be thrown away.
    (logits_BV, _), tokens_MB = jax.lax.scan(one, (logits_BV, cache), keys[:-1])
    last_B = pick_token(logits_BV, keys[-1], temperature, top_p)
    return jnp.concatenate([tokens_MB, last_B[None]]).T


def pick_token(logits_BV: Float[Array, "B V"], key: Array, temperature: float, top_p: float) -> Int[Array, " B"]:
    """One token id per row, greedily at temperature 0, else drawn from the top-p part of the softmax."""
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    logits_BV = logits_BV / temperature
    if top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV), axis=-1) - jax.nn.softmax(sorted_BV)
        # The least likely token that is still needed to reach top_p; the likeliest one always stays.
        cutoff_B1 = jnp.min(jnp.where(before_BV < top_p, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < cutoff_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV)
