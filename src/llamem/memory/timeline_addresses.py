"""Which bytes of memory are in use at a step: buffers that lie at one address count once, and gaps lie between them."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from llamem.memory.buffer_assignment import Allocation

# A buffer's stay: its number, first step, last step, allocation, offset, bytes.
Stay = tuple[int, int, int, int, int, int]


class Addresses:
    """The buffers of one kind of memory by address, with its allocations in a row."""

    def __init__(self, places: Sequence[Stay], allocations: Mapping[int, Allocation]):
        starts, total = {}, 0
        for allocation in sorted({*allocations, *(place[3] for place in places)}):
            starts[allocation] = total
            ends = [offset + size for _, _, _, lies_in, offset, size in places if lies_in == allocation]
            total += max([allocations[allocation].size if allocation in allocations else 0, *ends])
        rows = [
            (number, first, last, starts[allocation] + offset, starts[allocation] + offset + size, allocation)
            for number, first, last, allocation, offset, size in places
        ]
        # At one address the larger buffer comes first: a smaller one there adds nothing.
        rows.sort(key=lambda row: (row[3], -row[4]))
        self._rows = np.array(rows, np.int64).reshape(-1, 6)
        self._allocations = allocations

    def __len__(self) -> int:
        return len(self._rows)

    def alive(self, step: int) -> tuple[Int[np.ndarray, "buffers"], Int[np.ndarray, "buffers"]]:
        """Return the numbers of the buffers alive at a step and the bytes that each adds to those before it."""
        rows = self._rows
        return _held(rows[(rows[:, 1] <= step) & (rows[:, 2] >= step)])[:2]

    def gaps(self, step: int) -> dict[str, int]:
        """Return what is set aside and not in use at a step, by where it lies, as `Timeline.gaps` tells it."""
        rows = self._rows
        in_use = _by_allocation(rows[(rows[:, 1] <= step) & (rows[:, 2] >= step)])
        ever = _by_allocation(rows)
        gaps = {"outputs": 0, "between": 0, "unnamed": 0}
        for number, one in self._allocations.items():
            if one.kind == "output":
                gaps["outputs"] += one.size - in_use.get(number, 0)
            else:
                gaps["between"] += ever.get(number, 0) - in_use.get(number, 0)
                gaps["unnamed"] += one.size - ever.get(number, 0)
        return gaps


def _held(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for rows by address, buffers' numbers, bytes that each adds to those before it, and allocations."""
    number, _, _, start, end, allocation = rows.T
    reached = np.maximum.accumulate(np.concatenate([[0], end]))[:-1]
    return number, np.maximum(end - np.maximum(start, reached), 0), allocation


def _by_allocation(rows: np.ndarray) -> dict[int, int]:
    """Return bytes of each allocation that lie under one of these rows, or several."""
    totals: dict[int, int] = {}
    _, held, allocation = _held(rows)
    for number, size in zip(allocation.tolist(), held.tolist(), strict=True):
        totals[number] = totals.get(number, 0) + size
    return totals
