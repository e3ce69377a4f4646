"""Where the checkpoints of a traced program stand, and what is wrong with their places and policies."""

import dataclasses
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
    control_flow,
    equations,
    given_name,
    inner_jaxprs,
    is_names,
    names_in,
    names_when_differentiated,
    policy_arguments,
    tells_the_host,
)

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
    """Every checkpoint of a traced function, those inside loops, calls and other checkpoints included."""
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


def faults(jaxpr: jex_core.Jaxpr) -> list[str]:
    """What is certainly wrong with a program's checkpoints, in words: each makes one of them useless or different."""
    checkpoints = list(find_checkpoints(jaxpr))
    found = _name_faults(jaxpr, checkpoints)
    for checkpoint in checkpoints:
        found += _policy_faults(checkpoint)
        if not checkpoint.prevent_cse and not checkpoint.in_loop:
            found.append(
                "prevent_cse=False outside a loop: the compiler may merge the second computation with the first. Leave "
                "it out; only inside lax.scan is it harmless."
            )
        if any(tells_the_host(eqn) for eqn, _ in equations(checkpoint.body)):
            found.append(
                "a host callback inside a checkpoint: it runs again in the backward pass, so that what it counts or "
                "averages is counted twice. Return the value from the layer, and update outside."
            )
        if _kept_in_vain(checkpoint, checkpoints):
            found.append(
                "a policy inside a checkpoint that saves nothing: while the outer one waits, what the inner one "
                "would save is not kept. Give the policy to the outer checkpoint."
            )
    return list(dict.fromkeys(found))


def layers_left_out(jaxpr: jex_core.Jaxpr) -> tuple[int, int]:
    """How many layers run under the commonest checkpoint, and how many with the same products run without any.

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


def offloads(jaxpr: jex_core.Jaxpr) -> bool:
    """Whether a policy of the program means to offload, wherever to."""
    return any("offload_dst" in policy_arguments(checkpoint.policy) for checkpoint in find_checkpoints(jaxpr))


def placements(jaxpr: jex_core.Jaxpr) -> list[str]:
    """Places at which a checkpoint usually saves nothing: reasons to name where memory did not fall."""
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


def _has_scan(jaxpr: jex_core.Jaxpr) -> bool:
    return any(eqn.primitive.name == "scan" for eqn, _ in equations(jaxpr))


def _products(jaxpr: jex_core.Jaxpr) -> Counter[str]:
    """The products and convolutions of a program, by shapes and types, and how often each is computed."""
    found: Counter[str] = Counter()
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            found[" ".join(str(var.aval) for var in (*eqn.invars, *eqn.outvars))] += times
    return found


def _kept_in_vain(checkpoint: Checkpoint, all_checkpoints: list[Checkpoint]) -> bool:
    """Whether what a policy saves is thrown away by the checkpoint around it.

    Around several layers, or a loop of them, an inner policy says what is kept while the group is computed again.
    """
    if not checkpoint.outer or _saves_nothing(checkpoint.policy) or not _saves_nothing(checkpoint.outer[-1].policy):
        return False
    outer = checkpoint.outer[-1]
    beside = [other for other in all_checkpoints if other.outer and other.outer[-1] is outer]
    return len(beside) == 1 and checkpoint.repeats == outer.repeats and checkpoint.in_loop == outer.in_loop


def _policy_faults(checkpoint: Checkpoint) -> list[str]:
    policy = checkpoint.policy
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
    chip = policy_arguments(policy).get("offload_dst")
    if chip is not None and chip != "pinned_host":
        return [f"the policy offloads to {chip!r}, which is not the host's memory: 'pinned_host' is."]
    return []


def _name_faults(jaxpr: jex_core.Jaxpr, checkpoints: list[Checkpoint]) -> list[str]:
    """Names that a policy mentions and nothing bears. One policy may serve several layers: any of them may name it."""
    found, mentioned_by = [], {}
    for checkpoint in checkpoints:
        arguments = policy_arguments(checkpoint.policy).values()
        mentioned = frozenset(name for value in arguments if is_names(value) for name in value)
        if mentioned and not _policy_faults(checkpoint):
            mentioned_by.setdefault(mentioned, []).append(checkpoint)
    for mentioned, alike in mentioned_by.items():
        given = [pair for checkpoint in alike for pair in _names(checkpoint.body)]
        produced = {name for name, used in given if used}
        if not mentioned <= produced:
            rules = (names_when_differentiated(jex_core.ClosedJaxpr(one.body, ()), one.axes) for one in alike)
            produced |= {name for names in rules for name in names if (name, False) not in given}
        unused = {name for name, used in given if not used} - produced
        # A layer that has no checkpoint, such as the last of an unrolled stack, may bear the rest.
        elsewhere = set(names_in(jaxpr)) - unused if produced & mentioned else set()
        for name in sorted(mentioned - produced - elsewhere):
            found.append(
                f"the policy names {name!r}, which is given to a value that nobody uses: write y = checkpoint_name(y, "
                f"{name!r}) and go on with y."
                if name in unused
                else f"the policy names {name!r}, but the function names only {sorted(produced)}: misspelled, or "
                "renamed."
            )
    return found


def _saves_nothing(policy: Any) -> bool:
    return policy is None or policy is _POLICIES.nothing_saveable


def _names(jaxpr: jex_core.Jaxpr) -> Iterator[tuple[str, bool]]:
    """Every name given in a program, and whether what bears it is used."""
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | {id(var) for var in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if (name := given_name(eqn)) is not None:
            yield name, id(eqn.outvars[0]) in used
        for inner in inner_jaxprs(eqn):
            yield from _names(inner)
