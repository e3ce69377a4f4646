"""Trees of arrays cut in two and joined again, as `equinox.partition` and `combine` do; gradients that grow in f32."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, PyTree


def partition(tree: PyTree, keep: Callable[[tuple[Any, ...], Any], bool]) -> tuple[PyTree, PyTree]:
    """Return the leaves for which `keep(path, leaf)` is true, and the others; None where the other tree has a leaf."""
    kept = jax.tree.map_with_path(lambda path, leaf: leaf if keep(path, leaf) else None, tree)
    others = jax.tree.map_with_path(lambda path, leaf: None if keep(path, leaf) else leaf, tree)
    return kept, others


def combine(one: PyTree, other: PyTree) -> PyTree:
    """Return the leaves of both; where both have one, that of the first. The reverse of `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, is_leaf=lambda a: a is None)


def by_gradient(args: PyTree) -> tuple[PyTree, Array]:
    """Return the values of the arguments of a `custom_vjp` forward rule with `symbolic_zeros=True`, and a mark.

    The mark says whose gradients are asked for, to `by_mark` in the backward rule. It says so by its shape, an empty
    array's: JAX keeps one tree of residuals for each traced program, that of its last differentiation, and a tree that
    depends on what is differentiated would be taken for that of another (seen with 0.10.2: zeros, without an error).
    """
    return jax.tree.map(lambda arg: arg.value, args), mark(arg.perturbed for arg in jax.tree.leaves(args))


def mark(flags: Iterable[bool]) -> Array:
    """Return an empty array whose shape says these flags: `[0, ...]`, sixteen of them in each further size."""
    flags = list(flags)
    parts = [flags[start : start + 16] for start in range(0, len(flags), 16)]
    return jnp.zeros((0, *(sum(flag << i for i, flag in enumerate(part)) for part in parts)), jnp.int8)


def flags_of(mark: Array, count: int) -> list[bool]:
    """Return the first flags that a mark says."""
    return [bool(mark.shape[1 + i // 16] >> i % 16 & 1) for i in range(count)]


def by_mark(values: PyTree, mark: Array) -> tuple[PyTree, PyTree]:
    """Return the values whose gradients are asked for, and the others, as from `partition`. See `by_gradient`."""
    leaves, tree = jax.tree.flatten(values)
    flags = flags_of(mark, len(leaves))
    parts = [[leaf if flag == wanted else None for leaf, flag in zip(leaves, flags, strict=True)] for wanted in (1, 0)]
    wanted, frozen = map(tree.unflatten, parts)
    return wanted, frozen


def with_zeros(gradients: PyTree, args: PyTree) -> PyTree:
    """Return what a backward rule gives back, whatever is differentiated: None, or for old JAX a zero that says so.

    Before 0.9 a rule that returns None for other arguments than before meets a bare AssertionError. `args`: the
    arguments, or their types; None in `gradients` may stand for a whole tree of them.
    """
    if jax.__version_info__ >= (0, 9):
        return gradients

    def zero(arg: Any) -> SymbolicZero | None:
        aval = arg if isinstance(arg, jax.core.AbstractValue) else jax.typeof(arg)
        return SymbolicZero(aval) if jnp.issubdtype(arg.dtype, jnp.inexact) else None

    def filled(gradient: Any, args: PyTree) -> PyTree:
        return jax.tree.map(zero, args) if gradient is None else gradient

    return jax.tree.map(filled, gradients, args, is_leaf=lambda gradient: gradient is None)


def wide_zeros(tree: PyTree, dtype: Any = jnp.float32) -> PyTree:
    """Return zeros in the shapes of `tree`, in `dtype` or the arrays' own types where those are wider."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, dtype)), tree)


def add_to(total: PyTree, tree: PyTree) -> PyTree:
    """Return `total + tree` in the types of `total`."""
    return jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Return `tree` in the types of `like`."""
    return jax.tree.map(lambda a, b: a.astype(b.dtype), tree, like)
