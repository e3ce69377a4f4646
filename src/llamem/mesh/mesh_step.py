"""A step on a mesh of devices: one `jax.shard_map` around the step of one device, which then sees its parts.

Weights are gathered, and their gradients scattered, where the layers read them (`llamem.mesh.split_weights`). What is
left for the step itself is here: gradients of weights that several devices hold, the norm of them all, and `OnMesh`,
the answers of one device to what a step asks of the place where it runs.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from llamem.llama.model import Llama
from llamem.llama.plan import MeshShape
from llamem.llama.weights import PARAMETERS, parameter_name
from llamem.mesh.specs import READ_IN_PARTS, device_mesh, parameter_specs, shardings
from llamem.mesh.split_weights import split
from llamem.train.place import Kind, OneDevice, Place
from llamem.train.settings import TrainSettings


def on_mesh(fn: Callable[..., Any], mesh: MeshShape, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `fn` as the program of every device of the mesh; `fn` itself where there is one device.

    `in_specs`, `out_specs`: which part of each argument and result a device has, as in `jax.shard_map`.
    """
    if mesh.devices == 1:
        return fn
    # Not check_vma=True: JAX's own Splash kernel does not say over which axes its results differ, and Pallas refuses
    # it there (seen with 0.10). `collectives` writes out what JAX would infer for the rest.
    return jax.shard_map(fn, mesh=device_mesh(mesh), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def batch_spec(mesh: MeshShape) -> PartitionSpec:
    """Return how token ids `[B, T]` lie: sequences apart, each whole, for every device picks its own positions."""
    return PartitionSpec(mesh.over("batch") or None)


def check_sizes(mesh: MeshShape, settings: TrainSettings) -> None:
    """Raise ValueError for batches and sequences that cannot be shared out evenly."""
    shares = mesh.data * mesh.fsdp * settings.accumulate
    if settings.batch_size % shares:
        raise ValueError(
            f"batch_size={settings.batch_size} does not divide among data={mesh.data} x fsdp={mesh.fsdp} devices in "
            f"accumulate={settings.accumulate} parts: choose a multiple of {shares}."
        )
    if mesh.context > 1 and settings.seq_len % (2 * mesh.context):
        raise ValueError(
            f"seq_len={settings.seq_len} does not divide among context={mesh.context} devices, each of which holds an "
            f"early and a late piece of it: choose a multiple of {2 * mesh.context}."
        )


def sum_over(x: Array, axes: tuple[str, ...]) -> Array:
    """Return the sum of what the devices along these mesh axes computed, on all of them; `x` itself without axes."""
    return lax.psum(x, axes) if axes else x


def for_gradients_outside(params: Any, mesh: MeshShape) -> Any:
    """Return the parameters for a loss inside `shard_map` that is differentiated outside of it.

    There JAX divides the cotangent of the loss among the devices along "tensor", which all hold it, and sums gradients
    of a weight over the devices that hold it. Inside, each device computes with the whole cotangent. Both give the same
    gradient of a weight that every device holds; one that is split, or read in parts, would get its share alone.
    """
    if mesh.tensor_axis is None:
        return params

    def scaled(path: tuple[Any, ...], w: Array) -> Array:
        name = str(parameter_name(path))
        in_parts = name in READ_IN_PARTS or "tensor" in mesh.over(*(axis for axis in PARAMETERS[name] if axis))
        return _with_gradient_times(w, mesh.tensor) if in_parts else w

    return jax.tree.map_with_path(scaled, params)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _with_gradient_times(w: Array, factor: int) -> Array:
    return w


_with_gradient_times.defvjp(lambda w, factor: (w, None), lambda factor, _, dw: (dw * factor,))


def sum_gradients(grads: Any, mesh: MeshShape) -> Any:
    """Return each device's gradients, summed over devices with the same part of a weight that read it differently."""

    def summed(path: tuple[Any, ...], grad: Array) -> Array:
        name = str(parameter_name(path))
        # The gradients of a gathered weight arrive summed over the devices that gathered it.
        gathered_over = mesh.over("d_model") if "d_model" in PARAMETERS[name] else ()
        axes = tuple(axis for axis in mesh.over("batch", "sequence") if axis not in gathered_over)
        if name in READ_IN_PARTS and mesh.tensor_axis:
            axes += (mesh.tensor_axis,)
        return sum_over(grad, axes)

    return jax.tree.map_with_path(summed, grads) if mesh.devices > 1 else grads


def global_norm(grads: Any, mesh: MeshShape = MeshShape()) -> Float[Array, ""]:
    """Return the norm of all gradients, in f32; on a mesh, inside `shard_map`, with each element counted once."""

    def squares(path: tuple[Any, ...], grad: Array) -> Array:
        split = mesh.over(*(name for name in PARAMETERS[str(parameter_name(path))] if name))
        copies = mesh.devices
        for axis in split:
            copies //= mesh.axes[axis]
        return jnp.sum(jnp.square(grad.astype(jnp.promote_types(grad.dtype, jnp.float32)))) / copies

    total = sum(jax.tree.leaves(jax.tree.map_with_path(squares, grads)), start=jnp.zeros(()))
    return jnp.sqrt(lax.psum(total, tuple(mesh.axes)) if mesh.devices > 1 else total)


@dataclasses.dataclass(frozen=True)
class OnMesh(Place):
    """The devices of a mesh. Each has its part of weights and tokens, and inside the step it is the one that asks."""

    @property
    def mesh(self) -> MeshShape:
        """How many devices lie along each axis."""
        return self.plan.mesh

    def put(self, model: Llama) -> Llama:
        """Return the model of this device's parts."""
        return split(model, self.mesh)

    def sum_sequences(self, x: Array) -> Array:
        """Return the sum over devices with different sequences."""
        return sum_over(x, self.mesh.over("batch"))

    def sum_tokens(self, x: Array) -> Array:
        """Return the sum over devices with different tokens."""
        return sum_over(x, self.mesh.over("batch", "sequence"))

    def sum_parts(self, x: Array) -> Array:
        """Return the sum over devices with different tokens, and with different heads, parts of F or rows."""
        tensor = (self.mesh.tensor_axis,) if self.mesh.tensor_axis else ()
        return sum_over(x, self.mesh.over("batch", "sequence") + tensor)

    def own_part(self, array: Array) -> Array:
        """Return this device's part of the last axis, where devices have different heads, parts of F or rows."""
        if (axis := self.mesh.tensor_axis) is None:
            return array
        size = array.shape[-1] // lax.axis_size(axis)
        return lax.dynamic_slice_in_dim(array, lax.axis_index(axis) * size, size, axis=-1)

    def sum_gradients(self, grads: Any) -> Any:
        """Return gradients summed over devices with the same part of a weight that read it differently."""
        return sum_gradients(grads, self.mesh)

    def norm(self, grads: Any) -> Float[Array, ""]:
        """Return the norm of all devices' gradients, each element counted once."""
        return global_norm(grads, self.mesh)

    def start_of_part(self, path: tuple[Any, ...], param: Array) -> list[Any]:
        """Return where this device's part of a parameter begins in the whole one, along each axis."""
        names = PARAMETERS[str(parameter_name(path))]
        start: list[Any] = [0] * (param.ndim - len(names))
        for name, size in zip(names, param.shape[len(start) :], strict=True):
            over = self.mesh.over(name) if name else ()
            start.append(lax.axis_index(over) * size if over else 0)
        return start

    @property
    def of_batch(self) -> NamedSharding:
        """How token ids `[B, T]` lie."""
        return shardings(batch_spec(self.mesh), self.mesh)

    def check(self, settings: TrainSettings) -> None:
        """Raise ValueError for batches and sequences that cannot be shared out evenly."""
        check_sizes(self.mesh, settings)

    def program(self, fn: Callable[..., Any], given: tuple[Kind, ...], returned: Any) -> Callable[..., Any]:
        """Return `fn`, the program of each device, as one of all. Parameters come back as they were given."""

        def of_all(*args: Any) -> Any:
            specs = tuple(self._specs(tree, kind) for tree, kind in zip(args, given, strict=True))
            of_kind = dict(zip(given, specs, strict=True))
            out_specs = jax.tree.map(lambda kind: of_kind.get(kind, PartitionSpec()), returned)
            return on_mesh(fn, self.mesh, specs, out_specs)(*args)

        return of_all

    def outside(self, params: Any) -> Any:
        """Return parameters for a loss inside of `program` that is differentiated outside of it."""
        return for_gradients_outside(params, self.mesh)

    def abstract(self, tree: Any, kind: Kind) -> Any:
        """Return shapes that say where they lie. Raise ValueError where something does not divide."""
        return jax.tree.map(lambda shape, where: shape.update(sharding=where), tree, self._shardings(tree, kind))

    def arrays(self, tree: Any, kind: Kind) -> Any:
        """Return arrays, on each device its part."""
        return jax.device_put(tree, self._shardings(tree, kind))

    def begin(self, make: Callable[[Any], Any], params: Any, shapes: Callable[[], Any]) -> Any:
        """Return the state `make(params)`, of which every device makes its own part."""
        where = jax.tree.map(lambda leaf: leaf.sharding, shapes())
        if params is None:
            return jax.jit(make, out_shardings=where)(None)
        own = jax.tree.unflatten(jax.tree.structure(where.params), jax.tree.leaves(params))
        return jax.jit(make, out_shardings=where)(jax.device_put(own, where.params))

    def alone(self) -> Place:
        """Return the place of a model that anybody calls: its plan has no mesh, and JAX shares the work out."""
        return OneDevice(self.plan.replace(mesh={}))

    def _specs(self, tree: Any, kind: Kind) -> Any:
        """Return how each leaf lies, or one `PartitionSpec` for all."""
        if kind == "parameters":
            return parameter_specs(tree, self.mesh)
        return batch_spec(self.mesh) if kind == "batch" else PartitionSpec()

    def _shardings(self, tree: Any, kind: Kind) -> Any:
        specs = self._specs(tree, kind)
        return shardings(jax.tree.map(lambda _: specs, tree) if isinstance(specs, PartitionSpec) else specs, self.mesh)
