"""Who holds what on a mesh of devices: which of its axes split an axis of a parameter."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from llamem.llama.plan import MeshShape
from llamem.llama.weights import PARAMETERS, parameter_name
from llamem.quantized.blocks import is_in_blocks

# Whole on every device, but read for its own heads or its own part of F alone: gradients are summed over `tensor` too.
READ_IN_PARTS = ("q_norm", "k_norm")


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
