"""Checks of what the losses are given: each mistake gets its own sentence and remedy before anything is computed."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from llamem._checks import check_number, check_whole, show


class Operands(NamedTuple):
    """Hidden `[..., D]`, targets `[...]` and weights `[...]`, which fit each other."""

    hidden: Array
    targets: Array
    weights: Array | None


def as_array(name: str, value: Any, expected: str) -> Array:
    """Return the value as a JAX array. Raise TypeError where it is none."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name} must be an array {expected}, got {_described(value)}. Convert it with jnp.asarray.")
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "biufcV":
        raise TypeError(f"{name} must be an array of numbers {expected}, got one of type {value.dtype}.")
    return jnp.asarray(value)


def as_floats(name: str, value: Any, expected: str) -> Array:
    """Return the value as a JAX array of real floating-point numbers. Raise TypeError where it is none."""
    found = as_array(name, value, expected)
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be real floating-point numbers {expected}, got {_described(found)}. "
            f"Convert it, for example with {name}.astype(jnp.float32)."
        )
    return found


def static_number(name: str, value: Any, **bounds: float) -> float:
    """Return the value as a finite Python float within the bounds of `check_number`. It is part of the program."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a number that is known when the program is traced, since it is a part of it; got a "
            f"traced array. Close over it as a Python number, or pass it through static_argnames of jax.jit."
        )
    if hasattr(value, "dtype") and np.shape(value) == () and _is_real(value.dtype):
        value = float(value)
    return check_number(name, value, **bounds)


def static_share(name: str, value: Any) -> float:
    """Return the value as a Python float between 0 and 1."""
    found = static_number(name, value, at_least=0)
    if found > 1:
        raise ValueError(f"{name}={found:g}: expected a number between 0 and 1.")
    return found


def check_ignore_index(value: Any) -> int:
    """Return `ignore_index` as an int, of any sign."""
    return check_whole("ignore_index", value, at_least=-(2**31))


def check_normalizer(value: Any, reduction: str) -> Array | float | None:
    """Return what the sum of a "mean" is divided by: one real number, which may be traced and differentiated."""
    if value is None:
        return None
    if reduction != "mean":
        raise ValueError(f'normalizer belongs to reduction="mean", not to {reduction!r}.')
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not (hasattr(value, "dtype") and np.shape(value) == () and _is_real(value.dtype)):
        raise TypeError(f"normalizer must be one real number, the count of a whole batch; got {_described(value)}.")
    return value


def check_rows_axis(axis: str) -> Literal["vocab"]:
    """Return the axis to tile where each token has a loss of its own."""
    if axis == "tokens":
        raise ValueError(
            'reduction="none" works on tiles of the vocabulary: give axis="vocab" or "auto". Tiles of tokens make '
            "gradients before the cotangents of their losses are known, which takes one loss for all of them."
        )
    return "vocab"


def check_split_axis(name: Any, axis: str) -> Literal["vocab"]:
    """Return the axis to tile where devices hold some rows of the head each."""
    if axis == "tokens":
        raise ValueError('vocab_axis_name goes with axis="vocab": in a tile of tokens devices would have to meet.')
    try:
        jax.lax.axis_size(name)
    except (NameError, TypeError):
        known = jax.sharding.get_abstract_mesh().axis_names
        raise ValueError(
            f"vocab_axis_name must be a mesh axis inside jax.shard_map, got {name!r}; the axes here are {known}."
        ) from None
    return "vocab"


def check_batch(hidden: Any, targets: Any, weights: Any) -> Operands:
    """Return hidden, targets and weights as arrays that fit each other."""
    hidden = as_floats("hidden", hidden, "[..., D]")
    if hidden.ndim == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be [..., D] with D of at least 1, got shape {hidden.shape}.")
    rows = hidden.shape[:-1]
    targets = as_array("targets", targets, "of integer ids, one for each row of hidden")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integer ids, got {targets.dtype}. Ids are not one-hot rows, nor floats.")
    if targets.shape != rows:
        raise ValueError(f"targets must have hidden's batch shape {rows}, got {targets.shape}.")
    if weights is not None:
        weights = as_array("weights", weights, "[...], one number for each target")
        if weights.shape != rows:
            raise ValueError(f"weights must have hidden's batch shape {rows}, got {weights.shape}.")
        if not _is_real(weights.dtype) and weights.dtype != jnp.bool_:
            raise TypeError(f"weights must be real numbers, got {weights.dtype}.")
    return Operands(hidden, targets, weights)


def check_head(head: Any, bias: Any, hidden: Array) -> list[Array]:
    """Return the head's matrices, which side by side have hidden's D columns, and its bias where there is one."""
    if not hasattr(head, "shape") and not (isinstance(head, tuple | list) and head):
        raise TypeError(f"head must be an array [V, D], or a tuple of them side by side; got {_described(head)}.")
    d_model = hidden.shape[-1]
    leaves = [as_floats("head", leaf, "[V, D]") for leaf in ([head] if hasattr(head, "shape") else head)]
    matrix = leaves[0]
    if len(leaves) > 1:
        shapes = [leaf.shape for leaf in leaves]
        two_axes = all(len(shape) == 2 for shape in shapes)
        if not two_axes or len({shape[0] for shape in shapes}) > 1 or sum(shape[1] for shape in shapes) != d_model:
            raise ValueError(
                f"a head of several matrices must be [V, D_1], [V, D_2] .. with D_1 + D_2 + .. = {d_model}, hidden's "
                f"last axis; got {shapes}."
            )
    elif matrix.ndim != 2 or matrix.shape[1] != d_model:
        hint = " Pass its transpose." if matrix.ndim == 2 and matrix.shape[0] == d_model else ""
        raise ValueError(f"head must be [V, D] with D = {d_model}, got {matrix.shape}.{hint}")
    if matrix.shape[0] == 0:
        raise ValueError(f"head must be [V, D] with V of at least 1, got {matrix.shape}: a vocabulary without ids.")
    if bias is not None:
        leaves.append(as_floats("bias", bias, "[V]"))
        if leaves[-1].shape != matrix.shape[:1]:
            raise ValueError(f"bias must be [V] = [{len(matrix)}], got {leaves[-1].shape}.")
    try:
        jnp.result_type(hidden, *leaves)
    except TypeError:
        types = ", ".join(str(a.dtype) for a in (hidden, *leaves))
        raise TypeError(
            f"hidden, head and bias have types without a common one: {types}. Convert hidden or head."
        ) from None
    return leaves


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and type {value.dtype}"
    return f"{show(value)} ({type(value).__name__})"
