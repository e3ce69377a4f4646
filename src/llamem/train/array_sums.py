"""Checksums of arrays that lie on devices of several hosts: the same numbers however the arrays lie."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def checksums(arrays: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """A checksum of every array, and the names of those that hold a NaN or an infinity; the same on every process.

    Fletcher's two sums with a modulus of 2**64 (Fletcher 1982): of the elements as whole numbers, and of each times its
    place. Sums of parts add up to that of the whole, so every process reads its own devices alone, and a state that is
    restored on another mesh, or by another number of hosts, has the checksums with which it was saved.
    """
    sums = np.stack([_sums_here(array) for array in arrays.values()])
    if jax.process_count() > 1:
        # JAX would make 32 bits of 64.
        everybodys = multihost_utils.process_allgather(sums.view(np.uint32))
        sums = np.ascontiguousarray(everybodys).view(np.uint64).sum(axis=0)
    named = dict(zip(arrays, sums.tolist(), strict=True))
    return (
        {name: f"{plain:016x}{placed:016x}" for name, (plain, placed, _) in named.items()},
        [name for name, (_, _, not_finite) in named.items() if not_finite],
    )


def _sums_here(array: jax.Array) -> np.ndarray:
    """The two sums and the number of what is not finite, of this process's parts; a part held twice counts once."""
    total = np.zeros(3, np.uint64)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            total += _sums(np.asarray(shard.data), [along.start or 0 for along in shard.index], array.shape)
    return total


def _sums(part: np.ndarray, starts: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    bits = np.ascontiguousarray(part).reshape(part.shape).view(np.dtype(f"u{part.dtype.itemsize}"))
    plain = bits.sum(dtype=np.uint64)
    # Places are counted from 1 in the whole array, row by row: a place is one more than the sum over axes of index
    # times stride, so its part of the sum needs the elements' sums along each axis alone.
    placed, stride = np.array([plain]), 1
    for axis in reversed(range(part.ndim)):
        along = bits.sum(axis=tuple(other for other in range(part.ndim) if other != axis), dtype=np.uint64)
        places = np.arange(starts[axis], starts[axis] + part.shape[axis], dtype=np.uint64)
        placed = placed + np.sum(along * places * np.uint64(stride), keepdims=True)
        stride *= shape[axis]
    integral = np.issubdtype(part.dtype, np.integer) or part.dtype == bool
    not_finite = 0 if integral else part.size - np.count_nonzero(np.isfinite(part))
    return np.array([plain, placed[0], not_finite], np.uint64)
