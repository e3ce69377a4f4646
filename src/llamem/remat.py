"""Which activations are kept for the backward pass: policies by name, over activations that have names.

JAX accepts a misspelled name without a word and then recomputes everything. Here a name that no layer produces is an
error.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core as jex_core

_JAX = jax.checkpoint_policies


@dataclasses.dataclass(frozen=True)
class Policy:
    """What one rematerialised layer keeps, as data: names given with `jax.ad_checkpoint.checkpoint_name`.

    `save` stays on the device, `offload` goes to host memory (`pinned_host`), `save_all_but` keeps every *named*
    activation except these. All that is not named is recomputed. Raises ValueError for a name in two lists.
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    save_all_but: tuple[str, ...] = ()

    def __post_init__(self):
        for field in ("save", "offload", "save_all_but"):
            names = getattr(self, field)
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise TypeError(f"Policy({field}={names!r}): expected a tuple of names, such as {field}=('attn',).")
            object.__setattr__(self, field, tuple(names))
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


# By name: JAX's own heuristics under JAX's own names, and policies over the activations that `model.Block` names.
POLICIES: dict[str, Policy | Callable[..., Any]] = {
    "nothing": Policy(),
    "attn": Policy(save=("attn",)),
    "qkv_attn": Policy(save=("q", "k", "v", "attn")),
    "minimal": Policy(save=("q", "k", "v", "attn", "attn_out", "gate", "up", "mlp_out")),
    "offload_block_in": Policy(offload=("block_in",)),
    "nothing_saveable": _JAX.nothing_saveable,
    "everything_saveable": _JAX.everything_saveable,
    "dots_saveable": _JAX.dots_saveable,
    "dots_with_no_batch_dims_saveable": _JAX.dots_with_no_batch_dims_saveable,
    "offload_dot_with_no_batch_dims": _JAX.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def checkpoint(fn: Callable, remat: str | Policy | None) -> Callable:
    """`jax.checkpoint(fn)` under a policy; `fn` itself where `remat` is None.

    Raises ValueError for an unknown policy name and TypeError for a callable: hand-written policies, and factories
    passed without being called, are silently taken for something else by one JAX version or another.
    """
    if remat is None:
        return fn
    return jax.checkpoint(fn, policy=_jax_policy(remat))


def check_names(remat: str | Policy | None, jaxpr: jex_core.ClosedJaxpr, what: str = "the layer") -> None:
    """Raises ValueError where the policy mentions a name that the traced function never gives to a value."""
    policy = _lookup(remat)
    if not isinstance(policy, Policy) or not policy.names:
        return
    produced = sorted(set(names_in(jaxpr.jaxpr)))
    if unknown := sorted(policy.names.difference(produced)):
        raise ValueError(
            f"remat policy {remat!r} mentions {unknown}, but {what} produces {produced or 'no names'}. "
            "JAX would recompute everything without a word. Correct the name, or give it: "
            "`y = checkpoint_name(y, 'name')` (the result must be used; naming is an identity operation)."
        )


def names_in(jaxpr: jex_core.Jaxpr) -> Iterator[str]:
    """Every `checkpoint_name` in a jaxpr, those inside scans, calls and checkpoints included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        for inner in inner_jaxprs(eqn):
            yield from names_in(inner)


def inner_jaxprs(eqn: jex_core.JaxprEqn) -> list[Any]:
    """The programs inside one operation: a loop's body, a call's function, a cond's branches."""
    kinds = (jex_core.Jaxpr, jex_core.ClosedJaxpr)
    params = jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda param: isinstance(param, kinds))
    return [getattr(param, "jaxpr", param) for param in params if isinstance(param, kinds)]


def _lookup(remat: str | Policy | None) -> Policy | Callable[..., Any] | None:
    if remat is None or isinstance(remat, Policy):
        return remat
    if not isinstance(remat, str):
        raise TypeError(
            f"remat={remat!r}: expected None, a policy's name or llamem.Policy(save=(...), offload=(...)). "
            "Callables are not taken: newer JAX treats a hand-written policy as 'recompute everything', silently."
        )
    if remat not in POLICIES:
        raise ValueError(
            f"no remat policy is called {remat!r}. Known: {', '.join(POLICIES)}; or llamem.Policy(save=(...))."
        )
    return POLICIES[remat]


def _jax_policy(remat: str | Policy | None) -> Callable[..., Any] | None:
    policy = _lookup(remat)
    if not isinstance(policy, Policy):
        return policy
    if policy.save_all_but:
        return _JAX.save_any_names_but_these(*policy.save_all_but)
    if policy.offload:
        return _JAX.save_and_offload_only_these_names(
            names_which_can_be_saved=list(policy.save),
            names_which_can_be_offloaded=list(policy.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return _JAX.save_only_these_names(*policy.save) if policy.save else _JAX.nothing_saveable
