"""Walks over traced programs, and every use of what JAX does not promise to keep as it is."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
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


def matmul_flops(jaxpr: jex_core.Jaxpr) -> int:
    """FLOPs of the matrix products of a jaxpr, those in scans times their length; a cond counts its largest branch.

    `while` loops of unknown length are counted once, as the compilers do.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape  # pyrefly: ignore[missing-attribute]
            out = eqn.outvars[0].aval.shape  # pyrefly: ignore[missing-attribute]
            total += 2 * int(np.prod(out)) * int(np.prod([lhs[axis] for axis in contract]))
        inner = [matmul_flops(jaxpr) for jaxpr in inner_jaxprs(eqn)]
        if eqn.primitive.name == "cond":
            total += max(inner, default=0)
        elif eqn.primitive.name != "pallas_call":
            total += sum(inner) * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else sum(inner)
    return total


def moved_to_host(jaxpr: jex_core.Jaxpr) -> int:
    """Bytes that a program asks to be put into the host's memory, as offloading policies write it, loops multiplied."""
    total = 0
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name == "device_put" and "host" in str(eqn.params["devices"]).lower():
            avals: list[Any] = [var.aval for var in eqn.outvars]
            total += times * sum(aval.size * aval.dtype.itemsize for aval in avals)
    return total


def callbacks_in(jaxpr: jex_core.Jaxpr) -> Iterator[str]:
    """Names of the operations that call Python while the program runs, `jax.debug.print` among them."""
    for eqn, _ in equations(jaxpr):
        if "callback" in eqn.primitive.name or eqn.primitive.name == "debug_print":
            yield eqn.primitive.name


def same_value_before(
    jaxpr: jex_core.Jaxpr, eqn: jex_core.JaxprEqn, var: jex_core.Var
) -> tuple[jex_core.Jaxpr, jex_core.Var] | None:
    """Where the value of `var`, a result of `eqn` in `jaxpr`, stood before: inside a loop or call, or as its operand.

    None where `eqn` itself computed it, gave it a name, or hands it out of a loop in which nothing changes it.
    """
    if given_name(eqn) is not None:
        return None
    inner = inner_program(eqn)
    if inner is None:
        # Casting to the same precision is how JAX marks a residual; what it casts is the answer.
        operand = eqn.invars[0] if eqn.primitive.name == "reduce_precision" else None
        return (jaxpr, operand) if isinstance(operand, jex_core.Var) else None
    inside = inner.outvars[eqn.outvars.index(var)]
    if not isinstance(inside, jex_core.Var):
        return None
    if inside not in inner.invars or len(inner.invars) != len(eqn.invars):
        return inner, inside
    operand = eqn.invars[inner.invars.index(inside)]
    passes_on = eqn.primitive.name != "scan" and isinstance(operand, jex_core.Var)
    return (jaxpr, operand) if passes_on else None


def inner_program(eqn: jex_core.JaxprEqn) -> Any:
    """The program inside a loop, call or checkpoint that computes its results, or None."""
    return next((inner for inner in inner_jaxprs(eqn) if len(inner.outvars) == len(eqn.outvars)), None)


def lines_of(eqn: jex_core.JaxprEqn) -> Iterator[tuple[str, int]]:
    """File and line of each call that led to an operation, the innermost first."""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        yield frame.file_name, frame.line_num
