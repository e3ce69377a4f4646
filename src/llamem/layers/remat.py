"""Which activations are kept for the backward pass, and where: policies by name, over activations that have names.

JAX accepts a misspelled name without a word and then recomputes everything. Here a name that no layer produces is an
error. What is offloaded waits in the host's memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core as jex_core
from jaxtyping import Array, Float

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


# Of one copy. The TPU compiler (libtpu 0.0.51) dies of copies to the host of 4 GiB or more.
MAX_BYTES = 2**32 - 1

_WRONG_ON_GPUS = ("0.10.2", "0.11.0")  # of jaxlib

# libtpu 0.0.23 makes room for all results of a scan on the device first, where JAX 0.7's types say that they lie on the
# host. XLA's own marks are not seen in types.
_TYPES_TELL = jax.__version_info__ >= (0, 8)


def in_pieces(x_BTD: Float[Array, "B T D"], most: int = MAX_BYTES) -> list[Float[Array, "B _ D"]]:
    """Return the array itself, or where it has more than `most` bytes pieces of T that have not."""
    B, T, D = x_BTD.shape
    tokens = max(1, most // (B * D * x_BTD.dtype.itemsize))
    return [x_BTD] if tokens >= T else jnp.array_split(x_BTD, -(-T // tokens), axis=1)


def name_in_pieces(x_BTD: Float[Array, "B T D"], name: str, most: int = MAX_BYTES) -> Float[Array, "B T D"]:
    """Name `x_BTD` with `checkpoint_name` for a policy that offloads it: in pieces of T above `most` bytes.

    Each piece is a residual of its own, under the same name.
    """
    pieces = [checkpoint_name(piece, name) for piece in in_pieces(x_BTD, most)]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def refuse_wrong_offload(what: str) -> None:
    """Raise RuntimeError where the program being traced is for a GPU at hand that reads offloaded arrays wrongly.

    The compiler for NVIDIA GPUs of two jaxlib versions reads what a backward pass fetches from the host's memory from
    the wrong layer, without an error: https://github.com/openxla/xla/pull/46231. `what` names the caller.
    """
    absent = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None
    if absent or jax.default_backend() != "gpu" or jaxlib.__version__ not in _WRONG_ON_GPUS:
        return
    raise RuntimeError(
        f"{what}: with jaxlib {jaxlib.__version__} NVIDIA GPUs read what is offloaded back from the wrong layer, and "
        "the gradients would be wrong without an error. Install jax and jaxlib 0.10.1, or 0.11.1 or newer, or offload "
        "nothing."
    )


def is_on_host(x: Array) -> Array:
    """Return the same array, said to lie in the host's memory: an argument's shape does not tell JAX."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_host(x: Array) -> Array:
    """Move an array to the host's memory (`pinned_host`), inside a program."""
    return jax.device_put(_row_major(x), jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """Move an array to the device's memory, inside a program."""
    return _row_major(jax.device_put(x, jax.memory.Space.Device))


def stacked_on_host(x: Array) -> Array:
    """Move to the host what a scan stacks up from turn to turn."""
    return to_host(x) if _TYPES_TELL else _marked("MoveToHost", _row_major(x))


def from_stack_on_host(x: Array) -> Array:
    """Move one turn's part of such a stack to the device."""
    return to_device(x) if _TYPES_TELL else _row_major(_marked("MoveToDevice", x))


def _marked(mark: str, x: Array) -> Array:
    move = jax.ffi.ffi_call(mark, jax.ShapeDtypeStruct(x.shape, x.dtype), custom_call_api_version=1)
    return jax.lax.platform_dependent(x, cpu=lambda x: x, default=move)


def _row_major(x: Array) -> Array:
    # The compiler may choose another layout for what it computes with, and then wants it on the host too, where a TPU's
    # dies of changing it.
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
