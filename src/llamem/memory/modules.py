"""Models as arguments: flax nnx's, which a step changes in place, and equinox's, of which a part is no array."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def with_arrays_alone(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return `fn` and its arguments with arrays, numbers and shapes in the place of modules.

    An nnx module or optimizer stands there as its state. What `fn` changes in it in place is a result of the returned
    function, as it is of `nnx.jit(fn)`; what several modules share counts once. Of an equinox module the arrays are
    arguments and the rest is closed over, as `equinox.filter_jit` has it. Without modules both come back as they are.
    """
    leaves, tree = jax.tree.flatten(args, is_leaf=_is_module)
    stateful = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, nnx.Pytree)}
    parts = {i: _equinox().partition(leaf, _is_array) for i, leaf in enumerate(leaves) if _is_equinox(leaf)}
    if not stateful and not parts:
        return fn, args
    graph, state = nnx.split(dict(stateful))
    shown = {i: state.get(i, nnx.State({})) for i in stateful} | {i: arrays for i, (arrays, _) in parts.items()}

    @functools.wraps(fn)
    def of_arrays(*args: Any) -> Any:
        given = tree.flatten_up_to(args)
        modules = nnx.merge(graph, {i: given[i] for i in stateful})
        whole = modules | {i: _equinox().combine(given[i], static) for i, (_, static) in parts.items()}
        result = fn(*tree.unflatten([whole.get(i, leaf) for i, leaf in enumerate(given)]))
        results = jax.tree.leaves(result, is_leaf=_is_module)
        returned = [one for one in results if isinstance(one, nnx.Pytree)]
        plain = [one for one in results if not isinstance(one, nnx.Pytree)]
        after = nnx.state((modules, returned))  # together: a module that is changed and returned is one result
        return after, [leaf for leaf in jax.tree.leaves(plain) if not parts or _is_array(leaf)]

    return of_arrays, tree.unflatten([shown.get(i, leaf) for i, leaf in enumerate(leaves)])


def _is_module(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Pytree) or _is_equinox(leaf)


def _equinox() -> Any:
    """Return equinox where it was imported, as it was where one of its modules is an argument; else None."""
    return sys.modules.get("equinox")


def _is_equinox(leaf: Any) -> bool:
    return _equinox() is not None and isinstance(leaf, _equinox().Module)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
