"""Where the checkpoints of a traced program stand, what is computed again there, and which layers have none."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax
from jax.extend import core as jex_core

from llamem.memory.jaxprs import (
    PRODUCTS,
    checkpoint_call,
    computed_again,
    equations,
    inner_jaxprs,
    scan_parts,
)

# These move numbers, or name them, and compute none.
_NO_WORK = ("name", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "concatenate", "iota", "copy")


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An operation of a traced program, and what surrounds it.

    `times`: how often scans make it run, all multiplied; `in_loop`: inside any loop; `under`: the checkpoints around
    it, outermost first; `again`: JAX marked it, or one around it, as computed again in the backward pass.
    """

    eqn: jex_core.JaxprEqn
    times: int
    in_loop: bool
    under: tuple["Operation", ...]
    again: bool

    @cached_property
    def call(self) -> Any:
        """The `CheckpointCall` that it is; None for any other operation."""
        return checkpoint_call(self.eqn)


def operations(
    jaxpr: jex_core.Jaxpr,
    times: int = 1,
    in_loop: bool = False,
    under: tuple[Operation, ...] = (),
    again: bool = False,
) -> Iterator[Operation]:
    """Yield every operation of a traced function, those inside loops, calls and checkpoints included."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        one = Operation(eqn, times, in_loop, under, again or computed_again(eqn))
        yield one
        runs = times * (eqn.params["length"] if name == "scan" else 1)
        around = under if one.call is None else (*under, one)
        for inner in inner_jaxprs(eqn):
            yield from operations(inner, runs, in_loop or name in ("scan", "while"), around, one.again)


def find_checkpoints(jaxpr: jex_core.Jaxpr) -> list[Operation]:
    """Return every checkpoint of a traced function."""
    return [one for one in operations(jaxpr) if one.call is not None]


def work_again(gradient: jex_core.Jaxpr) -> tuple[int, int]:
    """Count the products, and the values of other operations, that checkpoints compute again, loops multiplied."""
    products = values = 0
    for one in operations(gradient):
        if not one.again or inner_jaxprs(one.eqn):
            continue
        if one.eqn.primitive.name in PRODUCTS:
            products += one.times
        elif one.eqn.primitive.name not in _NO_WORK:
            values += one.times * sum(getattr(var.aval, "size", 0) for var in one.eqn.outvars)
    return products, values


def layers_left_out(jaxpr: jex_core.Jaxpr) -> tuple[int, int]:
    """Return how many layers run under the commonest checkpoint, and how many with the same products run without any.

    A layer is told by its matrix products and convolutions: shapes and types, how often each. (0, 0) without products.
    """
    everywhere, under, runs = products_of(jaxpr), Counter(), Counter()
    for checkpoint in find_checkpoints(jaxpr):
        own = products_of(checkpoint.call.body)
        if not checkpoint.under and own:
            under.update({product: times * checkpoint.times for product, times in own.items()})
            runs[tuple(sorted(own.items()))] += checkpoint.times
    if not runs:
        return 0, 0
    layer, covered = runs.most_common(1)[0]
    return covered, min((everywhere[product] - under[product]) // times for product, times in layer)


def stacks_left_out(gradient: jex_core.Jaxpr, params: Any) -> int:
    """Return how many layers stand in stacks of which most, or all, are differentiated without a checkpoint.

    A stack is told by its backward loop: it returns the gradients of stacked parameters, one slice in each turn. Stacks
    of the same shapes count as one.
    """
    stacked = {leaf.shape[1:] for leaf in jax.tree.leaves(params) if getattr(leaf, "ndim", 0) > 2}
    layers: dict[tuple[Any, ...], Counter[bool]] = {}
    for one in operations(gradient):
        if one.under or one.eqn.primitive.name != "scan" or (length := one.eqn.params["length"]) < 2:
            continue
        shapes = [getattr(var.aval, "shape", ()) for var in one.eqn.outvars]
        # A parameter may be taken apart before the loop: its first layers here, the others there.
        slices = {shape[1:] for shape in shapes if shape[:1] == (length,) and shape[1:] in stacked}
        inside = list(operations(inner_jaxprs(one.eqn)[0]))
        if slices and any(inner.eqn.primitive.name in PRODUCTS for inner in inside):
            covered = any(inner.call is not None or inner.again for inner in inside)
            layers.setdefault(tuple(sorted(slices)), Counter())[covered] += length
    return sum(count[False] for count in layers.values() if count[False] > count[True])


def placements(jaxpr: jex_core.Jaxpr) -> list[str]:
    """Return places at which a checkpoint usually saves nothing: reasons to name where memory did not fall."""
    found, checkpoints = [], find_checkpoints(jaxpr)
    for checkpoint in checkpoints:
        if any(checkpoint in other.under for other in checkpoints):
            continue
        if _has_scan(checkpoint.call.body):
            found.append(
                "A checkpoint around the loop: when the backward pass begins, the loop runs again and keeps what all "
                "its iterations keep. Checkpoint the loop's body: scan(checkpoint(f))."
            )
        elif not checkpoint.in_loop and len(checkpoints) == 1:
            found.append(
                "One checkpoint around everything: the backward pass begins by computing all of it again, and then "
                "holds what it would have held. Checkpoint every layer."
            )
    if not checkpoints and _has_scan(jaxpr):
        found.append(
            "A loop inside the differentiated function keeps the residuals of every iteration. If it accumulates "
            "microbatches, take the gradient inside the loop; if it runs layers, checkpoint its body."
        )
    return list(dict.fromkeys(found))


def large_results(jaxpr: jex_core.Jaxpr) -> int:
    """Return the bytes that loops of checkpointed layers hand out by turns, where over twice what they carry."""
    total = 0
    for eqn, _ in equations(jaxpr):
        if eqn.primitive.name != "scan" or not find_checkpoints(inner_jaxprs(eqn)[0]):
            continue
        _, n_carry = scan_parts(eqn)
        sizes = [math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in eqn.outvars]  # pyrefly: ignore[missing-attribute]
        carried, handed_out = eqn.params["length"] * sum(sizes[:n_carry]), sum(sizes[n_carry:])
        total += handed_out if handed_out > 2 * carried else 0
    return total


def products_of(jaxpr: jex_core.Jaxpr) -> Counter[str]:
    """Return the products and convolutions of a program, by shapes and types, and how often each is computed."""
    found: Counter[str] = Counter()
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            found[" ".join(str(var.aval) for var in (*eqn.invars, *eqn.outvars))] += times
    return found


def _has_scan(jaxpr: jex_core.Jaxpr) -> bool:
    return any(eqn.primitive.name == "scan" for eqn, _ in equations(jaxpr))
