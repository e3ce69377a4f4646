"""How a step is computed: one object, from the notebook's first cell to the compiled program.

| mesh axis | splits | the other half of the bargain |
|---|---|---|
| `data` | the batch | every device holds its weights whole; gradients are summed once per step |
| `fsdp` | the batch, and weights along D | each layer gathers its weights, twice per step, and scatters gradients |
| `tensor` | heads, F and V | two sums of activations per layer, forward and backward |
| `context` | the sequence, and weights along D | as `fsdp`; attention gathers keys and values |
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxmem.common.checks import check_one_of, check_whole, replaced, show
from jaxmem.common.files import read_json, write_whole
from llamem.layers.attention import Implementation
from llamem.layers.remat import POLICIES, Policy, check_policy, offloading_too
from llamem.layers.stack import Mode

# The mesh axes over which an axis of this name is split, the slowest first.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "sequence": ("context",),
    "d_model": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "d_ff": ("tensor",),
    "vocab": ("tensor",),
}


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices lie along each mesh axis; all 1, the default, is no mesh. See the table of this module.

    Raises ValueError, when it is made, for a size that is not a whole number of at least 1.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            check_whole(f"mesh size {name}", size)

    @classmethod
    def of(cls, sizes: "Mapping[str, int] | MeshShape") -> "MeshShape":
        """Make one of `{"fsdp": 4, "tensor": 2}`; what is not named is 1. Raise ValueError for an unknown axis."""
        if isinstance(sizes, MeshShape):
            return sizes
        if not isinstance(sizes, Mapping):
            raise TypeError(f"mesh={show(sizes)}: expected axes and their sizes, such as mesh={{'fsdp': 8}}.")
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in sizes if name not in known]:
            raise ValueError(f"mesh={dict(sizes)!r}: no mesh axis is called {unknown[0]!r}. Known: {', '.join(known)}.")
        return cls(**sizes)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes with more than one device, by name: those that the mesh has."""
        return {name: size for name, size in vars(self).items() if size > 1}

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return math.prod(self.axes.values())

    @property
    def tensor_axis(self) -> str | None:
        """The name of the axis that splits heads, F and V; None where they are whole."""
        return "tensor" if self.tensor > 1 else None

    @property
    def context_axis(self) -> str | None:
        """The name of the axis that splits the sequence; None where it is whole."""
        return "context" if self.context > 1 else None

    def over(self, *names: str) -> tuple[str, ...]:
        """Return the mesh axes that split array axes of these names: `over("d_model")` is that of every weight."""
        return tuple(axis for name in names for axis in RULES[name] if axis in self.axes)


_MAX_BYTES = 100_000  # of a plan's file

LossAxis = Literal["auto", "tokens", "vocab"]
Home = Literal["device", "host"]
Update = Literal["after", "in_backward"]
_WORDS = {
    "mode": Mode,
    "attention": Implementation,
    "loss_axis": LossAxis,
    "moments": Home,
    "weights": Home,
    "update": Update,
}
# What a block names.
ACTIVATIONS = ("block_in", "q", "k", "v", "attn", "attn_out", "gate", "up", "mlp_out")
# Names that are given inside a tile, whose forward pass is always computed again: no policy could keep them.
_IN_ATTENTION_TILES = frozenset(("q", "k", "v", "attn"))
_IN_MLP_TILES = frozenset(("gate", "up", "mlp_out"))

if TYPE_CHECKING:

    class _Mesh:  # given as a mapping or a MeshShape, read as a MeshShape
        def __get__(self, plan: Any, owner: Any) -> MeshShape: ...
        def __set__(self, plan: Any, mesh: MeshShape | Mapping[str, int]) -> None: ...

else:
    _Mesh = MeshShape | Mapping[str, int]


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """How a step is computed, never what it computes: every plan gives the same loss and gradients, up to rounding.

    `mode` and `remat`: see `llamem.apply_stack`; what is kept for the backward pass. `attention`: see
    `llamem.layers.causal_attention`. `loss_tiles`: into how many tiles the loss cuts its logits; "auto" asks
    `llamem.losses.choose_tiles`, and None is the plain loss with all of them at once, for comparison. `loss_axis`: what
    the tiles cut, "tokens" or "vocab". `mesh`: how many devices share the work and how, such as
    `{"data": 2, "fsdp": 2, "tensor": 2, "context": 1}`, read as a `llamem.llama.MeshShape`, which says what each means;
    with "tensor" the vocabulary is split, and tiles cut what is left of it.

    Tools for long contexts and little memory, each off by default:

    `head_groups`: into how many groups of heads attention is cut, a divisor of the key/value heads. Projections,
    attention and its backward pass are computed for one group after the other, so that the queries, keys, values and
    logsumexps of one group are alive at a time. Costs one more forward pass of attention, unless "attn_out" is kept.
    `mlp_tiles`: into how many tiles of tokens the feed-forward is cut; gate and up of one tile are alive at a time.
    Sums over tiles are f32. Neither costs bits, and what is named inside a tile no policy can keep.
    `offload`: activations by name (`llamem.llama.ACTIVATIONS`), such as `("block_in",)`, that wait in the host's memory
    between forward and backward pass, beside what `remat` keeps on the device and recomputes. `remat` must then be a
    policy over names that does not save the same.
    `moments`: where the optimizer's moments are between steps. On the "host" each layer's are fetched when it is
    updated, and go back; the norms', which are small, stay on the device.
    `weights`: where the weights are. On the "host" a layer's are fetched when it is computed, forward and backward, and
    the tables of the vocabulary when they are read; one layer's are on the device at a time, and the norms' vectors.
    `update`: when the weights change. "in_backward": each layer's as soon as its gradient is there, so that there are
    never gradients of two layers. Weights on the host that are trained always change so. The norm of all gradients is
    known too late then: `TrainSettings(clip="layer")` clips each layer by its own, `clip_norm=None` none.
    With either of these two fields only the layers' inputs are kept for the backward pass, on the host with
    `offload=("block_in",)`; with `mode="nested"` those of groups of layers, and of one group's layers at a time.

    Raises, when it is made: ValueError for an unknown word, a count below 1 or tools that exclude each other, TypeError
    for a policy that is neither a name nor a `llamem.Policy`.
    """

    mode: Mode = "scan"
    remat: str | Policy | None = "nothing"
    attention: Implementation = "auto"
    loss_tiles: int | Literal["auto"] | None = "auto"
    loss_axis: LossAxis = "auto"
    mesh: _Mesh = MeshShape()  # pyrefly: ignore
    head_groups: int = 1
    mlp_tiles: int = 1
    offload: tuple[str, ...] = ()
    moments: Home = "device"
    weights: Home = "device"
    update: Update = "after"

    def __post_init__(self):
        object.__setattr__(self, "mesh", MeshShape.of(self.mesh))
        object.__setattr__(self, "offload", _names(self.offload))
        check_policy(self.remat)
        for name, choices in _WORDS.items():
            check_one_of(name, getattr(self, name), get_args(choices))
        for name in ("head_groups", "mlp_tiles"):
            check_whole(name, getattr(self, name))
        if self.loss_tiles not in ("auto", None):
            check_whole("loss_tiles", self.loss_tiles)
        for excluded, why in self._exclusions():
            if excluded:
                raise ValueError(f"{self}: {why}")

    def _exclusions(self) -> Iterator[tuple[bool, str]]:
        """Yield what does not go together: whether this plan is such a one, why not, and what to choose."""
        mesh, policy = self.mesh, check_policy(self.policy)
        unknown = sorted(policy.names.difference(ACTIVATIONS)) if isinstance(policy, Policy) else []
        yield bool(unknown), f"no layer names {unknown}. The names are {', '.join(ACTIVATIONS)}."
        yield (
            self.loss_tiles is None and self.loss_axis != "auto",
            "the plain loss has no tiles to cut along an axis. Leave loss_axis out, or give loss_tiles.",
        )
        yield (
            mesh.tensor > 1 and self.loss_axis == "tokens",
            "with the vocabulary split over 'tensor', every tile of tokens would need a sum over devices. Leave "
            "loss_axis out: tiles then cut each device's rows of the head.",
        )
        yield (
            mesh.context > 1 and self.attention == "cudnn",
            "cuDNN computes whole sequences, and 'context' splits them. Choose 'auto', 'tiled' or 'xla'.",
        )
        yield (
            mesh.devices > 1 and (self.moments == "host" or self.layer_by_layer),
            "what waits on the host, or is updated in the backward pass, is computed on one device. Give the mesh an "
            "'fsdp' axis instead: it shares weights, gradients and moments out among its devices.",
        )
        for field, inside in (("head_groups", _IN_ATTENTION_TILES), ("mlp_tiles", _IN_MLP_TILES)):
            lost = sorted(inside.intersection(policy.names)) if isinstance(policy, Policy) else []
            yield (
                getattr(self, field) > 1 and bool(lost),
                f"the policy mentions {lost}, which are computed tile by tile and again in the backward pass, so that "
                f"they cannot be kept. Leave them out, or {field}=1.",
            )
        yield (
            self.layer_by_layer and self.mode == "unroll",
            "only in a loop over layers is one of them at hand at a time. Choose mode='scan', or 'nested', which keeps "
            "fewer inputs and computes layers once more.",
        )
        inputs_only = policy in (Policy(), Policy(offload=("block_in",)), POLICIES["nothing_saveable"])
        yield (
            self.layer_by_layer and (self.remat is None or not inputs_only),
            "the loop that goes back over the layers has their inputs and computes the rest again; whatever else is "
            "kept would hold weights, or take the room that they left. Choose remat='nothing', with "
            "offload=('block_in',) or without.",
        )

    @property
    def policy(self) -> str | Policy | None:
        """What is kept for the backward pass, and where: `remat`, with what `offload` adds to it."""
        return offloading_too(self.remat, self.offload)

    @property
    def inputs_on_host(self) -> bool:
        """Whether what enters each layer waits on the host for the backward pass."""
        policy = check_policy(self.policy)
        return isinstance(policy, Policy) and "block_in" in policy.offload

    @property
    def layer_by_layer(self) -> bool:
        """Whether the step fetches or updates each layer by itself, in loops of its own (`llamem.host.streaming`)."""
        return self.weights == "host" or self.update == "in_backward"

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from the defaults, by name."""
        named = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in named.items() if value != default}

    def __repr__(self) -> str:
        """Return what differs from the defaults, as in its call: `Plan(mlp_tiles=16, offload=('block_in',))`."""
        return f"Plan({', '.join(f'{name}={_shown(value)}' for name, value in self.changes.items())})"

    def save(self, file: str | os.PathLike, **beside: Any) -> Path:
        """Write this plan as JSON, with what stands `beside` it, such as the chip it was found for; return the file.

        Raise FileExistsError where the file is there and is no plan.
        """
        path = Path(file).expanduser()
        if path.exists():
            try:
                read_json(path, _MAX_BYTES)["plan"]
            except (ValueError, KeyError, OSError):
                raise FileExistsError(
                    f"{path} exists and is no plan: nothing was written. Choose another name."
                ) from None
        write_whole(
            path, json.dumps({"plan": {n: _as_json(v) for n, v in self.changes.items()}} | beside, indent=1) + "\n"
        )
        return path

    @classmethod
    def load(cls, file: str | os.PathLike) -> "Plan":
        """Read a plan that `save` or `python -m llamem plan --save` wrote. Raise ValueError for what is no plan."""
        return read_plan(file)[0]

    def replace(self, **changes: Any) -> "Plan":
        """Return a copy with some fields changed, checked again. Raise TypeError for a field that does not exist."""
        return replaced(self, changes)


def read_plan(file: str | os.PathLike) -> tuple[Plan, dict[str, Any]]:
    """Return the plan in a file, and what stands beside it. Raise ValueError, with the file's name, for no plan."""
    path = Path(file).expanduser()
    beside = read_json(path, _MAX_BYTES)
    fields = beside.pop("plan", None)
    known = [field.name for field in dataclasses.fields(Plan)]
    if not isinstance(fields, dict) or (unknown := [name for name in fields if name not in known]):
        what = 'it has no "plan" with fields' if not isinstance(fields, dict) else f"no field is called {unknown}"
        raise ValueError(
            f"{path} is no plan: {what}. `python -m llamem plan --save FILE` or Plan.save(file) writes one."
        )
    try:
        if isinstance(policy := fields.get("remat"), dict):
            fields["remat"] = Policy(**_tuples(policy))
        return Plan(**_tuples(fields)), beside
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, Policy):
        return {name: names for name, names in dataclasses.asdict(value).items() if names}
    return value.axes if isinstance(value, MeshShape) else value


def _shown(value: Any) -> str:
    if isinstance(value, Policy):
        fields = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
        return f"Policy({', '.join(f'{name}={given!r}' for name, given, default in fields if given != default)})"
    return repr(value.axes if isinstance(value, MeshShape) else value)


def _names(offload: Any) -> tuple[str, ...]:
    if not isinstance(offload, (tuple, list)) or not all(isinstance(name, str) for name in offload):
        raise TypeError(f"Plan(offload={offload!r}): expected a tuple of names, such as offload=('block_in',).")
    return tuple(offload)
