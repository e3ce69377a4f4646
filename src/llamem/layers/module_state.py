"""State of flax nnx modules in a stack: counters of random streams, running statistics, whatever a layer sets.

A layer of a list changes its own variables. A layer of a stack is made for one turn of a loop, so what it has set is
returned from the loop, `[L, ...]`, and set in the stack's own variables. Nothing is lost without a word.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.extend import core as jex_core


class Watch:
    """The variables of one layer, as they were before it ran."""

    def __init__(self, tree: Any):
        self.tree, self.variables = tree, variables_in(tree)
        self.structure, self.before = jax.tree.structure(tree), _values(self.variables)

    def changed(self) -> dict[int, Any]:
        """Return the new values by the variables' numbers. Raise ValueError where the structure is another."""
        if not self.variables:
            return {}
        if jax.tree.structure(self.tree) != self.structure:
            raise ValueError(
                "the layer changes the structure of its module while it runs (nnx's sow, a new attribute, a Python "
                "number): in a stack that would be lost. Return it with has_aux=True, or keep it in an nnx.Variable "
                "that is there from the start."
            )
        pairs = enumerate(zip(self.before, _values(self.variables), strict=True))
        return {i: new for i, (old, new) in pairs if new is not old}


def set_variables(tree: Any, changed: dict[int, Any]) -> None:
    """Set the variables of the stack itself to what its layers have made of them, `[L, ...]`."""
    variables = variables_in(tree) if changed else []
    for i, value in changed.items():
        variables[i][...] = value


def check_not_lost(body: Callable, x: Any, layer: Any) -> jax.extend.core.ClosedJaxpr:
    """Return the traced layer. Raise ValueError where it computes new state from its variables and throws it away.

    So it does where it merges a module of its own out of an `nnx.State`.
    """
    jaxpr = jax.make_jaxpr(body)(x, layer)
    names = [""] * len(jax.tree.leaves(x))
    for path, node in jax.tree.leaves_with_path(layer, is_leaf=_is_variable):
        state = _is_variable(node) and not isinstance(node, nnx.Param)
        names += [jax.tree_util.keystr(path[1:]) if state else ""] * len(jax.tree.leaves(node))
    lost = [name for name, read in zip(names, _read_in_vain(jaxpr.jaxpr), strict=True) if name and read]
    if lost:
        raise ValueError(
            f"the layer computes new values of {', '.join(lost[:4])}, which would be lost: each step would draw the "
            "same random numbers, or no statistic would ever move. Give apply_stack the stacked module itself instead "
            "of its nnx.State, apply_stack(lambda layer, x: layer(x), llamem.stack_layers(layers), x): its state is "
            "then carried. Or switch the layer to evaluation: module.eval()."
        )
    return jaxpr


def _read_in_vain(jaxpr: jex_core.Jaxpr) -> list[bool]:
    """Return for each input whether an operation reads it whose result nothing needs. JAX keeps such operations."""
    needed, in_vain = {var for var in jaxpr.outvars if isinstance(var, jex_core.Var)}, set()
    for eqn in reversed(jaxpr.eqns):
        inputs = [var for var in eqn.invars if isinstance(var, jex_core.Var)]
        (needed if eqn.effects or needed.intersection(eqn.outvars) else in_vain).update(inputs)
    return [var in in_vain for var in jaxpr.invars]


def has_state(tree: Any) -> bool:
    """Return whether a tree holds nnx variables that are no parameters."""
    return any(not isinstance(variable, nnx.Param) for variable in variables_in(tree))


def variables_in(tree: Any) -> list[nnx.Variable]:
    """Return the nnx variables of a tree, the objects themselves."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_variable) if _is_variable(leaf)]


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _values(variables: list[nnx.Variable]) -> list[Any]:
    return [value for variable in variables for value in jax.tree.leaves(variable)[:1]]
