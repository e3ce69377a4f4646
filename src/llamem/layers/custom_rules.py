"""Trees of arrays cut in two and joined again, as `equinox.partition` and `combine` do; gradients that grow in f32."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, PyTree


def partition(tree: PyTree, keep: Callable[[tuple[Any, ...], Any], bool]) -> tuple[PyTree, PyTree]:
    """Return the leaves for which `keep(path, leaf)` is true, and the others; None where the other tree has a leaf."""
    chosen = jax.tree.map_with_path(lambda path, leaf: leaf if keep(path, leaf) else None, tree)
    others = jax.tree.map_with_path(lambda path, leaf: None if keep(path, leaf) else leaf, tree)
    return chosen, others


def combine(first: PyTree, second: PyTree) -> PyTree:
    """Return the leaves of both; where both have one, that of the first. The reverse of `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda a: a is None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WantedGradients:
    """Whose gradients a backward rule is asked for, said by the shape of an empty array among the rule's residuals.

    JAX keeps one tree of residuals for each traced program, that of its last differentiation, and a tree that depends
    on what is differentiated would be taken for that of another (seen with 0.10.2: zeros, without an error).
    """

    flags: Array  # [0, ...], sixteen of them in each further size

    @classmethod
    def of(cls, are_wanted: Iterable[bool]) -> "WantedGradients":
        """Return what says these flags, one for each leaf of the rule's arguments."""
        flags = list(are_wanted)
        sizes = [sum(flag << i for i, flag in enumerate(flags[n : n + 16])) for n in range(0, len(flags), 16)]
        return cls(jnp.zeros((0, *sizes), jnp.int8))

    def partition(self, args: PyTree) -> tuple[PyTree, PyTree]:
        """Return the leaves whose gradients are asked for, and the others; None where the other tree has a leaf."""
        leaves, tree = jax.tree.flatten(args)
        sizes = self.flags.shape[1:]
        flags = [bool(sizes[i // 16] >> i % 16 & 1) for i in range(len(leaves))]
        wanted = [leaf if flag else None for leaf, flag in zip(leaves, flags, strict=True)]
        others = [None if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
        return tree.unflatten(wanted), tree.unflatten(others)


def with_rule(
    value: Callable[..., Any],
    backward: Callable[[PyTree, PyTree, Any], PyTree],
    forward: Callable[[PyTree, PyTree], tuple[Any, PyTree]] | None = None,
) -> Callable[..., Any]:
    """Return `value` with gradients of its own in reverse mode, computed for those arguments alone that are asked for.

    Args:
        value: function of trees of arrays.
        backward: takes what was kept and the result's cotangent; returns a tuple of gradients like `value`'s arguments,
            None where none is asked for. Kept are the arguments, in two trees as from `partition`: whose gradients are
            asked for, and the others.
        forward: takes the arguments in two trees like that, returns the result and what `backward` is given as its
            first tree instead of the arguments.
    """

    def call(*args: PyTree) -> Any:
        types = jax.tree.map(jax.typeof, args)

        @jax.custom_vjp
        def ruled(*args: PyTree) -> Any:
            return value(*args)

        def rule_forward(*args: PyTree) -> tuple[Any, Any]:
            gradients = WantedGradients.of(arg.perturbed for arg in jax.tree.leaves(args))
            values = jax.tree.map(lambda arg: arg.value, args)
            if forward is None:
                # Called with its rule: run in place, XLA for GPUs copied the blocks of all layers in another order (8B
                # over four bits, tiles and groups of heads, an L4: 12.0 GiB, not 9.2).
                return ruled(*values), (values, gradients)
            result, kept = forward(*gradients.partition(values))
            kept = iter(jax.tree.leaves(kept))
            return result, (jax.tree.map(lambda arg: next(kept) if arg.perturbed else jnp.zeros(0), args), gradients)

        def rule_backward(residuals: Any, cotangent: Any) -> PyTree:
            kept, gradients = residuals
            wanted, others = gradients.partition(kept)
            return with_zeros(backward(wanted, others, jax.tree.map(_dense, cotangent)), types)

        ruled.defvjp(rule_forward, rule_backward, symbolic_zeros=True)
        return ruled(*args)

    return call


def _dense(cotangent: Any) -> Array:
    if isinstance(cotangent, SymbolicZero):
        zero: Any = cotangent
        return jnp.zeros(zero.shape, zero.dtype)
    return cotangent


def vjp_of(fn: Callable[..., Any], wanted: PyTree, frozen: PyTree) -> tuple[Any, Callable[[Any], PyTree]]:
    """Return `jax.vjp` of `fn(*args)` for the leaves of its arguments that are in `wanted`; the others are `frozen`."""
    return jax.vjp(lambda *wanted: fn(*combine(wanted, frozen)), *wanted)


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
