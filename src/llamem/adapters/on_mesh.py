"""Adapters on a mesh: every device holds all of them whole, and slices what its part of a matrix meets."""

import dataclasses
from typing import Any

from jax import lax
from jaxtyping import Array

from llamem.adapters.lora import Adapters
from llamem.adapters.weights import IN_LAYERS
from llamem.llama.mesh_shape import MeshShape

# Of which of the two matrices a device of "tensor" meets a part of the last axis: its heads, part of F, or rows.
_IN_PARTS = {"a": ("o", "down"), "b": ("q", "k", "v", "gate", "up", "head")}


def own_part(adapters: Adapters, mesh: MeshShape) -> Adapters:
    """Return what of the adapters this device computes with, inside `shard_map`."""
    if mesh.tensor_axis is None:
        return adapters

    def own(array: Array) -> Array:
        size = array.shape[-1] // mesh.tensor
        return lax.dynamic_slice_in_dim(array, lax.axis_index(mesh.tensor_axis) * size, size, axis=-1)

    parts = {
        name: {target: own(x) if target in targets else x for target, x in getattr(adapters, name).items()}
        for name, targets in _IN_PARTS.items()
    }
    return dataclasses.replace(adapters, **parts)


def summed_over(path: tuple[Any, ...], mesh: MeshShape) -> tuple[str, ...]:
    """Return the mesh axes whose devices have summands of this gradient each: on the others all have the same."""
    part, target = (entry.key for entry in path[-2:])
    # In a layer devices of "tensor" compute for their heads and their part of F, and B of the head meets their rows.
    in_parts = target in IN_LAYERS or (part, target) == ("b", "head")
    return mesh.over("batch", "sequence") + ((mesh.tensor_axis,) if in_parts and mesh.tensor_axis else ())
