"""What a user passes to a model, checked before anything is computed."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_tokens(tokens_BT: Any, vocab_size: int, what: str = "tokens") -> None:
    """Raise TypeError for no array; ValueError for another shape than `[B, T]`, and for ids outside the vocabulary.

    The ids are not known while a program is traced: see `Llama.hidden`.
    """
    if not isinstance(tokens_BT, (jax.Array, np.ndarray)):
        raise TypeError(f"{what}: {_short(tokens_BT)}. Expected an array of token ids, such as jnp.asarray([[1, 2]]).")
    if tokens_BT.ndim != 2 or tokens_BT.shape[1] < 1 or not jnp.issubdtype(tokens_BT.dtype, jnp.integer):
        raise ValueError(
            f"{what} of shape {tokens_BT.shape} and type {tokens_BT.dtype}: expected whole numbers of shape [B, T], B "
            "sequences of T >= 1 ids. One sequence alone is tokens[None]."
        )
    known = not isinstance(tokens_BT, jax.core.Tracer) and getattr(tokens_BT, "is_fully_addressable", True)
    if known and tokens_BT.size:
        ids = np.asarray(tokens_BT)  # by NumPy: while another program is traced, JAX's own minimum would be traced too
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= vocab_size:
            raise ValueError(
                f"{what} reach from {least} to {most}, but the model's vocabulary has {vocab_size:,} entries (ids 0 to "
                f"{vocab_size - 1:,}). Take the tokenizer that belongs to the model."
            )


def check_segments(segments_BT: Any, tokens_BT: Any) -> None:
    """Raise ValueError for document numbers that are no whole numbers of the tokens' shape."""
    if segments_BT is None:
        return
    shape, dtype = getattr(segments_BT, "shape", None), getattr(segments_BT, "dtype", None)
    if shape != tokens_BT.shape or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"segments_BT of shape {shape} and type {dtype}: expected an array of whole numbers of the tokens' shape "
            f"{tokens_BT.shape}, the number of the document that each token belongs to."
        )


def check_room(length: Any, T: int, places: int) -> None:
    """Raise ValueError where it is known that T more tokens do not fit into a cache."""
    if not isinstance(length, jax.core.Tracer) and int(length) + T > places:
        raise ValueError(
            f"the cache has {places} places, {int(length)} of them filled: {T} more tokens do not fit. Make it longer: "
            f"model.empty_cache(batch_size, max_len={int(length) + T})."
        )


def count(name: str, value: Any) -> int:
    """Return a whole number of at least 1, or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}={_short(value)}: expected a whole number of at least 1.")
    return int(value)


def finite(name: str, value: Any) -> float:
    """Return a finite number, from Python, NumPy or a JAX scalar that is known, or raise ValueError."""
    is_known = isinstance(value, (int, float, np.number, np.ndarray, jax.Array)) and not isinstance(
        value, (bool, jax.core.Tracer)
    )
    if not is_known or np.ndim(value) or not jnp.issubdtype(jnp.result_type(value), jnp.number):
        raise ValueError(f"{name}={_short(value)}: expected a number that is known before the program is compiled.")
    if np.iscomplexobj(value) or not math.isfinite(float(value)):
        raise ValueError(f"{name}={_short(value)}: expected a finite number.")
    return float(value)


def check_key(key: Any) -> None:
    """Raise TypeError for what is not one key of `jax.random`."""
    dtype, shape = getattr(key, "dtype", None), jnp.shape(key) if hasattr(key, "shape") else None
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    raw = dtype == jnp.uint32 and shape in ((2,), (4,))
    if not typed and not raw:
        raise TypeError(f"key={_short(key)}: expected one key, such as jax.random.key(0).")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
