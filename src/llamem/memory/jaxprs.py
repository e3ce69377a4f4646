"""Walks over traced programs, and every use of what JAX does not promise to keep as it is."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core as jex_core


def names_in(jaxpr: jex_core.Jaxpr) -> Iterator[str]:
    """Every `checkpoint_name` in a jaxpr, those inside scans, calls and checkpoints included."""
    for eqn, _ in equations(jaxpr):
        if (name := given_name(eqn)) is not None:
            yield name


def given_name(eqn: jex_core.JaxprEqn) -> str | None:
    """The name that this operation gives to its result with `checkpoint_name`; None for any other operation."""
    # With jax_remat3 a name, like a checkpoint, is an object of its own inside one kind of operation.
    named: Any = eqn.params.get("_prim")
    if type(named).__name__ == "CheckpointName":
        return named.params["name"]
    return eqn.params["name"] if eqn.primitive.name == "name" else None


def equations(jaxpr: jex_core.Jaxpr, times: int = 1) -> Iterator[tuple[jex_core.JaxprEqn, int]]:
    """Every operation of a program, those inside others included, and how often scans make it run."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in inner_jaxprs(eqn):
            yield from equations(inner, times * trips)


def inner_jaxprs(eqn: jex_core.JaxprEqn) -> list[Any]:
    """The programs inside one operation: a loop's body, a call's function, a cond's branches."""
    kinds = (jex_core.Jaxpr, jex_core.ClosedJaxpr)
    of_object = getattr(eqn.params.get("_prim"), "params", {})
    params = (*eqn.params.values(), *of_object.values())
    params = jax.tree.leaves(params, is_leaf=lambda param: isinstance(param, kinds))
    return [getattr(param, "jaxpr", param) for param in params if isinstance(param, kinds)]


def scan_parts(eqn: jex_core.JaxprEqn) -> tuple[int, int]:
    """How many constants and how many carried values a scan has: the first and the next of its operands."""
    if "ft_in" in eqn.params:  # since JAX 0.12
        consts, carry, _ = eqn.params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return eqn.params["num_consts"], eqn.params["num_carry"]
