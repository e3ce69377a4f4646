"""What is wrong with the policies and options of a traced program's checkpoints, in words."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex_core

from llamem.memory.jaxprs import equations, is_names, names_in, policy_arguments, tells_the_host
from llamem.verify.placement import Operation, find_checkpoints

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
    found = _name_faults(jaxpr, gradient, checkpoints)
    for checkpoint in checkpoints:
        found += _policy_faults(checkpoint.call.policy)
        if not checkpoint.call.prevent_cse and not checkpoint.in_loop:
            found.append(
                "prevent_cse=False outside a loop: the compiler may merge the second computation with the first. Leave "
                "it out; only inside lax.scan is it harmless."
            )
        if any(tells_the_host(eqn) for eqn, _ in equations(checkpoint.call.body)):
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
    found, mentioned_by = [], {}
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
            found.append(
                f"the policy names {name!r}, which is given to a value that nobody uses: write y = checkpoint_name(y, "
                f"{name!r}) and go on with y."
                if name in unused
                else f"the policy names {name!r}, but the function names only {sorted(produced)}: misspelled, renamed, "
                "or given in a custom_vjp's function and not in its forward rule."
            )
    return found


def _kept_in_vain(checkpoint: Operation, all_checkpoints: list[Operation]) -> bool:
    """Return whether what a policy saves is thrown away by the checkpoint around it.

    Around several layers, or a loop of them, an inner policy says what is kept while the group is computed again.
    """
    if not checkpoint.under or _saves_nothing(checkpoint) or not _saves_nothing(outer := checkpoint.under[-1]):
        return False
    beside = [other for other in all_checkpoints if other.under and other.under[-1] is outer]
    return len(beside) == 1 and (checkpoint.times, checkpoint.in_loop) == (outer.times, outer.in_loop)


def _saves_nothing(checkpoint: Operation) -> bool:
    return checkpoint.call.policy in (None, _POLICIES.nothing_saveable)
