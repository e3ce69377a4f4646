"""Checks of what the losses are given, before anything is computed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmem.common.checks import check_number, show


class Batch(NamedTuple):
    """Hidden `[..., D]`, targets `[...]` and weights `[...]`, which fit each other."""

    hidden: Array
    targets: Array
    weights: Array | None


def as_floats(name: str, value: Any, expected: str) -> Array:
    """Return the value as a JAX array of real floating-point numbers. Raise TypeError where it is none."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")) or not jnp.issubdtype(value.dtype, jnp.floating):
        given = f"an array of {value.dtype}" if hasattr(value, "dtype") else f"{show(value)} ({type(value).__name__})"
        raise TypeError(
            f"{name} must be an array of real floating-point numbers {expected}, got {given}. "
            f"Convert it, for example with jnp.asarray({name}, jnp.float32)."
        )
    return jnp.asarray(value)


def static_number(name: str, value: Any, **bounds: float) -> float:
    """Return the value as a finite Python float within the bounds of `check_number`. It is part of the program."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a number that is known when the program is traced, since it is a part of it; got a "
            f"traced array. Close over it as a Python number, or pass it through static_argnames of jax.jit."
        )
    return check_number(name, value.item() if isinstance(value, jax.Array) and value.ndim == 0 else value, **bounds)


def check_batch(hidden: Any, targets: Any, weights: Any) -> Batch:
    """Return hidden, targets and weights as arrays that fit each other."""
    hidden, targets = as_floats("hidden", hidden, "[..., D]"), jnp.asarray(targets)
    if hidden.ndim == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be [..., D] with D of at least 1, got shape {hidden.shape}.")
    shape = hidden.shape[:-1]
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integer ids, got {targets.dtype}. Ids are not one-hot rows, nor floats.")
    if targets.shape != shape:
        raise ValueError(f"targets must have hidden's batch shape {shape}, got {targets.shape}.")
    weights = None if weights is None else jnp.asarray(weights)
    if weights is not None and (weights.shape != shape or jnp.iscomplexobj(weights)):
        raise ValueError(
            f"weights must be real numbers in hidden's batch shape {shape}, got {weights.shape} of {weights.dtype}."
        )
    return Batch(hidden, targets, weights)


def check_head(head: Any, hidden: Array) -> list[Array]:
    """Return the head's matrices, which side by side have hidden's D columns."""
    if not hasattr(head, "shape") and not (isinstance(head, tuple | list) and head):
        raise TypeError(f"head must be an array [V, D], or a tuple of them side by side; got {show(head)}.")
    D, is_one = hidden.shape[-1], hasattr(head, "shape")
    matrices = [as_floats("head", matrix, "[V, D]") for matrix in ([head] if is_one else head)]
    shapes = [matrix.shape for matrix in matrices]
    two_axes = all(len(shape) == 2 for shape in shapes)
    if not two_axes or len({shape[0] for shape in shapes}) > 1 or sum(shape[1] for shape in shapes) != D:
        if len(matrices) > 1:
            raise ValueError(
                f"a head of several matrices must be [V, D_1], [V, D_2] .. with D_1 + D_2 + .. = {D}, hidden's last "
                f"axis; got {shapes}."
            )
        hint = " Pass its transpose." if two_axes and shapes[0][0] == D else ""
        raise ValueError(f"head must be [V, D] with D = {D}, got {shapes[0]}.{hint}")
    if shapes[0][0] == 0:
        raise ValueError(f"head must be [V, D] with V of at least 1, got {shapes[0]}.")
    return matrices
