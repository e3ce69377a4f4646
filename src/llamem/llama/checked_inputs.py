"""What a user passes to a model, checked before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem.common.checks import check_whole, show
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import Plan


def check_model(config: Any, rngs: Any, plan: Any) -> None:
    """Raise TypeError for what no model is made of, and ValueError as `check_heads`."""
    if not isinstance(config, LlamaConfig) or not isinstance(rngs, nnx.Rngs) or not isinstance(plan, Plan):
        raise TypeError(
            f"Llama({config!r}, rngs={rngs!r}, plan={plan!r}): expected a llamem.LlamaConfig, such as "
            "LlamaConfig.from_name('tiny'), an nnx.Rngs, such as nnx.Rngs(0), and a llamem.Plan."
        )
    check_heads(config, plan)


def check_heads(config: LlamaConfig, plan: Plan) -> None:
    """Raise ValueError where the plan's groups of heads would not be equal."""
    devices = plan.mesh.tensor
    heads = config.n_kv_heads // devices
    if heads % plan.head_groups:
        each = f"{config.n_kv_heads} key/value heads" + (
            f", {heads} on each of tensor={devices} devices" if devices > 1 else ""
        )
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"Plan(head_groups={plan.head_groups}) of a model with {each}: groups of heads are equal, and keep "
            f"the queries of a key/value head together. Choose {divisors}."
        )


def check_inputs(tokens_BT: Any, segments_BT: Any, config: LlamaConfig) -> None:
    """Raise as `check_tokens` and `check_length`, and ValueError for documents that are not one for each token."""
    check_tokens(tokens_BT, config.vocab_size)
    if segments_BT is not None:
        check_of_sequences("segments_BT", segments_BT, tokens_BT.shape, "the document of each token")
    check_length(tokens_BT.shape[1], config)


def check_length(length: int, config: LlamaConfig, batch_size: int = 1) -> None:
    """Raise ValueError for sequences that are longer than the model's, or for sizes that are no whole numbers."""
    check_whole("batch_size", batch_size)
    if config.max_seq_len < check_whole("max_len", length):
        raise ValueError(
            f"a sequence of {length} tokens is longer than this model's max_seq_len={config.max_seq_len}: RoPE "
            "was not set up for such positions. Shorten the sequence, or "
            "config.replace(max_seq_len=..., rope_scaling=...)."
        )


def check_cache(cache: Any, kind: Any, config: LlamaConfig, tokens_BT: Any) -> None:
    """Raise as `check_tokens`, TypeError for no cache, ValueError for another model's, and where it is known that the
    tokens do not fit.
    """
    check_tokens(tokens_BT, config.vocab_size)
    batch_size, T = tokens_BT.shape
    if not isinstance(cache, kind):
        raise TypeError(f"cache={show(cache)}: expected model.empty_cache({batch_size}, max_len).")
    shape = jnp.shape(cache.k_LBSKh)
    places = shape[2]
    expected = (config.n_layers, batch_size, places, config.n_kv_heads, config.head_dim)
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


def check_tokens(tokens_BT: Any, vocab_size: int, what: str = "tokens") -> None:
    """Raise TypeError for no array; ValueError for another shape than `[B, T]`, and for ids outside the vocabulary.

    The ids are not known while a program is traced: see `Llama.hidden`.
    """
    if not isinstance(tokens_BT, (jax.Array, np.ndarray)):
        raise TypeError(f"{what}: {show(tokens_BT)}. Expected an array of token ids, such as jnp.asarray([[1, 2]]).")
    if tokens_BT.ndim != 2 or tokens_BT.shape[1] < 1 or not jnp.issubdtype(tokens_BT.dtype, jnp.integer):
        raise ValueError(
            f"{what} of shape {tokens_BT.shape} and type {tokens_BT.dtype}: expected whole numbers of shape [B, T], B "
            "sequences of T >= 1 ids. One sequence alone is tokens[None]."
        )
    entries = f"the model's vocabulary has {vocab_size:,} entries"
    check_ids(tokens_BT, vocab_size, what, f"{entries}. Take the tokenizer that belongs to the model.")


def check_of_sequences(name: str, numbers: Any, shape: tuple[int, ...], what: str) -> None:
    """Raise ValueError for numbers of sequences, `what` they are, that are no array of whole numbers of this shape."""
    given, dtype = getattr(numbers, "shape", None), getattr(numbers, "dtype", None)
    if given != shape or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{name} of shape {given} and type {dtype}: expected an array of whole numbers of shape {shape}, {what}."
        )


def check_ids(ids: Any, count: int, what: str, known_ones: str) -> None:
    """Raise ValueError where ids are known and not all of them are among 0 to `count - 1`."""
    known = not isinstance(ids, jax.core.Tracer) and getattr(ids, "is_fully_addressable", True)
    if known and ids.size:
        array = np.asarray(ids)  # while another program is traced, JAX's own minimum would be traced too
        least, most = int(array.min()), int(array.max())
        if least < 0 or most >= count:
            raise ValueError(f"{what} reach from {least} to {most}, but ids are 0 to {count - 1:,}: {known_ones}")
