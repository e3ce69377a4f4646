"""State of flax nnx modules in a stack: counters of random streams, running statistics, whatever a layer sets.

A layer of a list changes its own variables. A layer of a stack is made for one turn of a loop, so what it has set is
returned from the loop, `[L, ...]`, and set in the stack's own variables. Nothing is lost without a word.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import spmd
from jax.extend import core as jex_core
from jax.extend.core import primitives

from jaxmem.tracing.jaxprs import Call, control_flow, inputs_passed_on


class Watch:
    """The variables of one layer, as they were before it ran."""

    def __init__(self, tree: Any):
        self.tree, self.variables = tree, variables_in(tree)
        self.structure, self.before = jax.tree.structure(tree), _values(self.variables)

    def values(self) -> list[Any]:
        """Return the variables' values now. Raise ValueError where the structure is another."""
        if self.variables and jax.tree.structure(self.tree) != self.structure:
            raise ValueError(
                "the layer changes the structure of its module while it runs (nnx's sow, a new attribute, a Python "
                "number): in a stack that would be lost. Return it with has_aux=True, or keep it in an nnx.Variable "
                "that is there from the start."
            )
        return _values(self.variables)

    def assigned(self) -> dict[int, tuple[Any, Any]]:
        """Return the values before and now of the variables that were set, by their numbers.

        nnx's own transforms, `nnx.remat` or `nnx.jit` inside a layer, set them all: `changed_by` tells which changed.
        """
        pairs = enumerate(zip(self.before, self.values(), strict=True))
        return {i: (old, new) for i, (old, new) in pairs if new is not old}


def changed_by(layer: jex_core.Jaxpr, assigned: dict[int, Any]) -> list[int]:
    """Return the numbers of the variables that a traced layer changes. Its last results are what `Watch` says it set.

    A weight that comes back as it went in must not leave the loop: that were a copy of the weights of all layers.
    """
    came_from = inputs_passed_on(layer)[len(layer.outvars) - 2 * len(assigned) :]
    before, now = came_from[::2], came_from[1::2]
    return [i for i, old, new in zip(assigned, before, now, strict=True) if new is None or new != old]


def set_variables(tree: Any, changed: dict[int, Any]) -> None:
    """Set the variables of the stack itself to what its layers have made of them, `[L, ...]`."""
    variables = variables_in(tree) if changed else []
    for i, value in changed.items():
        variables[i][...] = value


def check_not_lost(layer_jaxpr: jex_core.Jaxpr, x: Any, layer: Any) -> None:
    """Raise ValueError where a layer, traced with `x` and its own part, computes new state and throws it away.

    So it does where it merges a module of its own out of an `nnx.State`.
    """
    names = [""] * len(jax.tree.leaves(x))
    for path, node in jax.tree.leaves_with_path(layer, is_leaf=_is_variable):
        state = _is_variable(node) and not isinstance(node, nnx.Param)
        names += [jax.tree_util.keystr(path[1:]) if state else ""] * len(jax.tree.leaves(node))
    _, in_vain = _read(layer_jaxpr, [True] * len(layer_jaxpr.outvars))
    lost = [name for name, read in zip(names, in_vain, strict=True) if name and read]
    if lost:
        raise ValueError(
            f"the layer computes new values of {', '.join(lost[:4])}, which would be lost: each step would draw the "
            "same random numbers, or no statistic would ever move. Give apply_stack the stacked module itself instead "
            "of its nnx.State, apply_stack(lambda layer, x: layer(x), llamem.stack_layers(layers), x): its state is "
            "then carried. Or switch the layer to evaluation: module.eval()."
        )


_RESTATING = {primitives.convert_element_type_p, primitives.broadcast_in_dim_p, primitives.reshape_p}


def _read(jaxpr: jex_core.Jaxpr, wanted: list[bool]) -> tuple[list[bool], list[bool]]:
    """Return for each input whether a wanted result needs it, and whether an operation reads it in vain.

    JAX keeps operations whose results nothing needs.
    """
    needed = {var for var, want in zip(jaxpr.outvars, wanted, strict=True) if want and isinstance(var, jex_core.Var)}
    in_vain: set[jex_core.Var] = set()
    for eqn in reversed(jaxpr.eqns):
        wants = [var in needed for var in eqn.outvars]
        if isinstance(call := control_flow(eqn), Call):  # nnx.jit or nnx.remat
            needs, reads = _read(call.body.jaxpr, wants)
        elif eqn.primitive in _RESTATING and not any(wants):  # no new value: read in vain where its result is
            needs, reads = [False], [eqn.outvars[0] in in_vain]
        else:
            needs = [any(wants) or bool(eqn.effects)] * len(eqn.invars)
            reads = [not need for need in needs]
        for var, is_needed, is_read in zip(eqn.invars, needs, reads, strict=True):
            if isinstance(var, jex_core.Var):
                needed |= {var} if is_needed else set()
                in_vain |= {var} if is_read else set()
    return [var in needed for var in jaxpr.invars], [var in in_vain for var in jaxpr.invars]


def layers_axis_named(stacked: Any) -> Any:
    """Return a new stack whose variables' sharding names, those of one layer, name the axis of layers: split by none.

    As `nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})` does.
    """
    for variable in variables_in(stacked):
        spmd.add_axis(variable, 0, {nnx.PARTITION_NAME: None})
    return stacked


def layers_axis_unnamed(layer: Any) -> Any:
    """Return a new layer of a stack whose variables' sharding names are those of its own axes."""
    for variable in variables_in(layer):
        names = [value for key, value in variable.get_metadata().items() if key in _SHARDING_NAMES and value]
        if names and len(names[0]) == jnp.ndim(variable[...]) + 1:
            spmd.remove_axis(variable, 0, {nnx.PARTITION_NAME: names[0][0]})
    return layer


_SHARDING_NAMES = ("out_sharding", "sharding_names")  # the second before flax 0.12


def variables_in(tree: Any) -> list[nnx.Variable]:
    """Return the nnx variables of a tree, the objects themselves."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_variable) if _is_variable(leaf)]


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _values(variables: list[nnx.Variable]) -> list[Any]:
    return [value for variable in variables for value in jax.tree.leaves(variable)[:1]]
