"""Which activations are kept for the backward pass, and where: policies by name, over activations that have names.

JAX accepts a misspelled name without a word and then recomputes everything. Here a name that no layer produces is an
error. What is offloaded waits in the host's memory: see `llamem.layers.host_memory`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxmem.tracing.jaxprs import names_when_differentiated

_JAX = jax.checkpoint_policies


@dataclasses.dataclass(frozen=True)
class Policy:
    """What one rematerialised layer keeps, as data: names given with `jax.ad_checkpoint.checkpoint_name`.

    `save` stays on the device, `offload` goes to host memory (`pinned_host`), `save_all_but` keeps every *named*
    activation except these. All that is not chosen is recomputed. Raises ValueError for a name in two lists, and for
    `save_all_but` beside another list.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    save_all_but: tuple[str, ...] = ()

    def __post_init__(self):
        for field in ("save", "offload", "save_all_but"):
            names = getattr(self, field)
            if not isinstance(names, (tuple, list, set, frozenset)) or not all(isinstance(name, str) for name in names):
                raise TypeError(f"Policy({field}={names!r}): expected a tuple of names, such as {field}=('attn',).")
            # A set has another order in every process, and hosts compare their plans as words.
            object.__setattr__(self, field, tuple(sorted(names) if isinstance(names, set | frozenset) else names))
        if both := set(self.save) & set(self.offload):
            raise ValueError(
                f"Policy: {sorted(both)} cannot be both saved on the device and offloaded; choose one list."
            )
        if self.save_all_but and (self.save or self.offload):
            raise ValueError("Policy: save_all_but stands alone; list what to keep in save= and offload= instead.")

    @property
    def names(self) -> frozenset[str]:
        """Every name that the policy mentions."""
        return frozenset(self.save + self.offload + self.save_all_but)


# What these save does not depend on names.
_HEURISTICS = {
    name: getattr(_JAX, name)
    for name in ("nothing_saveable", "everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
}
# The same two under the names that JAX gave them first, which other projects write still.
_HEURISTICS |= {name: getattr(_JAX, name) for name in ("checkpoint_dots", "checkpoint_dots_with_no_batch_dims")}
# By name: JAX's own heuristics under JAX's own names, and policies over what `llamem.llama.Block` names.
POLICIES: dict[str, Policy | Callable[..., Any]] = {
    "nothing": Policy(),
    "attn": Policy(save=("attn",)),
    "qkv_attn": Policy(save=("q", "k", "v", "attn")),
    "minimal": Policy(save=("q", "k", "v", "attn", "attn_out", "gate", "up", "mlp_out")),
    "offload_block_in": Policy(offload=("block_in",)),
    **_HEURISTICS,
}


def checkpoint(fn: Callable, remat: str | Policy | None) -> Callable:
    """Return `jax.checkpoint(fn)` under a policy; `fn` itself where `remat` is None.

    Raises ValueError for an unknown policy name and TypeError for a callable: hand-written policies, and factories
    passed without being called, are silently taken for something else by one JAX version or another.
    """
    if remat is None:
        return fn
    return jax.checkpoint(fn, policy=_jax_policy(remat))


def check_names(remat: str | Policy | None, jaxpr: jex_core.ClosedJaxpr) -> None:
    """Raise ValueError where the policy mentions a name that the traced function never gives to a value."""
    policy = check_policy(remat)
    if not isinstance(policy, Policy) or not policy.names:
        return
    produced = sorted(names_when_differentiated(jaxpr))
    if unknown := sorted(policy.names.difference(produced)):
        raise ValueError(
            f"remat policy {remat!r} mentions {unknown}, but the layer produces {produced or 'no names'}. "
            "JAX would recompute everything without a word. Correct the name, or give it: "
            "`y = checkpoint_name(y, 'name')` (the result must be used; naming is an identity operation)."
        )


def check_policy(remat: str | Policy | None) -> Policy | Callable[..., Any] | None:
    """Return the policy that is meant. Raise ValueError for a name nobody knows, TypeError for what is no policy."""
    if remat is None or isinstance(remat, Policy):
        return remat
    if not isinstance(remat, str):
        raise TypeError(
            f"remat={remat!r}: expected None, a policy's name or llamem.Policy(save=(...), offload=(...)). "
            "Callables are not taken: newer JAX treats a hand-written policy as 'recompute everything', silently."
        )
    if remat not in POLICIES:
        known = f"Known: {', '.join(POLICIES)}; None, which keeps everything; or llamem.Policy(save=(...))."
        raise ValueError(f"no remat policy is called {remat!r}. {known}")
    return POLICIES[remat]


def offloads(remat: str | Policy | None) -> bool:
    """Return whether something waits in the host's memory for the backward pass."""
    policy = check_policy(remat)
    return isinstance(policy, Policy) and bool(policy.offload)


def offloading_too(remat: str | Policy | None, names: tuple[str, ...]) -> str | Policy | None:
    """Return `remat` with these activations kept on the host as well; `remat` itself where there are none.

    Raises ValueError for a `remat` to which they cannot be added: None, which keeps everything on the device, one of
    JAX's heuristics, a policy that says what not to save, or one that saves the same names on the device.
    """
    if not names:
        return remat
    policy = check_policy(remat)
    if not isinstance(policy, Policy) or policy.save_all_but:
        raise ValueError(
            f"offload={names!r} cannot be added to remat={remat!r}: only a policy over names says what else is kept. "
            "Choose remat='nothing', or llamem.Policy(save=(...))."
        )
    return dataclasses.replace(policy, offload=(*policy.offload, *(n for n in names if n not in policy.offload)))


def _jax_policy(remat: str | Policy | None) -> Callable[..., Any] | None:
    policy = check_policy(remat)
    if offloads(remat) and getattr(jax.config, "jax_remat3", False):
        raise ValueError(
            f"remat={remat!r}: with jax_remat3 on, this JAX would recompute everything instead, without a word. Turn "
            "it off, jax.config.update('jax_remat3', False), or choose a policy that does not offload."
        )
    if not isinstance(policy, Policy):
        return policy
    if policy.offload:
        return _JAX.save_and_offload_only_these_names(
            names_which_can_be_saved=list(policy.save),
            names_which_can_be_offloaded=list(policy.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    if policy.save_all_but:
        return _JAX.save_any_names_but_these(*policy.save_all_but)
    return _JAX.save_only_these_names(*policy.save) if policy.save else _JAX.nothing_saveable
