"""Who holds what on a mesh of devices: every parameter's axes by name, and which mesh axes split an axis of that name.

Four mesh axes, each with a meaning:

| mesh axis | splits | the other half of the bargain |
|---|---|---|
| `data` | the batch | every device holds its weights whole; gradients are summed once per step |
| `fsdp` | the batch, and weights along D | each layer gathers its weights, twice per step, and scatters gradients |
| `tensor` | heads, F and V | two sums of activations per layer, forward and backward |
| `context` | the sequence, and weights along D | as `fsdp`; attention gathers keys and values |
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from llamem._checks import check_whole, show
from llamem.layers.collectives import gather

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

# The last axes of every parameter; before them come the layers and the experts, which are never split. None: not split.
PARAMETERS: dict[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", "d_model"),
    "untied_head": ("vocab", "d_model"),
    "wq": ("d_model", "heads", None),
    "wk": ("d_model", "kv_heads", None),
    "wv": ("d_model", "kv_heads", None),
    "wo": ("heads", None, "d_model"),
    "w_gate": ("d_model", "d_ff"),
    "w_up": ("d_model", "d_ff"),
    "w_down": ("d_ff", "d_model"),
    "w_router": ("d_model", None),
    # Small: every device holds them whole.
    "norm": (None,),
    "attn_norm": (None,),
    "mlp_norm": (None,),
    "q_norm": (None,),
    "k_norm": (None,),
}

# Whole on every device, but read for its own heads or its own part of F alone: gradients are summed over `tensor` too.
READ_IN_PARTS = ("q_norm", "k_norm", "w_router")


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

    def check_devices(self) -> None:
        """Raise ValueError where this process sees fewer devices than the mesh has."""
        if jax.device_count() < self.devices:
            raise ValueError(
                f"the plan's mesh {self.axes} has {self.devices} devices, and there are {jax.device_count()}. Choose "
                "smaller sizes, or simulate devices on a CPU: jax.config.update('jax_num_cpu_devices', "
                f"{self.devices}) before the first computation."
            )

    def check_inside(self) -> None:
        """Raise ValueError where the function that calls this is not the program of one device of such a mesh."""
        try:
            found = {name: jax.lax.axis_size(name) for name in self.axes}
        except NameError:
            found = {}
        if found != self.axes:
            raise ValueError(
                f"the plan's mesh has the axes {self.axes}, and this is computed outside of it. A training step goes "
                "there by itself; to call the model, give it a plan without a mesh: JAX then shares the work out by "
                "itself, after where the weights lie."
            )

    def mesh(self) -> Any:
        """Return the mesh to compute on: that of the absent chip traced for, else this machine's devices.

        Without enough devices here an abstract one, whose shardings a compiler for absent chips understands.
        """
        traced = jax.sharding.get_abstract_mesh()
        if dict(traced.shape) == self.axes:
            return traced
        sizes, names = tuple(self.axes.values()), tuple(self.axes)
        kinds = (jax.sharding.AxisType.Auto,) * len(names)
        if jax.device_count() < self.devices:
            return jax.sharding.AbstractMesh(sizes, names, kinds)
        return jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices()[: self.devices])


def partition_spec(what: str, names: tuple[str | None, ...], shape: tuple[int, ...], mesh: MeshShape) -> PartitionSpec:
    """Return how an array called `what`, whose last axes have these `names`, lies on a mesh.

    Raises ValueError where a size does not divide.
    """
    spec: list[Any] = [None] * (len(shape) - len(names))
    for name, size in zip(names, shape[len(spec) :], strict=True):
        axes = mesh.over(name) if name else ()
        parts = math.prod(mesh.axes[axis] for axis in axes)
        if size % parts:
            over = " x ".join(f"{axis}={mesh.axes[axis]}" for axis in axes)
            raise ValueError(
                f"{what}: its axis {name!r} of {size} does not divide among {parts} devices ({over}). Choose a mesh "
                f"whose sizes divide {size}."
            )
        spec.append(axes or None)
    return PartitionSpec(*spec)


def parameter_name(path: tuple[Any, ...]) -> str | None:
    """Return which parameter a leaf of a model, a layer or moments is part of; None for other leaves."""
    keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return next((key for key in keys if key in PARAMETERS), None)


def is_in_blocks(path: tuple[Any, ...]) -> bool:
    """Return whether a parameter's leaf is a part of its blocks (`llamem.llama.quantized`), and not its numbers."""
    keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return bool(keys) and keys[-1] in ("values", "scale", "minimum")


def parameter_specs(tree: Any, mesh: MeshShape) -> Any:
    """Return how every leaf of parameters, or of a training state, lies on the mesh: a tree of `PartitionSpec`.

    Moments lie as their parameters; counters, and matrices in blocks, are everywhere. Raises ValueError as
    `partition_spec` does, and for blocks on a mesh that would split them.
    """

    def one(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        name = parameter_name(path)
        if name is not None and is_in_blocks(path):
            if split := [axis for axis in mesh.axes if axis != "data"]:
                raise ValueError(
                    f"a model in blocks of four or eight bits on the mesh {mesh.axes}: blocks are not split over "
                    f"{split[0]!r}. Every device holds them whole: give the mesh a 'data' axis alone."
                )
            return PartitionSpec()
        return PartitionSpec() if name is None else partition_spec(name, PARAMETERS[name], leaf.shape, mesh)

    return jax.tree.map_with_path(one, tree)


def shardings(specs: Any, mesh: MeshShape) -> Any:
    """Return `NamedSharding`s for a tree of `PartitionSpec`s, over this machine's devices or an absent chip's."""
    devices = mesh.mesh()
    return jax.tree.map(lambda s: NamedSharding(devices, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))


def gather_weight(name: str, w: Array, mesh: MeshShape, dtype: Any) -> Array:
    """Return a parameter whole along D, in the products' type, inside `shard_map`; along `tensor` it stays split."""
    names = PARAMETERS[name]
    if "d_model" not in names:
        return w
    return gather(w, mesh.over("d_model"), w.ndim - len(names) + names.index("d_model"), dtype)


def gather_weights(params: Any, mesh: MeshShape, dtype: Any) -> Any:
    """Apply `gather_weight` to every leaf of one layer's parameters; without a mesh return them as they are."""
    if not mesh.over("d_model"):
        return params

    def one(path: tuple[Any, ...], leaf: Array) -> Array:
        name = parameter_name(path)
        return leaf if name is None else gather_weight(name, leaf, mesh, dtype)

    return jax.tree.map_with_path(one, params)
