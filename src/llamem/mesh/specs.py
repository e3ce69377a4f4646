"""Who holds what on a mesh of devices: which of its axes split an axis of a parameter."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from llamem.llama.plan import MeshShape
from llamem.llama.weights import PARAMETERS, parameter_name
from llamem.mesh.torus import laid_out
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

    def spec_of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        name = parameter_name(path)
        if name is not None and is_in_blocks(path):
            if split := [axis for axis in mesh.axes if axis != "data"]:
                raise ValueError(
                    f"a model in blocks of four or eight bits on the mesh {mesh.axes}: blocks are not split over "
                    f"{split[0]!r}. Every device holds them whole: give the mesh a 'data' axis alone."
                )
            return PartitionSpec()
        return PartitionSpec() if name is None else partition_spec(name, PARAMETERS[name], leaf.shape, mesh)

    return jax.tree.map_with_path(spec_of, tree)


def device_mesh(mesh: MeshShape) -> Any:
    """Return JAX's mesh to compute on: that of the absent chip traced for, else of this machine's devices.

    Without enough devices here an abstract one, whose shardings a compiler for absent chips understands.
    """
    traced = jax.sharding.get_abstract_mesh()
    if dict(traced.shape) == mesh.axes:
        return traced
    sizes, names = tuple(mesh.axes.values()), tuple(mesh.axes)
    kinds = (AxisType.Auto,) * len(names)
    if jax.device_count() < mesh.devices:
        return AbstractMesh(sizes, names, kinds)
    return jax.sharding.Mesh(laid_out(mesh, jax.devices()[: mesh.devices]), names, axis_types=kinds)


def check_devices(mesh: MeshShape) -> None:
    """Raise ValueError where this process sees fewer devices than the mesh has."""
    if jax.device_count() < mesh.devices:
        raise ValueError(
            f"the plan's mesh {mesh.axes} has {mesh.devices} devices, and there are {jax.device_count()}. Choose "
            "smaller sizes, or simulate devices on a CPU: jax.config.update('jax_num_cpu_devices', "
            f"{mesh.devices}) before the first computation."
        )


def shardings(specs: Any, mesh: MeshShape) -> Any:
    """Return `NamedSharding`s for a tree of `PartitionSpec`s, over this machine's devices or an absent chip's."""
    devices = device_mesh(mesh)
    return jax.tree.map(lambda s: NamedSharding(devices, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
