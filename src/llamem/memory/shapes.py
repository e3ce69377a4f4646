"""What programs are traced with: the types of arrays, shapes, Python numbers and random keys, without their values."""

import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def shape_of(leaf: Any, where: str = "an argument") -> jax.ShapeDtypeStruct:
    """Return the shape and type that `jax.jit` would see; a Python number stays weakly typed.

    Raises TypeError, with `where` in it, for what is no number, array, shape or random key.
    """
    is_array = hasattr(leaf, "dtype")
    dtype = leaf.dtype if is_array else np.asarray(leaf).dtype
    if is_key(dtype):
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        raise TypeError(
            f"{where} is {reprlib.repr(leaf)}, of type {type(leaf).__name__}: no array, number or "
            "`jax.ShapeDtypeStruct`. A setting is no argument of a program: close over it, as "
            "functools.partial(fn, setting=...) does."
        )
    weak = leaf.weak_type if hasattr(leaf, "weak_type") else not is_array and not isinstance(leaf, bool)
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(dtype), weak_type=weak)


def is_key(dtype: Any) -> bool:
    """Return whether it is the type of random keys such as `jax.random.key` makes."""
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def key_implementation(key: jax.ShapeDtypeStruct) -> Any:
    """Return how a key draws, "threefry2x32" or "rbg", as `jax.random.wrap_key_data(impl=)` takes it."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)  # it answers for arrays, not for shapes
    return found[0]


def on_host(aval: Any) -> bool:
    """Return whether a traced value is said to be in the host's memory."""
    return "host" in str(getattr(aval, "memory_space", "")).lower()
