"""Where the checkpoints of a traced program stand, what is computed again there, and which layers have none."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.extend import core as jex_core

from llamem.memory.control_flow import OnDevices
from llamem.memory.jaxprs import (
    PRODUCTS,
    checkpoint_call,
    computed_again,
    control_flow,
    equations,
    inner_jaxprs,
    policy_arguments,
    scan_parts,
)

# These move numbers, or name them, and compute none.
_NO_WORK = ("name", "broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "concatenate", "iota", "copy")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a program: its body, its options, and what surrounds it, outermost first.

    `in_loop`: inside any loop; `repeats`: how often scans make it run, all loops multiplied; `axes`: the mesh axes, and
    their sizes, of the `shard_map`s around it.
    """

    body: jex_core.Jaxpr
    policy: Any
    prevent_cse: bool
    in_loop: bool
    repeats: int
    outer: tuple["Checkpoint", ...]
    axes: Mapping[str, int]


def find_checkpoints(
    jaxpr: jex_core.Jaxpr,
    in_loop: bool = False,
    repeats: int = 1,
    outer: tuple[Checkpoint, ...] = (),
    axes: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[Checkpoint]:
    """Yield every checkpoint of a traced function, those inside loops, calls and other checkpoints included."""
    for eqn in jaxpr.eqns:
        call = checkpoint_call(eqn)
        if call is not None:
            found = Checkpoint(call.body, call.policy, call.prevent_cse, in_loop, repeats, outer, axes)
            yield found
            yield from find_checkpoints(call.body, in_loop, repeats, (*outer, found), axes)
            continue
        flow = control_flow(eqn)
        inside = {**axes, **flow.mesh.shape} if isinstance(flow, OnDevices) else axes
        loops = in_loop or eqn.primitive.name in ("scan", "while")
        times = repeats * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for inner in inner_jaxprs(eqn):
            yield from find_checkpoints(inner, loops, times, outer, inside)


def work_again(gradient: jex_core.Jaxpr) -> tuple[int, int]:
    """Count the products, and the values of other operations, that checkpoints compute again, loops multiplied.

    JAX marks each operation that it computes again in the backward pass.
    """
    products = values = 0
    for eqn, times in _marked(gradient):
        if eqn.primitive.name in PRODUCTS:
            products += times
        elif eqn.primitive.name not in _NO_WORK:
            values += times * sum(getattr(var.aval, "size", 0) for var in eqn.outvars)
    return products, values


def layers_left_out(jaxpr: jex_core.Jaxpr) -> tuple[int, int]:
    """Return how many layers run under the commonest checkpoint, and how many with the same products run without any.

    A layer is told by its matrix products and convolutions: shapes and types, how often each. (0, 0) without products.
    """
    checkpoints = [checkpoint for checkpoint in find_checkpoints(jaxpr) if not checkpoint.outer]
    everywhere, under = _products(jaxpr), Counter()
    runs: Counter[tuple[Any, ...]] = Counter()
    for checkpoint in checkpoints:
        own = _products(checkpoint.body)
        under.update({product: times * checkpoint.repeats for product, times in own.items()})
        if own:
            runs[tuple(sorted(own.items()))] += checkpoint.repeats
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
    for eqn in _outside_checkpoints(gradient):
        if eqn.primitive.name != "scan" or (length := eqn.params["length"]) < 2:
            continue
        shapes = [getattr(var.aval, "shape", ()) for var in eqn.outvars]
        # A parameter may be taken apart before the loop: its first layers here, the others there.
        slices = {shape[1:] for shape in shapes if shape[:1] == (length,) and shape[1:] in stacked}
        (body,) = inner_jaxprs(eqn)
        operations = [inner for inner, _ in equations(body)]
        if slices and any(inner.primitive.name in PRODUCTS for inner in operations):
            covered = any(checkpoint_call(inner) is not None or computed_again(inner) for inner in operations)
            layers.setdefault(tuple(sorted(slices)), Counter())[covered] += length
    return sum(count[False] for count in layers.values() if count[False] > count[True])


def placements(jaxpr: jex_core.Jaxpr) -> list[str]:
    """Return places at which a checkpoint usually saves nothing: reasons to name where memory did not fall."""
    found = []
    checkpoints = list(find_checkpoints(jaxpr))
    for checkpoint in checkpoints:
        loops = _has_scan(checkpoint.body)
        inside = any(other.outer and other.outer[-1] is checkpoint for other in checkpoints)
        if loops and not inside:
            found.append(
                "A checkpoint around the loop: when the backward pass begins, the loop runs again and keeps what all "
                "its iterations keep. Checkpoint the loop's body: scan(checkpoint(f))."
            )
        elif not checkpoint.in_loop and not inside and len(checkpoints) == 1:
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
        if eqn.primitive.name != "scan" or not any(True for _ in find_checkpoints(inner_jaxprs(eqn)[0])):
            continue
        _, n_carry = scan_parts(eqn)
        sizes = [math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in eqn.outvars]  # pyrefly: ignore[missing-attribute]
        carried, handed_out = eqn.params["length"] * sum(sizes[:n_carry]), sum(sizes[n_carry:])
        total += handed_out if handed_out > 2 * carried else 0
    return total


def without_products(jaxpr: jex_core.Jaxpr) -> bool:
    """Return whether no checkpoint has a matrix product in it, and the program has some."""
    return bool(_products(jaxpr)) and not any(_products(one.body) for one in find_checkpoints(jaxpr))


def offloads(jaxpr: jex_core.Jaxpr) -> bool:
    """Return whether a policy of the program means to offload, wherever to."""
    return any("offload_dst" in policy_arguments(checkpoint.policy) for checkpoint in find_checkpoints(jaxpr))


def _marked(jaxpr: jex_core.Jaxpr, times: int = 1, again: bool = False) -> Iterator[tuple[jex_core.JaxprEqn, int]]:
    for eqn in jaxpr.eqns:
        marked, inside = again or computed_again(eqn), inner_jaxprs(eqn)
        if marked and not inside:
            yield eqn, times
        runs = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for inner in inside:
            yield from _marked(inner, runs, marked)


def _outside_checkpoints(jaxpr: jex_core.Jaxpr) -> Iterator[jex_core.JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn) if checkpoint_call(eqn) is None else ():
            yield from _outside_checkpoints(inner)


def _has_scan(jaxpr: jex_core.Jaxpr) -> bool:
    return any(eqn.primitive.name == "scan" for eqn, _ in equations(jaxpr))


def _products(jaxpr: jex_core.Jaxpr) -> Counter[str]:
    """Return the products and convolutions of a program, by shapes and types, and how often each is computed."""
    found: Counter[str] = Counter()
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            found[" ".join(str(var.aval) for var in (*eqn.invars, *eqn.outvars))] += times
    return found
