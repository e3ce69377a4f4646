"""Memory against time: what lies in a chip's memory at each step of a program, as the chip's compiler wrote it down."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from llamem.memory.buffer_assignment import Allocation, Space
from llamem.memory.provenance import Provenance
from llamem.memory.show import size_text
from llamem.memory.timeline_addresses import Addresses
from llamem.memory.timeline_categories import CATEGORIES, Category
from llamem.memory.timeline_schedule import Pass, Row

# Categories of what a model computes, logits among it where their sizes say so.
_COMPUTED = ("residuals", "workspace", "rematerialised")


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

    `buffers` are all arrays of the program, `allocations` the pieces of memory that the compiler set aside for them, by
    number. `passes` are (name, first step, the step after its last). `operations` are those of the steps.
    `capacity_bytes` is what the chip offers, None where unknown.

    Not in it: what libraries take at run time on a CPU, beside the compiler's plan. On a TPU small programs live in
    on-chip memory for much of their time: `curve("on-chip")`.
    """

    chip: str
    capacity_bytes: int | None
    allocations: Mapping[int, Allocation]
    steps: int
    buffers: tuple[Span, ...]
    loops: tuple[Loop, ...]
    passes: tuple[tuple[Pass, int, int], ...]
    operations: tuple[str, ...]

    @classmethod
    def from_schedule(
        cls,
        schedule: Mapping[str, Any],
        chip: str,
        capacity_bytes: int | None,
        arguments: Sequence[str],
        provenance: Provenance,
    ) -> "Timeline":
        """Make one from the table of `read_schedule`, and the arguments' names and provenance, in their flat order."""
        texts = schedule["texts"]
        allocations = {number: Allocation(*parts) for number, *parts in schedule["allocations"]}

        def buffer(row: Row) -> Span:
            name, category, operation = texts[row.name], texts[row.category], texts[row.operation]
            if row.argument is not None:  # an argument, or the compiler's own copy of one
                of_argument = provenance.categories[row.argument]
                category = of_argument if name == "argument" or of_argument != "other" else category
                operation = operation or arguments[row.argument]
            elif category in _COMPUTED and provenance.is_logits(_sizes(texts[row.shape])):
                category = "logits"
            return Span(
                name=name,
                bytes=row.bytes,
                first=row.first,
                last=row.last,
                space=allocations[row.allocation].space,
                address=(row.allocation, row.offset),
                shape=texts[row.shape],
                category=category,
                made_in=texts[row.made_in],
                operation=operation,
                source=texts[row.source],
            )

        return cls(
            chip=chip,
            capacity_bytes=capacity_bytes,
            allocations=allocations,
            steps=schedule["steps"],
            buffers=tuple(buffer(Row(*row)) for row in schedule["buffers"]),
            loops=tuple(Loop(*row) for row in schedule["loops"]),
            passes=tuple((name, first, end) for name, first, end in schedule["passes"]),
            operations=tuple(texts[number] for number in schedule["operations"]),
        )

    def curve(self, space: Space = "device") -> np.ndarray:
        """Return the bytes in use at each step."""
        return sum(self._by_category[space].values(), np.zeros(self.steps, np.int64))

    def by_category(self, space: Space = "device") -> dict[Category, np.ndarray]:
        """Return the bytes in use at each step by category, without empty ones; together they are the curve."""
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
    def assigned_bytes(self) -> int:
        """The device memory that the compiler set aside: what is in use at the highest point, and gaps."""
        return sum(one.size for one in self.allocations.values() if one.space == "device")

    @property
    def gap_bytes(self) -> int:
        """What the compiler set aside and nothing fills at the peak: see `gaps`."""
        return self.assigned_bytes - self.peak_bytes

    @functools.cached_property
    def gaps(self) -> dict[str, int]:
        """`gap_bytes` by where they lie, counted from addresses.

        "outputs": in results, which have their memory from the start, and are not written yet. "between": between the
        buffers alive at the peak, at addresses that others use at other steps. "unnamed": at addresses that no array of
        the program ever has: what is lost where buffers begin at round addresses, and operations' own scratch.
        """
        return self._places["device"].gaps(self.peak_step)

    @property
    def difference(self) -> str:
        """By how much the highest point is below what the compiler set aside, and why, in a sentence."""
        whole = f"{size_text(self.assigned_bytes)} set aside, {size_text(self.peak_bytes)} in use at the fullest step"
        words = {
            "outputs": "for results not written yet",
            "between": "between buffers, where others lie at other steps",
            "unnamed": "where no array ever lies",
        }
        parts = [f"{size_text(size)} {words[where]}" for where, size in self.gaps.items() if size]
        return f"{whole}: {'; '.join(parts) or 'no gap'}."

    @property
    def fits(self) -> bool:
        """Whether what the compiler set aside is within what the chip offers; true where that is unknown."""
        return self.capacity_bytes is None or self.assigned_bytes <= self.capacity_bytes

    @property
    def over_capacity(self) -> tuple[int, int] | None:
        """The first and the last step that need more than the chip offers; None where it is enough, or unknown."""
        if self.capacity_bytes is None:
            return None
        above = np.flatnonzero(self.curve() > self.capacity_bytes)
        return (int(above[0]), int(above[-1])) if above.size else None

    def alive(self, step: int, space: Space = "device") -> tuple[Span, ...]:
        """Return who lies in memory at a step, largest first. Their bytes add up to the curve there.

        Raises IndexError for a step that is not there.
        """
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step}: the schedule has steps 0 to {self.steps - 1}.")
        indices, held = self._places[space].alive(step)
        buffers = [
            dataclasses.replace(self.buffers[i], bytes=int(n_bytes))
            for i, n_bytes in zip(indices, held, strict=True)
            if n_bytes
        ]
        return tuple(sorted(buffers, key=lambda buffer: -buffer.bytes))

    def at_peak(self) -> tuple[Span, ...]:
        """Return who lies in the device's memory at the peak, largest first. Their bytes add up to `peak_bytes`."""
        return self.alive(self.peak_step)

    def runs(self, space: Space = "device") -> dict[int, list[tuple[int, int, int]]]:
        """Return by the number of each buffer that adds to the curve: (first step, last step, bytes added there)."""
        rows: dict[int, list[tuple[int, int, int]]] = {}
        for step in range(self.steps):
            numbers, held = self._places[space].alive(step)
            for number, n_bytes in zip(numbers.tolist(), held.tolist(), strict=True):
                stretches = rows.setdefault(number, [])
                if stretches and stretches[-1][1:] == (step - 1, n_bytes):
                    stretches[-1] = (stretches[-1][0], step, n_bytes)
                elif n_bytes:
                    stretches.append((step, step, n_bytes))
        return {number: stretches for number, stretches in rows.items() if stretches}

    def pass_at(self, step: int) -> Pass:
        """Return the pass that a step lies in; "" in a program that differentiates nothing."""
        return next((name for name, first, end in self.passes if first <= step < end), "")

    def with_categories(self, names: Mapping[str, Category]) -> "Timeline":
        """Return it with your own categories: `{"head": "weights"}` for what has "head" in its operation or argument.

        The first entry that fits counts. Raises ValueError for an unknown category.
        """
        if wrong := [category for category in names.values() if category not in CATEGORIES]:
            raise ValueError(f"with_categories: {wrong[0]!r} is no category. Known: {', '.join(CATEGORIES)}.")

        def named(buffer: Span) -> Span:
            category = next((names[name] for name in names if name in buffer.operation), buffer.category)
            return dataclasses.replace(buffer, category=category)

        return dataclasses.replace(self, buffers=tuple(map(named, self.buffers)))

    def __str__(self) -> str:
        where = f" ({self.pass_at(self.peak_step)})" if self.passes else ""
        gaps = self.gap_bytes / (self.assigned_bytes or 1)
        lines = [
            f"{self.chip}: {self.steps} steps, highest at step {self.peak_step}{where}: {size_text(self.peak_bytes)} "
            f"in use, {size_text(self.assigned_bytes)} set aside, of it gaps {gaps:.1%}"
        ]
        if self.gap_bytes > self.assigned_bytes / 1000:
            lines.append(f"  {self.difference}")
        if (over := self.over_capacity) is not None:
            lines.append(f"  over the chip's {size_text(self.capacity_bytes or 0)} from step {over[0]} to {over[1]}")
        lines += [
            f"  {size_text(buffer.bytes):>10}  {buffer.category:<15}{buffer.shape}  {buffer.operation}  {buffer.source}"
            for buffer in self.at_peak()[:8]
        ]
        return "\n".join(line.rstrip() for line in lines)

    @functools.cached_property
    def _places(self) -> dict[Space, Addresses]:
        """Of each memory the buffers by address."""
        tables: dict[Space, Addresses] = {}
        for space in get_args(Space):
            places = [
                (i, one.first, one.last, *one.address, one.bytes)
                for i, one in enumerate(self.buffers)
                if one.space == space
            ]
            allocations = {number: one for number, one in self.allocations.items() if one.space == space}
            tables[space] = Addresses(places, allocations)
        return tables

    @functools.cached_property
    def _by_category(self) -> dict[Space, dict[Category, np.ndarray]]:
        kinds = np.array([CATEGORIES.index(buffer.category) for buffer in self.buffers], np.int64)
        tables: dict[Space, dict[Category, np.ndarray]] = {}
        for space, places in self._places.items():
            table = np.zeros((len(CATEGORIES), self.steps), np.int64)
            for step in range(self.steps if len(places) else 0):
                numbers, held = places.alive(step)
                np.add.at(table[:, step], kinds[numbers], held)
            tables[space] = dict(zip(CATEGORIES, table, strict=True))
        return tables


def _sizes(shape: str) -> list[int]:
    """Return the sizes in the text of an array's shape, `f32[8,16]`; none of a tuple's."""
    found = re.fullmatch(r"\w+\[([\d,]+)\]", shape)
    return [int(size) for size in found[1].split(",")] if found else []
