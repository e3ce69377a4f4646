"""Memory against time: what lies in a chip's memory at each step of a program, as the chip's compiler wrote it down."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from llamem._files import write_whole
from llamem.memory.timeline_schedule import Pass

Category = Literal[
    "weights",
    "optimizer",
    "batch",
    "gradients",
    "residuals",
    "logits",
    "rematerialised",
    "workspace",
    "output",
    "other",
]
Space = Literal["device", "on-chip", "host"]
CATEGORIES: tuple[Category, ...] = get_args(Category)

# Names of arguments that say what these are: the first of them in an argument's path decides.
_ARGUMENTS: dict[str, Category] = {
    "params": "weights",
    "weights": "weights",
    "opt_state": "optimizer",
    "optimizer": "optimizer",
    "batch": "batch",
    "tokens": "batch",
    "inputs": "batch",
    "targets": "batch",
}


@dataclasses.dataclass(frozen=True)
class Span:
    """One array in memory from its first step to its last, both included.

    `bytes` includes the padding of tiles; in the answers of `Timeline.alive` they are what it adds there, where another
    lies at the same address. `space` is the memory it lies in, `address` the number of the allocation and the offset
    in it. `made_in` is the pass that makes it; "" for what the caller holds, and in programs that differentiate
    nothing. `operation` is the path of the operation that makes it, of an argument its name; `source` the line.
    """

    name: str
    bytes: int
    first: int
    last: int
    space: Space
    address: tuple[int, int]
    shape: str
    category: Category
    made_in: Pass
    operation: str
    source: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop in the schedule: one turn is written down, from step `first` to before step `end`; it runs `trips` times,
    None where the program does not say.
    """

    first: int
    end: int
    trips: int | None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What lies in memory at each step of a program's schedule, on one chip.

    `buffers` are all arrays of the program. `passes` are (name, first step, the step after its last). `operations` are
    those of the steps. `capacity_bytes` is what the chip offers, None where unknown. `assigned_bytes` is the device
    memory that the compiler set aside: the highest point, and the gaps that stay between buffers there.

    Not in it: what libraries take at run time on a CPU, beside the compiler's plan. On a TPU small programs live in
    on-chip memory for much of their time: `curve("on-chip")`.
    """

    target: str
    capacity_bytes: int | None
    assigned_bytes: int
    steps: int
    buffers: tuple[Span, ...]
    loops: tuple[Loop, ...]
    passes: tuple[tuple[Pass, int, int], ...]
    operations: tuple[str, ...]

    @classmethod
    def from_schedule(
        cls, schedule: Mapping[str, Any], target: str, capacity_bytes: int | None, arguments: Sequence[str]
    ) -> "Timeline":
        """From the table of `read_schedule` and the names of the program's arguments, in their flat order."""
        texts = schedule["texts"]

        def buffer(row: Sequence[Any]) -> Span:
            allocation, offset, size, space, first, last, name, shape, category, made_in, operation, source, number = (
                row
            )
            category, operation = texts[category], texts[operation]
            if number is not None:  # an argument, or the compiler's own copy of one
                of_argument = argument_category(arguments[number])
                category = of_argument if texts[name] == "argument" or of_argument != "other" else category
                operation = operation or arguments[number]
            return Span(
                texts[name],
                size,
                first,
                last,
                texts[space],
                (allocation, offset),
                texts[shape],
                category,
                texts[made_in],
                operation,
                texts[source],
            )

        return cls(
            target=target,
            capacity_bytes=capacity_bytes,
            assigned_bytes=schedule["assigned_bytes"],
            steps=schedule["steps"],
            buffers=tuple(map(buffer, schedule["buffers"])),
            loops=tuple(Loop(*row) for row in schedule["loops"]),
            passes=tuple((name, first, end) for name, first, end in schedule["phases"]),
            operations=tuple(texts[number] for number in schedule["operations"]),
        )

    def curve(self, space: Space = "device") -> np.ndarray:
        """Bytes in use at each step."""
        return sum(self._by_category[space].values(), np.zeros(self.steps, np.int64))

    def by_category(self, space: Space = "device") -> dict[Category, np.ndarray]:
        """Bytes in use at each step by category, those without a byte left out; together they are the curve."""
        return {category: row for category, row in self._by_category[space].items() if row.any()}

    @functools.cached_property
    def peak_step(self) -> int:
        """The first step at which the device's memory is fullest."""
        return int(np.argmax(self.curve()))

    @property
    def peak_bytes(self) -> int:
        """The highest point: bytes of the device's memory that are in use at `peak_step`."""
        return int(self.curve()[self.peak_step])

    @property
    def gap_bytes(self) -> int:
        """What the compiler set aside and nothing fills at the peak: holes between buffers, where none fits."""
        return self.assigned_bytes - self.peak_bytes

    @property
    def over_capacity(self) -> tuple[int, int] | None:
        """The first and the last step that need more than the chip offers; None where it is enough, or unknown."""
        if self.capacity_bytes is None:
            return None
        above = np.flatnonzero(self.curve() > self.capacity_bytes)
        return (int(above[0]), int(above[-1])) if above.size else None

    def alive(self, step: int, space: Space = "device") -> tuple[Span, ...]:
        """Who lies in memory at a step, largest first. Their bytes add up to the curve there.

        Raises IndexError for a step that is not there.
        """
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step}: the schedule has steps 0 to {self.steps - 1}.")
        indices, held = self._alive(self._places[space], step)
        buffers = [
            dataclasses.replace(self.buffers[i], bytes=int(n_bytes))
            for i, n_bytes in zip(indices, held, strict=True)
            if n_bytes
        ]
        return tuple(sorted(buffers, key=lambda buffer: -buffer.bytes))

    def at_peak(self) -> tuple[Span, ...]:
        """Who lies in the device's memory where it is fullest, largest first. Their bytes add up to `peak_bytes`."""
        return self.alive(self.peak_step)

    def runs(self, space: Space = "device") -> dict[int, list[tuple[int, int, int]]]:
        """For each buffer that adds to the curve, by its number: (first step, last step, bytes it adds there)."""
        rows: dict[int, list[tuple[int, int, int]]] = {}
        for step in range(self.steps):
            numbers, held = self._alive(self._places[space], step)
            for number, n_bytes in zip(numbers.tolist(), held.tolist(), strict=True):
                stretches = rows.setdefault(number, [])
                if stretches and stretches[-1][1:] == (step - 1, n_bytes):
                    stretches[-1] = (stretches[-1][0], step, n_bytes)
                elif n_bytes:
                    stretches.append((step, step, n_bytes))
        return {number: stretches for number, stretches in rows.items() if stretches}

    def phase(self, step: int) -> Pass:
        """The pass that a step lies in; "" in a program that differentiates nothing."""
        return next((name for name, first, end in self.passes if first <= step < end), "")

    def with_categories(self, names: Mapping[str, Category]) -> "Timeline":
        """With categories of your own: `{"head": "weights"}` for what has "head" in its operation or argument's name.

        The first entry that fits counts. Raises ValueError for an unknown category.
        """
        if wrong := [category for category in names.values() if category not in CATEGORIES]:
            raise ValueError(f"with_categories: {wrong[0]!r} is no category. Known: {', '.join(CATEGORIES)}.")

        def named(buffer: Span) -> Span:
            category = next((names[name] for name in names if name in buffer.operation), buffer.category)
            return dataclasses.replace(buffer, category=category)

        return dataclasses.replace(self, buffers=tuple(map(named, self.buffers)))

    def to_perfetto(self, path: str | Path) -> None:
        """Writes a trace that https://ui.perfetto.dev opens: a track for each memory, one step as a microsecond."""
        events: list[dict[str, Any]] = [
            {"ph": "X", "pid": 1, "tid": 1, "name": name, "ts": first, "dur": end - first}
            for name, first, end in self.passes
        ]
        for space in get_args(Space):
            rows = self.by_category(space)
            name = f"{space} memory (bytes)"
            for step in range(self.steps if rows else 0):
                values = {category: int(row[step]) for category, row in rows.items()}
                events.append({"ph": "C", "pid": 1, "name": name, "ts": step, "args": values})
        write_whole(Path(path), json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))

    def __str__(self) -> str:
        where = f" ({self.phase(self.peak_step)})" if self.passes else ""
        gaps = self.gap_bytes / (self.assigned_bytes or 1)
        lines = [
            f"{self.target}: {self.steps} steps, highest at step {self.peak_step}{where}: {_size(self.peak_bytes)} "
            f"in use, {_size(self.assigned_bytes)} set aside, of it gaps {gaps:.1%}"
        ]
        if (over := self.over_capacity) is not None:
            lines.append(f"  over the chip's {_size(self.capacity_bytes or 0)} from step {over[0]} to {over[1]}")
        lines += [
            f"  {_size(buffer.bytes):>10}  {buffer.category:<15}{buffer.shape}  {buffer.operation}  {buffer.source}"
            for buffer in self.at_peak()[:8]
        ]
        return "\n".join(line.rstrip() for line in lines)

    @functools.cached_property
    def _places(self) -> dict[Space, np.ndarray]:
        """Of each memory the buffers by address: rows of number, first step, last step, start, end."""
        starts, total = {}, 0
        for number in sorted({buffer.address[0] for buffer in self.buffers}):
            # As if the allocations lay in a row.
            starts[number] = total
            total += max(buffer.address[1] + buffer.bytes for buffer in self.buffers if buffer.address[0] == number)
        rows: dict[Space, list[tuple[int, ...]]] = {space: [] for space in get_args(Space)}
        for i, buffer in enumerate(self.buffers):
            start = starts[buffer.address[0]] + buffer.address[1]
            rows[buffer.space].append((i, buffer.first, buffer.last, start, start + buffer.bytes))
        # At one address the larger buffer comes first: a smaller one there adds nothing.
        return {
            space: np.array(sorted(table, key=lambda row: (row[3], -row[4])), np.int64).reshape(-1, 5)
            for space, table in rows.items()
        }

    @staticmethod
    def _alive(places: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the buffers alive at a step and the bytes that each adds to those before it."""
        number, _, _, start, end = places[(places[:, 1] <= step) & (places[:, 2] >= step)].T
        reached = np.maximum.accumulate(np.concatenate([[0], end]))[:-1]
        return number, np.maximum(end - np.maximum(start, reached), 0)

    @functools.cached_property
    def _by_category(self) -> dict[Space, dict[Category, np.ndarray]]:
        kinds = np.array([CATEGORIES.index(buffer.category) for buffer in self.buffers], np.int64)
        tables: dict[Space, dict[Category, np.ndarray]] = {}
        for space, places in self._places.items():
            table = np.zeros((len(CATEGORIES), self.steps), np.int64)
            for step in range(self.steps if len(places) else 0):
                numbers, held = self._alive(places, step)
                np.add.at(table[:, step], kinds[numbers], held)
            tables[space] = dict(zip(CATEGORIES, table, strict=True))
        return tables


def _size(n_bytes: int) -> str:
    unit, scale = next((unit for unit in (("GiB", 2**30), ("MiB", 2**20)) if n_bytes >= unit[1]), ("KiB", 2**10))
    return f"{n_bytes / scale:.2f} {unit}"


def argument_category(name: str) -> Category:
    """What an argument is, by the first telling name in its path, such as `state.params['norm']`; "other" if none."""
    return next((_ARGUMENTS[part] for part in re.findall(r"\w+", name) if part in _ARGUMENTS), "other")
