"""What a user passes to a model, checked before anything is computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem._checks import show


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
    found, dtype = getattr(numbers, "shape", None), getattr(numbers, "dtype", None)
    if found != shape or dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{name} of shape {found} and type {dtype}: expected an array of whole numbers of shape {shape}, {what}."
        )


def check_ids(ids: Any, count: int, what: str, known_ones: str) -> None:
    """Raise ValueError where ids are known and not all of them are among 0 to `count - 1`."""
    known = not isinstance(ids, jax.core.Tracer) and getattr(ids, "is_fully_addressable", True)
    if known and ids.size:
        array = np.asarray(ids)  # while another program is traced, JAX's own minimum would be traced too
        least, most = int(array.min()), int(array.max())
        if least < 0 or most >= count:
            raise ValueError(f"{what} reach from {least} to {most}, but ids are 0 to {count - 1:,}: {known_ones}")
