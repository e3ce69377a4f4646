"""The checkpoints of a traced program: where they stand, what is computed again there, what is wrong with them."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxmem.tracing.jaxprs import (
    PRODUCTS,
    checkpoint_call,
    computed_again,
    equations,
    inner_jaxprs,
    is_names,
    names_in,
    policy_arguments,
    scan_parts,
    tells_the_host,
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
        operation = Operation(eqn, times, in_loop, under, again or computed_again(eqn))
        yield operation
        runs = times * (eqn.params["length"] if name == "scan" else 1)
        around = under if operation.call is None else (*under, operation)
        for inner in inner_jaxprs(eqn):
            yield from operations(inner, runs, in_loop or _is_loop(eqn), around, operation.again)


def _is_loop(eqn: jex_core.JaxprEqn) -> bool:
    """Whether a loop is left in what is compiled: of a scan that is unrolled as far as it is long, none is."""
    if eqn.primitive.name == "scan":
        return eqn.params["unroll"] == 1 or eqn.params["unroll"] < eqn.params["length"]
    return eqn.primitive.name == "while"


def find_checkpoints(jaxpr: jex_core.Jaxpr) -> list[Operation]:
    """Return every checkpoint of a traced function."""
    return [operation for operation in operations(jaxpr) if operation.call is not None]


def work_again(gradient: jex_core.Jaxpr) -> tuple[int, int]:
    """Count the products, and the values of other operations, that checkpoints compute again, loops multiplied."""
    products = values = 0
    for operation in operations(gradient):
        if not operation.again or inner_jaxprs(operation.eqn):
            continue
        if operation.eqn.primitive.name in PRODUCTS:
            products += operation.times
        elif operation.eqn.primitive.name not in _NO_WORK:
            values += operation.times * sum(getattr(var.aval, "size", 0) for var in operation.eqn.outvars)
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
    for operation in operations(gradient):
        eqn = operation.eqn
        length = eqn.params["length"] if eqn.primitive.name == "scan" else 0
        if operation.under or length < 2:
            continue
        shapes = [getattr(var.aval, "shape", ()) for var in eqn.outvars]
        # A parameter may be taken apart before the loop: its first layers here, the others there.
        slices = {shape[1:] for shape in shapes if shape[:1] == (length,) and shape[1:] in stacked}
        inside = list(operations(inner_jaxprs(eqn)[0]))
        if slices and any(inner.eqn.primitive.name in PRODUCTS for inner in inside):
            covered = any(inner.call is not None or inner.again for inner in inside)
            layers.setdefault(tuple(sorted(slices)), Counter())[covered] += length
    return sum(count[False] for count in layers.values() if count[False] > count[True])


def placements(jaxpr: jex_core.Jaxpr) -> list[str]:
    """Return places at which a checkpoint usually saves nothing: reasons to name where memory did not fall."""
    reasons, checkpoints = [], find_checkpoints(jaxpr)
    for checkpoint in checkpoints:
        if any(checkpoint in other.under for other in checkpoints):
            continue
        if _has_scan(checkpoint.call.body):
            reasons.append(
                "A checkpoint around the loop: when the backward pass begins, the loop runs again and keeps what all "
                "its iterations keep. Checkpoint the loop's body: scan(checkpoint(f))."
            )
        elif not checkpoint.in_loop and len(checkpoints) == 1:
            reasons.append(
                "One checkpoint around everything: the backward pass begins by computing all of it again, and then "
                "holds what it would have held. Checkpoint every layer."
            )
    return list(dict.fromkeys(reasons))


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
    products: Counter[str] = Counter()
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            products[" ".join(str(var.aval) for var in (*eqn.invars, *eqn.outvars))] += times
    return products


def _has_scan(jaxpr: jex_core.Jaxpr) -> bool:
    return any(eqn.primitive.name == "scan" for eqn, _ in equations(jaxpr))


_POLICIES = jax.checkpoint_policies
_FACTORIES = tuple(
    getattr(_POLICIES, name)
    for name in (
        "save_only_these_names",
        "save_any_names_but_these",
        "save_anything_except_these_names",
        "save_and_offload_only_these_names",
        "save_from_both_policies",
        "offload_dot_with_no_batch_dims",
    )
)


def option_faults(jaxpr: jex_core.Jaxpr, gradient: Callable[[], jex_core.Jaxpr]) -> list[str]:
    """Return what is certainly wrong with a program's checkpoints: each makes one of them useless or different.

    `gradient` traces the program's gradient, where names are looked for that the program itself does not give.
    """
    checkpoints = find_checkpoints(jaxpr)
    faults = _name_faults(jaxpr, gradient, checkpoints)
    for checkpoint in checkpoints:
        faults += _policy_faults(checkpoint.call.policy)
        if not checkpoint.call.prevent_cse and not checkpoint.in_loop:
            faults.append(
                "prevent_cse=False outside a loop: the compiler may merge the second computation with the first. Leave "
                "it out; only inside a lax.scan that is not unrolled is it harmless."
            )
        if any(tells_the_host(eqn) for eqn, _ in equations(checkpoint.call.body)):
            faults.append(
                "a host callback inside a checkpoint: it runs again in the backward pass, so that what it counts or "
                "averages is counted twice. Return the value from the layer, and update outside."
            )
        if _kept_in_vain(checkpoint, checkpoints):
            faults.append(
                "a policy inside a checkpoint that saves nothing: while the outer one waits, what the inner one "
                "would save is not kept. Give the policy to the outer checkpoint."
            )
    return list(dict.fromkeys(faults))


def _policy_faults(policy: Any) -> list[str]:
    arguments = policy_arguments(policy)
    if any(policy is factory for factory in _FACTORIES):
        return [
            f"the policy is jax.checkpoint_policies.{policy.__name__} itself, not what it returns: everything is "
            "saved. Call it with the names."
        ]
    if getattr(policy, "__qualname__", "").startswith("save_anything_except_these_names"):
        return [
            "save_anything_except_these_names saves what it should except, since a name is the last of three copies. "
            "Use save_only_these_names, or llamem.Policy(save_all_but=...)."
        ]
    groups = [value for value in arguments.values() if isinstance(value, set | frozenset | list | tuple)]
    if not_names := [name for group in groups for name in group if isinstance(name, set | frozenset | list | tuple)]:
        return [
            f"the policy takes {not_names[0]!r} as one name, which nothing bears: write the names one by one, "
            "save_only_these_names('a', 'b')."
        ]
    memory = arguments.get("offload_dst")
    if memory is not None and memory != "pinned_host":
        return [f"the policy offloads to {memory!r}, which is not the host's memory: 'pinned_host' is."]
    return []


def _name_faults(
    jaxpr: jex_core.Jaxpr, gradient: Callable[[], jex_core.Jaxpr], checkpoints: list[Operation]
) -> list[str]:
    """Return names that a policy mentions and nothing bears. One policy may serve several layers."""
    faults, mentioned_by = [], {}
    for checkpoint in checkpoints:
        arguments = policy_arguments(checkpoint.call.policy).values()
        mentioned = frozenset(name for value in arguments if is_names(value) for name in value)
        if mentioned and not _policy_faults(checkpoint.call.policy):
            mentioned_by.setdefault(mentioned, []).append(checkpoint)
    for mentioned, alike in mentioned_by.items():
        given = [pair for checkpoint in alike for pair in names_in(checkpoint.call.body).items()]
        produced = {name for name, is_used in given if is_used}
        unused = {name for name, _ in given} - produced
        if not mentioned <= produced:
            # Forward rules of a custom_vjp are traced when JAX differentiates.
            produced |= set(names_in(gradient())) - set(names_in(jaxpr))
        # A layer that has no checkpoint, such as the last of an unrolled stack, may bear the rest.
        elsewhere = set(names_in(jaxpr)) - unused if produced & mentioned else set()
        for name in sorted(mentioned - produced - elsewhere):
            faults.append(
                f"the policy names {name!r}, which is given to a value that nobody uses: write y = checkpoint_name(y, "
                f"{name!r}) and go on with y."
                if name in unused
                else f"the policy names {name!r}, but the function names only {sorted(produced)}: misspelled, renamed, "
                "or given in a custom_vjp's function and not in its forward rule."
            )
    return faults


def _kept_in_vain(checkpoint: Operation, all_checkpoints: list[Operation]) -> bool:
    """Return whether what a policy saves is thrown away by the checkpoint around it.

    Around several layers, or a loop of them, an inner policy says what is kept while the group is computed again.
    """
    outer = checkpoint.under[-1] if checkpoint.under else None
    if outer is None or _saves_nothing(checkpoint) or not _saves_nothing(outer):
        return False
    beside = [other for other in all_checkpoints if other.under and other.under[-1] is outer]
    return len(beside) == 1 and (checkpoint.times, checkpoint.in_loop) == (outer.times, outer.in_loop)


def _saves_nothing(checkpoint: Operation) -> bool:
    return checkpoint.call.policy in (None, _POLICIES.nothing_saveable)
