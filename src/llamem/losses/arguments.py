"""What the losses are given, looked at before anything is computed: each mistake gets its own sentence and remedy."""

import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from llamem.losses.one_tile import CallableHead


class Batch(NamedTuple):
    """Hidden `[..., D]`, targets `[...]` and weights `[...]`, which fit each other."""

    hidden: Array
    targets: Array
    weights: Array | None


class Head(NamedTuple):
    """A head's leaves, the number V of logits it makes, and how it is called where it is no matrix."""

    leaves: list
    vocab: int
    callable_head: CallableHead | None


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and type {value.dtype}"
    text = repr(value)
    return f"{text if len(text) < 80 else text[:77] + '...'} ({type(value).__name__})"


def array(name: str, value: Any, expected: str) -> Array:
    """The value as a JAX array. Raises TypeError where it is none."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name} must be an array {expected}, got {_described(value)}. Convert it with jnp.asarray.")
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "biufcV":
        raise TypeError(f"{name} must be an array of numbers {expected}, got one of type {value.dtype}.")
    return jnp.asarray(value)


def floats(name: str, value: Any, expected: str) -> Array:
    """The value as a JAX array of real floating-point numbers. Raises TypeError where it is none."""
    found = array(name, value, expected)
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be real floating-point numbers {expected}, got {_described(found)}. "
            f"Convert it, for example with {name}.astype(jnp.float32)."
        )
    return found


def number(name: str, value: Any, expected: str, holds: Callable[[float], bool]) -> float:
    """The value as a Python float for which `holds` is true. It is part of the compiled program."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be {expected} that is known when the program is traced, since it is a part of it; got a "
            f"traced array. Close over it as a Python number, or pass it through static_argnames of jax.jit."
        )
    is_scalar = isinstance(value, int | float) or (hasattr(value, "dtype") and np.shape(value) == ())
    if not is_scalar or isinstance(value, bool) or (hasattr(value, "dtype") and not _is_real(value.dtype)):
        raise TypeError(f"{name} must be {expected}, got {_described(value)}.")
    if not holds(float(value)):
        raise ValueError(f"{name} must be {expected}, got {float(value):g}.")
    return float(value)


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def whole(name: str, value: Any, expected: str) -> int:
    """The value as a Python int."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:  # a traced array raises an error that is a TypeError too
        raise TypeError(
            f"{name} must be {expected}, known when the program is traced; got {_described(value)}."
        ) from None


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ValueError where the value is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        listed = " or ".join(filter(None, (", ".join(f'"{c}"' for c in choices[:-1]), f'"{choices[-1]}"')))
        raise ValueError(f"{name} must be {listed}, got {_described(value)}.")


def flag(name: str, value: Any) -> None:
    """Raises TypeError where the value is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_described(value)}.")


def normalizer(value: Any, reduction: str) -> Array | float | None:
    """What the sum of a "mean" is divided by: one real number, which may be traced and differentiated."""
    if value is None:
        return None
    if reduction != "mean":
        raise ValueError(f'normalizer belongs to reduction="mean", not to {reduction!r}.')
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not (hasattr(value, "dtype") and np.shape(value) == () and _is_real(value.dtype)):
        raise TypeError(f"normalizer must be one real number, the count of a whole batch; got {_described(value)}.")
    return value


def split_axis(name: Any, axis: str) -> Literal["vocab"]:
    """The axis to tile where devices hold some rows of the head each."""
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


def batch(hidden: Any, targets: Any, weights: Any) -> Batch:
    """Hidden, targets and weights as arrays that fit each other."""
    hidden = floats("hidden", hidden, "[..., D]")
    if hidden.ndim == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be [..., D] with D of at least 1, got shape {hidden.shape}.")
    rows = hidden.shape[:-1]
    targets = array("targets", targets, "of integer ids, one for each row of hidden")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integer ids, got {targets.dtype}. Ids are not one-hot rows, nor floats.")
    if targets.shape != rows:
        raise ValueError(f"targets must have hidden's batch shape {rows}, got {targets.shape}.")
    if weights is not None:
        weights = array("weights", weights, "[...], one number for each target")
        if weights.shape != rows:
            raise ValueError(f"weights must have hidden's batch shape {rows}, got {weights.shape}.")
        if not _is_real(weights.dtype) and weights.dtype != jnp.bool_:
            raise TypeError(f"weights must be real numbers, got {weights.dtype}.")
    return Batch(hidden, targets, weights)


def head(value: Any, bias: Any, hidden: Array, axis: str) -> Head:
    """A matrix with its bias, or a callable, that makes logits of these hidden states."""
    if hasattr(value, "shape"):  # before anything else: a flax Variable is callable too
        return _matrices([value], bias, hidden)
    if isinstance(value, (tuple, list)) and value:
        return _matrices(list(value), bias, hidden)
    if bias is not None:
        raise ValueError("A callable head adds its own bias: leave bias=None.")
    if axis == "vocab":
        raise ValueError('A callable head has no rows to tile: use axis="tokens", or give the matrix itself.')
    return _callable(value, hidden)


def _matrices(values: list, bias: Any, hidden: Array) -> Head:
    d_model = hidden.shape[-1]
    leaves = [floats("head", value, "[V, D]") for value in values]
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
        leaves.append(floats("bias", bias, "[V]"))
        if leaves[-1].shape != matrix.shape[:1]:
            raise ValueError(f"bias must be [V] = [{len(matrix)}], got {leaves[-1].shape}.")
    try:
        jnp.result_type(hidden, *leaves)
    except TypeError:
        types = ", ".join(str(a.dtype) for a in (hidden, *leaves))
        raise TypeError(
            f"hidden, head and bias have types without a common one: {types}. Convert hidden or head."
        ) from None
    return Head(leaves, len(matrix), None)


def _callable(value: Any, hidden: Array) -> Head:
    remedy = "jax.tree_util.Partial(fn, *params), called as fn(*params, hidden)"
    if not callable(value):
        raise TypeError(f"head must be an array [V, D], or a callable such as {remedy}; got {_described(value)}.")
    leaves, tree = jax.tree.flatten(value)
    if not all(hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex) for leaf in leaves):
        raise TypeError(
            f"A callable head must carry its parameters as a pytree, so that they get gradients; {_described(value)} "
            f"does not. Give {remedy}."
        )
    try:
        hash(tree)
    except TypeError as error:
        raise TypeError(
            f"The callable head keeps something beside its arrays that cannot be hashed: {error}."
        ) from None
    leaves, called = [jnp.asarray(leaf) for leaf in leaves], CallableHead(tree)
    shape = jax.ShapeDtypeStruct((2, hidden.shape[-1]), hidden.dtype)
    made = jax.eval_shape(called, leaves, shape)
    if getattr(made, "ndim", None) != 2 or made.shape[0] != 2 or not jnp.issubdtype(made.dtype, jnp.floating):
        raise ValueError(
            f"A callable head must make logits [tokens, V] of [tokens, D]; of {shape.shape} it made {made}."
        )
    if made.shape[1] == 0:
        raise ValueError("The callable head makes logits [tokens, 0]: a vocabulary without ids.")
    return Head(leaves, made.shape[1], called)
