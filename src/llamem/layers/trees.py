"""Trees of arrays cut in two and joined again, as `equinox.partition` and `combine` do; gradients that grow in f32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def partition(tree: PyTree, keep: Callable[[tuple[Any, ...], Any], bool]) -> tuple[PyTree, PyTree]:
    """Return the leaves for which `keep(path, leaf)` is true, and the others; None where the other tree has a leaf."""
    kept = jax.tree.map_with_path(lambda path, leaf: leaf if keep(path, leaf) else None, tree)
    others = jax.tree.map_with_path(lambda path, leaf: None if keep(path, leaf) else leaf, tree)
    return kept, others


def combine(one: PyTree, other: PyTree) -> PyTree:
    """Return the leaves of both; where both have one, that of the first. The reverse of `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, is_leaf=lambda a: a is None)


def by_gradient(args: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Split the arguments of a `custom_vjp` forward rule with `symbolic_zeros=True`.

    Return their values, the arrays whose gradients are asked for, and the others; the last two as from `partition`.
    """
    wanted, frozen = partition(args, lambda _, arg: arg.perturbed)
    return tuple(jax.tree.map(lambda arg: arg.value, part) for part in (args, wanted, frozen))


def wide_zeros(tree: PyTree, dtype: Any = jnp.float32) -> PyTree:
    """Return zeros in the shapes of `tree`, in `dtype` or the arrays' own types where those are wider."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, dtype)), tree)


def add_to(total: PyTree, tree: PyTree) -> PyTree:
    """Return `total + tree` in the types of `total`."""
    return jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Return `tree` in the types of `like`."""
    return jax.tree.map(lambda a, b: a.astype(b.dtype), tree, like)
