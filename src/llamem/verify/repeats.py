"""Which rows of an array are copies of one another, from how it was made: broadcast, tiled, stacked or reshaped.

For each axis "" (they differ, as far as one can tell), "some" or "all" of the rows along it are copies.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from llamem.memory.jaxprs import DRAWS

Repeats = tuple[str, ...]
_SAME_AXES = ("slice", "rev", "copy", "random_unwrap", "random_wrap", "random_split", *DRAWS)


def repeats_of_array(array: Any) -> Repeats:
    """Return those of numbers at hand, along the first axis; a scalar has no axis."""
    if not np.ndim(array):
        return ()
    none = ("",) * np.ndim(array)
    dtype = jnp.result_type(array)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    elif jnp.issubdtype(dtype, jnp.inexact) or np.size(array) > 2**16:
        return none
    rows = {row.tobytes() for row in np.asarray(array)}
    count = len(array)
    return ("" if len(rows) == count else "all" if len(rows) == 1 else "some", *none[1:])


def repeats_of_result(eqn: jex_core.JaxprEqn, aval: Any, ins: Sequence[tuple[int, Repeats]]) -> Repeats:
    """Return those of an operation's result; `ins`: the numbers and repeats of its operands."""
    shape = tuple(getattr(aval, "shape", ()))
    name, params, none = eqn.primitive.name, eqn.params, ("",) * len(shape)
    if not shape or not ins:
        return tuple("all" if name == "iota" and axis != params["dimension"] else "" for axis in range(len(shape)))
    avals: list[Any] = [var.aval for var in eqn.invars]
    numbers, first, given = [number for number, _ in ins], ins[0][1], avals[0].shape
    if name == "broadcast_in_dim":
        source = {new: old for old, new in enumerate(params["broadcast_dimensions"])}
        kept = [source.get(axis) for axis in range(len(shape))]
        return tuple(
            first[old] if old is not None and given[old] == n else _copied(n)
            for old, n in zip(kept, shape, strict=True)
        )
    if name == "reshape":
        return _reshaped(first, given, shape)
    if name == "transpose":
        return tuple(first[axis] for axis in params["permutation"])
    if name == "squeeze":
        return tuple(label for axis, label in enumerate(first) if axis not in params["dimensions"])
    if name == "tile":
        return tuple(
            label if old == new else "all" if old == 1 else "some"
            for label, old, new in zip(first, given, shape, strict=True)
        )
    if name in ("stack", "concatenate"):
        axis = params.get("axis", params.get("dimension", 0))
        equal = name == "stack" or all(a.shape[axis] == 1 for a in avals)
        label = "" if len(set(numbers)) == len(numbers) else "all" if len(set(numbers)) == 1 and equal else "some"
        along = [repeats[axis] for _, repeats in ins] if name == "concatenate" else []
        return tuple((label or ("some" if any(along) else "")) if i == axis else "" for i in range(len(shape)))
    if name == "gather":
        return (ins[1][1][0] if ins[1][1] else "", *none[1:])
    if name in _SAME_AXES:
        return (*first, *none)[: len(shape)]
    if any(aval.shape not in ((), shape) for aval in avals):
        return none
    whole = [repeats for aval, (_, repeats) in zip(avals, ins, strict=True) if aval.shape]
    return tuple(_together([repeats[axis] for repeats in whole]) for axis in range(len(shape)))


def _copied(size: int) -> str:
    return "all" if size > 1 else ""


def _together(labels: list[str]) -> str:
    """Tell of an operation on each element: copies stay copies where nothing else differs."""
    if not labels or "" in labels:
        return ""
    return "all" if set(labels) == {"all"} else "some" if labels.count("some") == 1 else ""


def _reshaped(labels: Repeats, old: Sequence[int], new: Sequence[int]) -> Repeats:
    """Follow a reshape: groups of axes with equal products belong together."""
    if 0 in old:
        return ("",) * len(new)
    found: list[str] = []
    i = j = 0
    while j < len(new):
        sources, targets = [i] if i < len(old) else [], [j]
        i, j = i + 1, j + 1
        while math.prod(old[a] for a in sources) != math.prod(new[b] for b in targets):
            if math.prod(old[a] for a in sources) < math.prod(new[b] for b in targets):
                sources, i = [*sources, i], i + 1
            else:
                targets, j = [*targets, j], j + 1
        group = [labels[a] for a in sources if old[a] > 1]
        label = "all" if group and set(group) == {"all"} else "some" if any(group) else ""
        large = [b for b in targets if new[b] > 1]
        found += [(label if label == "all" or len(large) == 1 else "") if b in large else "" for b in targets]
    return tuple(found)
