"""Where the checkpoints of a traced program stand, and what is wrong with their places and policies."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core as jex_core

from llamem.memory.jaxprs import equations, given_name, inner_jaxprs

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
    """One checkpoint of a program: its body, its options, and what surrounds it, outermost first."""

    body: jex_core.Jaxpr
    policy: Any
    prevent_cse: bool
    in_loop: bool
    outer: tuple["Checkpoint", ...]


def find_checkpoints(
    jaxpr: jex_core.Jaxpr, in_loop: bool = False, outer: tuple[Checkpoint, ...] = ()
) -> Iterator[Checkpoint]:
    """Every checkpoint of a traced function, those inside loops, calls and other checkpoints included."""
    for eqn in jaxpr.eqns:
        body = checkpoint_body(eqn)
        if body is not None:
            params = _options(eqn)
            found = Checkpoint(body, params["policy"], bool(params.get("prevent_cse", True)), in_loop, outer)
            yield found
            yield from find_checkpoints(body, in_loop, (*outer, found))
            continue
        for inner in inner_jaxprs(eqn):
            yield from find_checkpoints(inner, in_loop or eqn.primitive.name in ("scan", "while"), outer)


def checkpoint_body(eqn: jex_core.JaxprEqn) -> jex_core.Jaxpr | None:
    """The program under a checkpoint, or None for any other operation."""
    prim = eqn.params.get("_prim")
    if eqn.primitive.name in ("checkpoint", "remat", "remat2") or type(prim).__name__.startswith("Remat"):
        body = _options(eqn)["jaxpr"]
        return getattr(body, "jaxpr", body)
    return None


def _options(eqn: jex_core.JaxprEqn) -> dict[str, Any]:
    # With jax_remat3 a checkpoint is an object inside one kind of operation.
    return getattr(eqn.params.get("_prim"), "params", eqn.params)


def faults(jaxpr: jex_core.Jaxpr) -> list[str]:
    """What is certainly wrong with a program's checkpoints, in words: each makes one of them useless or different."""
    found = []
    for checkpoint in find_checkpoints(jaxpr):
        found += _policy_faults(checkpoint)
        if not checkpoint.prevent_cse and not checkpoint.in_loop:
            found.append(
                "prevent_cse=False outside a loop: the compiler may merge the second computation with the first. Leave "
                "it out; only inside lax.scan is it harmless."
            )
        if any(_acts(eqn) for eqn, _ in equations(checkpoint.body)):
            found.append(
                "a host callback inside a checkpoint: it runs again in the backward pass, so that what it counts or "
                "averages is counted twice. Return the value from the layer, and update outside."
            )
        if checkpoint.outer and _saves_nothing(checkpoint.outer[-1].policy) and not _saves_nothing(checkpoint.policy):
            found.append(
                "a policy inside a checkpoint that saves nothing: while the outer one waits, what the inner one "
                "would save is not kept. Give the policy to the outer checkpoint."
            )
    return list(dict.fromkeys(found))


def offloads(jaxpr: jex_core.Jaxpr) -> bool:
    """Whether a policy of the program means to offload, wherever to."""
    return any("offload_dst" in _contents(checkpoint.policy) for checkpoint in find_checkpoints(jaxpr))


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


def _acts(eqn: jex_core.JaxprEqn) -> bool:
    # Before 0.8, jax.debug.print was such a callback too; printing twice does no harm.
    callback = eqn.params.get("callback")
    cells = getattr(callback, "__closure__", None) or ()
    prints = any("_format_print_callback" in repr(cell.cell_contents) for cell in cells)
    return eqn.primitive.name in ("debug_callback", "io_callback") and not prints


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
    found = []
    contents = _contents(policy)
    mentioned = {name for value in contents.values() if _is_names(value) for name in value}
    produced = {name for name, used in _names(checkpoint.body) if used}
    unused = {name for name, used in _names(checkpoint.body) if not used} - produced
    for name in sorted(mentioned - produced):
        found.append(
            f"the policy names {name!r}, which is given to a value that nobody uses: write y = checkpoint_name(y, "
            f"{name!r}) and go on with y."
            if name in unused
            else f"the policy names {name!r}, but the function names only {sorted(produced)}: misspelled or renamed."
        )
    target = contents.get("offload_dst")
    if target is not None and target != "pinned_host":
        found.append(f"the policy offloads to {target!r}, which is not the host's memory: 'pinned_host' is.")
    return found


def _contents(policy: Any) -> dict[str, Any]:
    # What a factory was called with: attributes in newer JAX, a closure in older.
    if policy is None or isinstance(policy, type):
        return {}
    code, cells = getattr(policy, "__code__", None), getattr(policy, "__closure__", None)
    found = dict(vars(policy)) if hasattr(policy, "__dict__") else {}
    if code is not None and cells:
        found |= {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    for name in ("policy_1", "policy_2"):
        inner = _contents(found[name]) if name in found else {}
        found |= {f"{name} {key}" if _is_names(value) else key: value for key, value in inner.items()}
    return found


def _is_names(value: Any) -> bool:
    return isinstance(value, (set, frozenset, list, tuple)) and all(isinstance(name, str) for name in value)


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
