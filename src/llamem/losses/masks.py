"""Which tokens count, and for how much: ids and weights `[N]` made ready for a weighted sum."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array


def known_targets(targets_N: Array, ignore_index: int, vocab: int) -> tuple[Array, Array, Array]:
    """Return targets as int32 ids inside the vocabulary, which of them count, and which are no ids at all.

    Targets are compared in their own type, whatever it is: a number that it does not hold equals none of them, but
    would wrap around.
    """
    limits = jnp.iinfo(targets_N.dtype)
    counts_N = jnp.ones(targets_N.shape, bool)
    if limits.min <= ignore_index <= limits.max:
        counts_N = targets_N != ignore_index
    inside_N = targets_N >= 0
    if vocab <= limits.max:
        inside_N &= targets_N < vocab
    return jnp.where(inside_N, targets_N, 0).astype(jnp.int32), counts_N, counts_N & ~inside_N


def masked_weights(weights: Array | None, counts_N: Array, unknown_N: Array, dtype: Any) -> Array:
    """Return weights `[N]`, default 1: 0 for what is ignored, and 0 / 0 for an id that does not exist.

    There `jax.debug_nans` and NaN checks find it.
    """
    weights_N = jnp.ones(counts_N.shape, dtype) if weights is None else weights.reshape(-1).astype(dtype)
    known_N = (~unknown_N).astype(dtype)
    return jnp.where(counts_N, weights_N, 0) * known_N / known_N


def normalized_weights(weights_N: Array, normalizer: Any) -> Array:
    """Return weights over their normalizer, default their sum. Where no token counts all are 0, whatever it is."""
    divisor = jnp.sum(weights_N) if normalizer is None else normalizer
    nothing_counts = jnp.all(weights_N == 0)
    return weights_N / jnp.where(nothing_counts & (divisor == 0), 1, divisor)
