"""What is known of the values of a traced program: what feeds each, and of small integers and keys their numbers."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from llamem.memory.jaxprs import DRAWS

_SAME_EVERYWHERE = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")
_SMALL = 4096  # entries
_FEW = 2**16  # numbers: a remainder of so many comes again within a run


@dataclasses.dataclass(frozen=True, eq=False)
class TracedValue:
    """What is known of a value: what feeds it, and of small integers and keys their numbers.

    `drawn`: "numbers" if made of random numbers and constants alone, "mask" if of comparisons too, else "".
    """

    fed: frozenset[Hashable] = frozenset()
    numbers: Any = None
    drawn: str = ""

    @property
    def identity(self) -> Hashable:
        """What is equal for equal values, as far as they are known."""
        return self if self.numbers is None else (np.shape(self.numbers), _words(self.numbers).tobytes())


def result_values(eqn: jex_core.JaxprEqn, ins: list[TracedValue]) -> list[TracedValue]:
    """Return what is known of the results of an operation that has no program inside."""
    name, fed = eqn.primitive.name, frozenset().union(*(value.fed for value in ins))
    if name == "axis_index":
        fed |= {("axis", eqn.params["axis_name"])}
    elif name in _SAME_EVERYWHERE:
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        fed -= {("axis", axis) for axis in (axes if isinstance(axes, tuple | list) else (axes,))}
    elif name == "rem" and not ins[1].fed and ins[1].numbers is not None and np.max(ins[1].numbers) <= _FEW:
        # Of a number that moves on, only that it comes again.
        fed = {feed for feed in fed if feed[0] != "leaf"} | {("cycle", int(np.max(ins[1].numbers)))}  # pyrefly: ignore
        fed = frozenset(fed)
    numbers: list[Any] = [None] * len(eqn.outvars)
    avals: list[Any] = [var.aval for var in eqn.outvars]
    # No callbacks, kernels and calls, which are the user's.
    if all(map(_is_small, avals)) and all(value.numbers is not None for value in ins) and "call" not in name:
        try:
            results = eqn.primitive.bind(*(value.numbers for value in ins), **eqn.params)
            numbers = list(results) if eqn.primitive.multiple_results else [results]
        except Exception:  # what only means something inside of the program, such as the index of a device
            pass
    others = [value.drawn for value in ins if value.fed or value.drawn]
    drawn = "numbers" if name in DRAWS or (others and all(others)) else ""
    compares = "mask" in others or name in ("lt", "le", "gt", "ge", "eq", "ne")
    return [TracedValue(fed, number, "mask" if drawn and compares else drawn) for number in numbers]


def _is_small(array: Any) -> bool:
    """Return whether an array, or its description, is of integers or keys, and few."""
    dtype = jnp.result_type(array) if isinstance(array, int) else getattr(array, "dtype", jnp.float32)
    kinds = jnp.integer, jnp.bool_, jax.dtypes.prng_key
    here = getattr(array, "is_fully_addressable", True)
    return here and any(jnp.issubdtype(dtype, kind) for kind in kinds) and np.size(array) <= _SMALL


def given_value(array: Any, fed: frozenset[Hashable] = frozenset()) -> TracedValue:
    """Return what is known of an array at hand: a constant, or an argument."""
    return TracedValue(fed, array if _is_small(array) else None)


def _words(numbers: Any) -> np.ndarray:
    """Return integers as they are, and keys as words along a last axis."""
    is_key = hasattr(numbers, "dtype") and jnp.issubdtype(numbers.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(numbers) if is_key else numbers)


def all_differ(numbers: Any, axis: int = 0) -> bool:
    """Return whether no two rows along an axis are equal; true where they are not known."""
    if numbers is None or not np.ndim(numbers):
        return True
    rows = np.moveaxis(_words(numbers), axis, 0)
    return len(np.unique(rows.reshape(len(rows), -1), axis=0)) == len(rows)
