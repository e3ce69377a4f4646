"""Sums and gathers of weights along the sides of a slice of TPUs, one side after the other.

A slice is a torus: a v5e's or v6e's has two sides, a v5p's three. A mesh axis that goes round several of them is one
long axis to JAX. The TPU's compiler (libtpu 0.0.51) then sums a gradient whole on every chip, so that twice the bytes
arrive, and cuts out each chip's part; along three sides it gathers by such sums, too. Taken along one side and then
along the other, the same messages are reduce-scatters and all-gathers. Along one side, or off TPUs, one stage does.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jaxtyping import Array, Float, Int

from llamem.llama.plan import MeshShape

# Seen in programs for 8B and 70B on 8 to 512 chips.
_SMALL = 128 * 1024  # bytes of a part: along two sides smaller ones are gathered by a sum, and larger ones are not
_FEW = 256  # columns of a part, which lie along 128 lanes: fewer are not scattered
_HUGE = 2**29  # bytes of a whole table, for which more than two stages would take more room
_LARGE = 64 * 2**20  # bytes: what is as large is left to be summed, since another form of it would take more room


@dataclasses.dataclass(frozen=True)
class Stage:
    """Devices that speak with each other at the same time: `parts` of them along `axes`, or in each of the `groups`."""

    axes: tuple[str, ...]
    parts: int
    groups: tuple[tuple[int, ...], ...] | None = None


@dataclasses.dataclass(frozen=True)
class Route:
    """How what the devices of the mesh axes `axes` have in parts is made whole, and summed: `stages`, slowest first.

    `sides` is along how many sides of a slice of TPUs they lie.
    """

    axes: tuple[str, ...]
    stages: tuple[Stage, ...]
    sides: int = 1

    def gather(self, x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
        """Return what is split along `dim` whole, on every device: an all-gather."""
        whole = x.nbytes * math.prod(stage.parts for stage in self.stages)
        if self.sides == 1 or (self.sides == 2 and x.nbytes >= _SMALL) or (len(self.stages) > 2 and whole >= _HUGE):
            return lax.all_gather(x, self.axes, axis=dim, tiled=True)
        for stage in reversed(self.stages):
            x = lax.all_gather(x, stage.axes, axis=dim, axis_index_groups=stage.groups, tiled=True)
        return x

    def scatter(self, x: Float[Array, "..."], dim: int) -> Float[Array, "..."]:
        """Return this device's part, along `dim`, of the sum over the devices: a reduce-scatter."""
        if len(self.stages) > 2 and x.nbytes >= _HUGE:
            return lax.psum_scatter(x, self.axes, scatter_dimension=dim, tiled=True)
        for stage in self.stages:
            how: dict[str, Any] = {"axis_name": stage.axes, "axis_index_groups": stage.groups}
            columns = x.shape[dim] // stage.parts
            if (
                self.sides > 1 and dim == x.ndim - 1 and columns < _FEW and x.nbytes < 2**26
            ):  # the parts get an axis of their own
                own = lax.psum_scatter(x.reshape(-1, stage.parts, columns), scatter_dimension=1, **how)
                x = own.reshape(*x.shape[:-1], columns)
            else:
                x = lax.psum_scatter(x, scatter_dimension=dim, tiled=True, **how)
        return x


def route_over(mesh: MeshShape, axes: tuple[str, ...]) -> Route:
    """Return the route among the devices of these mesh axes."""
    sides = along_sides(mesh, axes)
    if sides == 1:
        return Route(axes, (Stage(axes, math.prod(mesh.axes[axis] for axis in axes)),) if axes else ())
    return Route(axes, tuple(stage for axis in axes for stage in _stages(axis, side_lengths(mesh, axis))), sides)


def _stages(axis: str, lengths: tuple[int, ...]) -> Iterator[Stage]:
    numbers = np.arange(math.prod(lengths)).reshape(lengths)
    for side, length in enumerate(lengths):
        groups = np.moveaxis(numbers, side, -1).reshape(-1, length).tolist()
        yield Stage((axis,), length, None if len(groups) == 1 else tuple(map(tuple, groups)))


def along_sides(mesh: MeshShape, axes: tuple[str, ...]) -> int:
    """Return along how many sides of a slice of TPUs these mesh axes lie, at least 1; four chips, 2 x 2, are one."""
    if (places := _places(mesh)) is None or not axes:
        return 1
    here = places[tuple(slice(None) if axis in axes else 0 for axis in mesh.axes)].reshape(-1, places.shape[-1])
    return max(1, len(_as_rings(tuple(length for length in _extents(here) if length > 1))))


def side_lengths(mesh: MeshShape, axis: str) -> tuple[int, ...]:
    """Return how many devices of a mesh axis lie along each side of a slice of TPUs, the side of its first step last.

    All in one where they go round in another way.
    """
    size, places = mesh.axes[axis], _places(mesh)
    if places is None:
        return (size,)
    line = np.moveaxis(places, list(mesh.axes).index(axis), 0).reshape(size, -1, places.shape[-1])[:, 0]
    line = line[:, np.array(_extents(line)) > 1]
    line = line[:, np.argsort(np.argmax(line != line[0], axis=0))[::-1]]
    lengths = _extents(line)
    straight = math.prod(lengths) == size and (np.diff(np.ravel_multi_index(_from_zero(line).T, lengths)) == 1).all()
    return _as_rings(lengths) if straight else (size,)


def _as_rings(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of sides with two neighbours of 2 as one of 4: a ring, and no reason for two stages."""
    for i, pair in enumerate(itertools.pairwise(lengths)):
        if pair == (2, 2):
            return (*lengths[:i], 4, *_as_rings(lengths[i + 2 :]))
    return lengths


def _extents(places: Int[np.ndarray, "n sides"]) -> tuple[int, ...]:
    return tuple(len(np.unique(places[:, side])) for side in range(places.shape[1]))


def _from_zero(places: Int[np.ndarray, "n sides"]) -> Int[np.ndarray, "n sides"]:
    """Return numbers of places along each side: 0, 2, 4 become 0, 1, 2."""
    return np.stack([np.unique(column, return_inverse=True)[1] for column in places.T], axis=1)


def laid_out(mesh: MeshShape, devices: Sequence[Any]) -> np.ndarray:
    """Return the devices as an array of the mesh's axes, neighbours beside each other."""
    # Where an axis needs a part of a side of the torus: 64 x 4 of 16 x 16 chips.
    return mesh_utils.create_device_mesh(tuple(mesh.axes.values()), devices, allow_split_physical_axes=True)


@dataclasses.dataclass(frozen=True)
class _AbsentTpu:
    """What `mesh_utils` asks of a TPU."""

    id: int
    coords: tuple[int, ...]
    device_kind: str
    platform: str = "tpu"
    core_on_chip: int = 0
    process_index: int = 0
    slice_index: int = 0


def _places(mesh: MeshShape) -> Int[np.ndarray, "... sides"] | None:
    """Return where in its slice each device of the mesh is, `[*mesh axes, sides]`; None without such a slice."""
    chip: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if sides := getattr(chip, "sides", ()):
        # As libtpu numbers them, along the first side first.
        corners = (corner[::-1] for corner in np.ndindex(*sides[::-1]))
        devices: Any = [_AbsentTpu(i, (*corner, 0)[:3], chip.device_kind) for i, corner in enumerate(corners)]
    else:
        devices = jax.devices()[: mesh.devices]
    if len(devices) != mesh.devices or not all(hasattr(device, "coords") for device in devices):
        return None
    coords = [device.coords for device in laid_out(mesh, devices).flat]
    return np.array(coords).reshape(*mesh.axes.values(), -1)
