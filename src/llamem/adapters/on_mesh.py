"""Adapters on a mesh: every device holds all of them whole, and cuts out what its part of a matrix meets.

Of A of "o" and "down", and of B of all others, that is its heads, its part of F or its rows: a part of the last axis.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array

from llamem.adapters.weights import IN_LAYERS
from llamem.llama.mesh_shape import MeshShape


@dataclasses.dataclass(frozen=True)
class OwnPart:
    """Cuts out, inside `shard_map`, what of one target's A or B a device of `axis` meets."""

    axis: str
    cuts_a: bool

    def __call__(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Return both, one of them cut."""
        return (self._own(a), b) if self.cuts_a else (a, self._own(b))

    def _own(self, array: Array) -> Array:
        size = array.shape[-1] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(array, lax.axis_index(self.axis) * size, size, axis=-1)


def own_part_of(mesh: MeshShape) -> Callable[[str], OwnPart | None]:
    """Return what cuts out a target's part, by the target; None where every device meets all."""
    return lambda target: OwnPart(mesh.tensor_axis, target in ("o", "down")) if mesh.tensor_axis else None


def summed_over(path: tuple[Any, ...], mesh: MeshShape) -> tuple[str, ...]:
    """Return the mesh axes whose devices have summands of this gradient each: on the others all have the same."""
    part, target = (entry.key for entry in path[-2:])
    # In a layer devices of "tensor" compute for their heads and their part of F, and B of the head meets their rows.
    in_parts = target in IN_LAYERS or (part, target) == ("b", "head")
    return mesh.over("batch", "sequence") + ((mesh.tensor_axis,) if in_parts and mesh.tensor_axis else ())
