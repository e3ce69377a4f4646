"""Text out of a model: prompts read at once, then one token at a time through the KV cache."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmem.common.checks import check_number, check_whole, show
from llamem.llama.checked_inputs import check_tokens
from llamem.llama.model import KVCache, Llama

# Sizes are rounded up to powers of two from here on, so that few of them are compiled. A prompt's padding is computed.
LEAST_PLACES, LEAST_PROMPT = 64, 32


def generate(
    model: Llama,
    prompts: Int[Array, "B T"] | Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    key: Array | None = None,
    stop_ids: Sequence[int] = (),
    adapters: Any = None,
    adapter_B: Int[Array, " B"] | None = None,
) -> Int[Array, "B M"]:
    """Return the continuation of each prompt, `[B, max_new_tokens]`.

    Args:
        model: may be that of a program that is traced.
        prompts: token ids `[B, T]`, or lists of ids of different lengths.
        max_new_tokens: for each prompt.
        temperature: 0 takes the likeliest token; above 0 tokens are drawn from `softmax(logits / temperature)`.
        top_p: only the likeliest tokens that together reach that probability (Holtzman et al. 2020).
        key: of `jax.random`, for drawing.
        stop_ids: tokens that end a sequence, such as `tokenizer.stop_ids`; what follows repeats the one that came.
        adapters: put on the model, `adapters.on(model, adapter_B)`: each sequence uses its own; one alone serves all.

    Raise ValueError for a prompt without tokens or with ids outside the vocabulary, a temperature below 0, a top_p
    outside (0, 1], drawing without a key, and for more tokens than `config.max_seq_len` in all. One program is compiled
    for each number of prompts and each power of two, at least 32, of the longest prompt's tokens and, at least 64, of
    tokens in all.
    """
    prompt_BT, length_B = _side_by_side(prompts)
    check_tokens(prompt_BT, model.config.vocab_size, "the prompt")
    max_new_tokens = check_whole("max_new_tokens", max_new_tokens)
    temperature = check_number("temperature", float(temperature), at_least=0)
    top_p = check_number("top_p", float(top_p), above=0, at_most=1)
    if temperature > 0 and key is None:
        raise ValueError("drawing at a temperature above 0 needs a key: pass key=jax.random.key(0), or temperature=0.")
    B, T = prompt_BT.shape
    if adapters is not None:
        model = adapters.on(model, adapter_B)
    elif adapter_B is not None:
        raise ValueError("adapter_B without adapters: pass adapters=..., too.")
    needed = T + max_new_tokens
    places = _rounded_up(needed, LEAST_PLACES, model.config.max_seq_len)
    if places < needed:
        raise ValueError(
            f"{needed} tokens, a prompt of {T} and {max_new_tokens} new ones, are more than the model's "
            f"max_seq_len={model.config.max_seq_len}."
        )
    prompt_BT = jnp.pad(prompt_BT, ((0, 0), (0, _rounded_up(T, LEAST_PROMPT, places) - T)))
    graphdef, state = nnx.split(model)
    is_greedy, cuts_tail = temperature == 0, top_p < 1
    sampling = jnp.float32(temperature), jnp.float32(top_p), jnp.asarray(stop_ids, jnp.int32)
    key = jax.random.key(0) if key is None else key  # unused at temperature 0, where nothing is drawn
    cache = model.empty_cache(B, places)
    tokens_BS = _generate(
        graphdef, is_greedy, cuts_tail, state, prompt_BT, length_B, max_new_tokens, cache, key, sampling
    )
    return jnp.take_along_axis(tokens_BS, length_B[:, None] + jnp.arange(max_new_tokens), axis=1)


def _side_by_side(prompts: Any) -> tuple[Any, Array]:
    """Return prompts as an array `[B, T]`, filled up with zeros at their ends, and the length of each."""
    if isinstance(prompts, (jax.Array, np.ndarray)):
        shape = prompts.shape if prompts.ndim == 2 else (0, 0)
        return prompts, jnp.full(shape[0], shape[1], jnp.int32)
    rows = [np.asarray(prompt) for prompt in prompts]
    if not rows or not all(row.ndim == 1 and row.size and row.dtype.kind in "iu" for row in rows):
        raise TypeError(
            f"prompts={show(prompts)}: expected an array of token ids [B, T], or a list of lists of token ids, each "
            "with one at least. Text is for llamem.generate_text."
        )
    prompt_BT = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for place, row in zip(prompt_BT, rows, strict=True):
        place[: len(row)] = row
    return jnp.asarray(prompt_BT), jnp.asarray([len(row) for row in rows], jnp.int32)


def _rounded_up(size: int, least: int, most: int) -> int:
    return min(max(least, 1 << (size - 1).bit_length()), most)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(graphdef, is_greedy, cuts_tail, state, prompt_BT, length_B, max_new_tokens, cache, key, sampling):
    """Return prompts and what follows them `[B, places]`: one program for all lengths, which are numbers of it."""
    model, (temperature, top_p, stop_ids) = nnx.merge(graphdef, state), sampling
    temperature, top_p = 0 if is_greedy else temperature, top_p if cuts_tail else 1
    tokens_BS = jnp.pad(prompt_BT.astype(jnp.int32), ((0, 0), (0, cache.k_LBSKh.shape[2] - prompt_BT.shape[1])))
    end_B = length_B + max_new_tokens
    # All prompts at once; the cache is then taken back to before the shortest one's last token. What it holds beyond is
    # written again before it is seen.
    _, cache = model.decode(prompt_BT, cache)
    start = jnp.min(length_B) - 1
    cache = KVCache(cache.k_LBSKh, cache.v_LBSKh, start)

    def unfinished(carry):
        t, _, _, stopped_B = carry
        return jnp.any(~stopped_B & (t + 1 < end_B))

    def next_token(carry):
        t, cache, tokens_BS, stopped_B = carry
        logits_BV, cache = model.decode(jax.lax.dynamic_slice_in_dim(tokens_BS, t, 1, axis=1), cache)
        new_B = pick_token(logits_BV, jax.random.fold_in(key, t), temperature, top_p)
        given_B = t + 1 < length_B  # a prompt that is longer goes on with its own tokens
        token_B = jnp.where(given_B, tokens_BS[:, t + 1], jnp.where(stopped_B, tokens_BS[:, t], new_B))
        stopped_B |= ~given_B & jnp.isin(token_B, stop_ids)
        return t + 1, cache, tokens_BS.at[:, t + 1].set(token_B), stopped_B

    carry = start, cache, tokens_BS, jnp.zeros(length_B.shape, bool)
    t, _, tokens_BS, _ = jax.lax.while_loop(unfinished, next_token, carry)
    # Where every sequence has stopped, the rest of each repeats its last token.
    places = jnp.minimum(jnp.arange(tokens_BS.shape[1]), t)
    return tokens_BS[:, places]


def pick_token(logits_BV: Float[Array, "B V"], key: Array, temperature: Any, top_p: Any) -> Int[Array, " B"]:
    """Return one token id per row, greedily at temperature 0, else drawn from the top-p part of the softmax."""
    if isinstance(temperature, int | float) and temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    logits_BV = logits_BV / temperature
    if not isinstance(top_p, int | float) or top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV), axis=-1) - jax.nn.softmax(sorted_BV)
        # The least likely token that is still needed to reach top_p; the likeliest one always stays.
        cutoff_B1 = jnp.min(jnp.where(before_BV < top_p, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < cutoff_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV)
