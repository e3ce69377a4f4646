"""How many devices share the work, and how: four mesh axes, each with a meaning.

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

from llamem._checks import check_whole, show

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
