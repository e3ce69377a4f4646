"""From a compiler's dump to the buffers of a timeline, and what each is: by who makes it, who uses it and when."""

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from jaxmem.common.printing import size_text
from jaxmem.reading.buffer_assignment import Allocation, Place, Space, Value, read_lives
from jaxmem.reading.hlo import ENTRY, Instruction, Program, unnumbered
from jaxmem.reading.provenance import CATEGORIES, Category, Origins, Provenance
from jaxmem.tracing.jaxprs import differentiation_pass

Pass = Literal["forward", "backward", "run again", "optimizer", ""]
# Categories of what a model computes, logits among it where their sizes say so.
_COMPUTED = ("residuals", "workspace", "rematerialised")
ROOM = "room"  # the name of the span that is the memory of a result, which the runtime takes before the first step


@dataclasses.dataclass(frozen=True)
class Span:
    """One array in memory from its first step to its last, both included.

    `bytes` includes the padding of tiles; in the answers of `Timeline.alive` they are what it adds there, where another
    lies at the same address. `space` is the memory it lies in, at an `offset` in one of the compiler's allocations.
    `made_in` is the pass that makes it; "" for what the caller holds, and in programs that differentiate nothing.
    `operation` is the path of the operation that makes it, of an argument its name; `source` the line. `argument` is
    the number of the argument that it is or copies, cast or not.
    """

    name: str
    bytes: int
    first: int
    last: int
    space: Space
    allocation: int
    offset: int
    shape: str
    category: Category
    made_in: Pass
    operation: str
    source: str
    argument: int | None = None


SOURCE = [field.name for field in dataclasses.fields(Span)].index("source")  # its place in a schedule's rows


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

    `buffers` are all arrays of the program, and the room of results: a runtime takes it before the first step, so that
    it counts from there on. `assigned_bytes` is the device memory that the compiler set aside: what is in use at the
    highest point, and gaps. `passes` are (name, first step, the step after its last).
    `operations` are those of the steps. `seconds` is what each takes in all its turns, by a TPU's compiler's own
    estimate, 0 where it has none; empty where it was not asked to the end. `capacity_bytes` is what the chip offers,
    None where unknown.

    Not in it: what libraries take at run time on a CPU, beside the compiler's plan. On a TPU small programs live in
    on-chip memory for much of their time: `curve("on-chip")`.
    """

    chip: str
    capacity_bytes: int | None
    assigned_bytes: int
    steps: int
    buffers: tuple[Span, ...]
    loops: tuple[Loop, ...]
    passes: tuple[tuple[Pass, int, int], ...]
    operations: tuple[str, ...]
    seconds: tuple[float, ...] = ()

    @classmethod
    def from_schedule(
        cls,
        schedule: Mapping[str, Any],
        chip: str,
        capacity_bytes: int | None,
        arguments: Sequence[str],
        provenance: Provenance,
        clock_ghz: float | None = None,
    ) -> "Timeline":
        """Make one from the table of `read_schedule`, and the arguments' names and provenance, in their flat order."""

        def categorised(span: Span) -> Span:
            if span.argument is not None:  # an argument, or the compiler's own copy of one
                category = provenance.categories[span.argument]
                if span.name != "argument" and category == "other":
                    category = span.category
                return dataclasses.replace(
                    span, category=category, operation=span.operation or arguments[span.argument]
                )
            # With as many tokens as the head has columns, its gradient's sizes are those of logits: what an optimizer
            # makes of it is none.
            computed = span.category in _COMPUTED and span.made_in != "optimizer"
            is_logits = computed and provenance.is_logits(_sizes(span.shape))
            return dataclasses.replace(span, category="logits") if is_logits else span

        return cls(
            chip=chip,
            capacity_bytes=capacity_bytes,
            assigned_bytes=schedule["assigned_bytes"],
            steps=schedule["steps"],
            buffers=tuple(categorised(Span(*row)) for row in schedule["buffers"]),
            loops=tuple(Loop(*row) for row in schedule["loops"]),
            passes=tuple((name, first, end) for name, first, end in schedule["passes"]),
            operations=tuple(schedule["operations"]),
            seconds=tuple(n / clock_ghz / 1e9 for n in schedule.get("cycles", ())) if clock_ghz else (),
        )

    def curve(self, space: Space = "device") -> np.ndarray:
        """Return the bytes in use at each step, whole numbers `[steps]`."""
        return self._by_category[space].sum(axis=0)

    def curve_without(self, shares: Callable[[Span], float]) -> np.ndarray:
        """Return what `curve` would be if a share of each buffer, 0 to 1, were gone: bytes, real numbers `[steps]`."""
        left = 1 - np.array([shares(buffer) for buffer in self.buffers])
        return np.array([held @ left[numbers] for numbers, held in self._held["device"]])

    def by_category(self, space: Space = "device") -> dict[Category, np.ndarray]:
        """Return the bytes in use at each step, whole numbers `[steps]`, by category; together they are the curve.

        Categories that are empty all the time are left out. Divide by `jaxmem.GiB` to see gibibytes.
        """
        return {name: row for name, row in zip(CATEGORIES, self._by_category[space], strict=True) if row.any()}

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
        """What the compiler set aside and nothing fills at the peak: room between arrays, as it placed them.

        A TPU's compiler begins every array at a multiple of 16 KiB: of a small program that is most.
        """
        return self.assigned_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether what the compiler set aside is within what the chip offers; true where that is unknown."""
        return self.capacity_bytes is None or self.assigned_bytes <= self.capacity_bytes

    def alive(self, step: int, space: Space = "device") -> tuple[Span, ...]:
        """Return who lies in memory at a step, largest first. Their bytes add up to the curve there.

        Raises IndexError for a step that is not there.
        """
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step}: the schedule has steps 0 to {self.steps - 1}.")
        numbers, held = self._held[space][step]
        buffers = [
            dataclasses.replace(self.buffers[i], bytes=n_bytes)
            for i, n_bytes in zip(numbers.tolist(), held.tolist(), strict=True)
            if n_bytes
        ]
        return tuple(sorted(buffers, key=lambda buffer: -buffer.bytes))

    def at_peak(self) -> tuple[Span, ...]:
        """Return who lies in the device's memory at the peak, largest first. Their bytes add up to `peak_bytes`."""
        return self.alive(self.peak_step)

    def runs(self, space: Space = "device") -> dict[int, list[tuple[int, int, int]]]:
        """Return by the number of each buffer that adds to the curve: (first step, last step, bytes added there)."""
        rows: dict[int, list[tuple[int, int, int]]] = {}
        for step, (numbers, held) in enumerate(self._held[space]):
            for number, n_bytes in zip(numbers.tolist(), held.tolist(), strict=True):
                stretches = rows.setdefault(number, [])
                if stretches and stretches[-1][1:] == (step - 1, n_bytes):
                    stretches[-1] = (stretches[-1][0], step, n_bytes)
                elif n_bytes:
                    stretches.append((step, step, n_bytes))
        return {number: stretches for number, stretches in rows.items() if stretches}

    def at_once(self, shape: str, operation: str) -> int:
        """Return how many arrays of this shape and operation lie in the device's memory at the same time, at most.

        Those of other layers, whose operations differ by a number alone, are among them.
        """
        change = np.zeros(self.steps + 1, np.int64)
        for span in self.buffers:
            if (span.shape, unnumbered(span.operation), span.space) == (shape, unnumbered(operation), "device"):
                change[span.first] += 1
                change[span.last + 1] -= 1
        return int(np.cumsum(change).max())

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

        renamed = dataclasses.replace(self, buffers=tuple(map(named, self.buffers)))
        vars(renamed)["_held"] = self._held  # what lies where does not depend on what it is called
        return renamed

    def __str__(self) -> str:
        where = f" ({self.pass_at(self.peak_step)})" if self.passes else ""
        lines = [
            f"{self.chip}: {self.steps} steps, highest at step {self.peak_step}{where}: {size_text(self.peak_bytes)} "
            f"in use, {size_text(self.assigned_bytes)} set aside"
        ]
        rows = [(b.bytes, b.category, b.shape, b.operation, b.source) for b in self.at_peak()]
        rest = sum(size for size, *_ in rows[8:])
        rows = [*rows[:8], (rest, "smaller ones", "", "", ""), (self.gap_bytes, "gaps", "between arrays", "", "")]
        lines += [f"  {size_text(size):>10}  {what:<15}{'  '.join(details)}" for size, what, *details in rows if size]
        return "\n".join(line.rstrip() for line in lines)

    @functools.cached_property
    def _held(self) -> dict[Space, list[tuple[np.ndarray, np.ndarray]]]:
        """Of each memory and step: the numbers of the buffers alive there, and the bytes that each of them adds.

        They stand in the order of their addresses, the larger first at equal ones. What lies at one address counts
        once: a buffer adds the bytes that reach beyond those before it. A result's room adds what all of them leave.
        """
        tables: dict[Space, list[tuple[np.ndarray, np.ndarray]]] = {}
        # Between two allocations' beginnings.
        apart = max((span.offset + span.bytes for span in self.buffers), default=0)
        allocations = 1 + max((span.allocation for span in self.buffers), default=0)
        for space in get_args(Space):
            rows = [
                (span.allocation * apart + span.offset, -span.bytes, number, span.first, span.last, span.allocation)
                for number, span in enumerate(self.buffers)
                if span.space == space and span.name != ROOM
            ]
            start, size, number, first, last, lies_in = np.array(sorted(rows), np.int64).reshape(-1, 6).T
            end = start - size
            rooms = [
                (number, span.bytes, span.allocation)
                for number, span in enumerate(self.buffers)
                if span.space == space and span.name == ROOM
            ]
            room, room_size, holds = np.array(rooms, np.int64).reshape(-1, 3).T
            tables[space] = []
            for step in range(self.steps):
                alive = (first <= step) & (last >= step)
                reached = np.maximum.accumulate(np.concatenate([[0], end[alive]]))[:-1]
                held = np.maximum(end[alive] - np.maximum(start[alive], reached), 0)
                filled = np.zeros(allocations, np.int64)
                np.add.at(filled, lies_in[alive], held)
                left = room_size - filled[holds]
                tables[space].append((np.append(number[alive], room), np.append(held, left)))
        return tables

    @functools.cached_property
    def _by_category(self) -> dict[Space, np.ndarray]:
        """Of each memory the bytes in use, by category and step."""
        kinds = np.array([CATEGORIES.index(buffer.category) for buffer in self.buffers], np.int64)
        tables = {space: np.zeros((len(CATEGORIES), self.steps), np.int64) for space in get_args(Space)}
        for space, table in tables.items():
            for step, (numbers, held) in enumerate(self._held[space]):
                np.add.at(table[:, step], kinds[numbers], held)
        return tables


def _sizes(shape: str) -> list[int]:
    """Return the sizes in the text of an array's shape, `f32[8,16]`; none of a tuple's."""
    match = re.fullmatch(r"\w+\[([\d,]+)\]", shape)
    return [int(size) for size in match[1].split(",")] if match else []


_UPDATES = ("dynamic-update-slice", "dynamic_update_slice")


def read_schedule(
    stem: str,
    allocations: dict[int, Allocation],
    places: dict[int, Place],
    program: Program,
    cycles: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return what `Timeline.from_schedule` reads, for JSON: of a program, its memory, and the dump's files of values.

    `stem`: the path that those begin with. `cycles`: of instructions by name, where they are known. Raises ValueError
    where one is missing, cut short, or of a form that is not known.
    """
    if not program.computations:
        raise ValueError("the compiler's dump holds no program.")
    try:
        reader = _Reader(stem, allocations, places, program)
        return {
            "assigned_bytes": sum(
                allocation.size
                for allocation in allocations.values()
                if allocation.space == "device" and allocation.kind != "thread"
            ),
            "steps": reader.steps,
            "passes": reader.passes,
            "loops": [dataclasses.astuple(loop) for loop in reader.loops()],
            "operations": [reader.line(name).operation or name for name in reader.schedule],
            "cycles": [cycles.get(name, 0) for name in reader.schedule] if cycles else [],
            "buffers": [dataclasses.astuple(span) for span in (*reader.held_throughout(), *reader.made())],
        }
    except (LookupError, AttributeError, TypeError) as error:  # a file that can be read, and says something else
        raise ValueError(f"the compiler's dump is of a form that is not known: {error!r}") from error


class _Reader:
    def __init__(self, stem: str, allocations: dict[int, Allocation], places: dict[int, Place], program: Program):
        self.schedule, self._values = read_lives(stem, places)
        self._allocations, self._program = allocations, program
        self._origins = Origins(program)
        # Of ordered effects, such as prints in order, come tokens, which stand before the arguments.
        given = [line for line in program.computations.get(ENTRY, ()) if line.opcode == "parameter"]
        self._tokens = sum(line.shapes[0].dtype == "token" for line in given)
        self._position = {name: step for step, name in enumerate(self.schedule)}
        self.steps = max([len(self.schedule), *(value.last + 1 for value in self._values)])
        self.passes = find_passes([_own_pass(self.line(name)) for name in self.schedule], self.loops())
        self._pass_of_step: list[Pass] = [""] * self.steps
        for name, first, end in self.passes:
            # After the last step what the program puts out is still alive.
            end = self.steps if end == len(self.schedule) else end
            self._pass_of_step[first:end] = [name] * (end - first)

    def line(self, name: str) -> Instruction:
        return self._origins.named(name)

    def held_throughout(self) -> Iterator[Span]:
        """Yield arguments, which the caller holds (those donated become outputs), constants, and room of results."""
        results = {value.place.allocation: value.place.shape for value in sorted(self._values, key=lambda v: v.last)}
        for number, allocation in self._allocations.items():
            place = allocation.size, 0, self.steps - 1, allocation.space, number, 0
            argument = self._number(allocation.parameter)
            if allocation.kind == "constant" or argument is not None:
                yield Span(allocation.kind, *place, allocation.shape, "other", "", "", "", argument)
            elif allocation.kind == "output":
                yield Span(ROOM, *place, results.get(number, ""), "output", "", "a result, not written yet", "")

    def made(self) -> Iterator[Span]:
        """Yield what the program makes: one for each stay of a buffer in memory."""
        for group in self._buffers():
            chosen = next((value for value in _computed_first(group) if _own_pass(self._maker(value))), group[0])
            place, line = chosen.place, self._origins.of(chosen.place.name)
            allocation = self._allocations[place.allocation]
            argument = self._number(self._origins.argument_of(self._maker(group[0])) if len(group) == 1 else None)
            labels = *self._kind(group, allocation.is_output), line.operation, self._program.source(line), argument
            for first, last in _stays(group):
                lies_in = allocation.space, place.allocation, place.offset, place.shape
                yield Span(place.name, place.size, first, last, *lies_in, *labels)

    def loops(self) -> list[Loop]:
        """Return the loops, outer ones before those inside."""
        computations = self._program.computations
        loops = []
        for loop in (line for lines in computations.values() for line in lines if line.opcode == "while"):
            lines = [line for part in ("condition", "body") for line in computations.get(loop.named(part), ())]
            inside = [self._position[line.name] for line in lines if line.name in self._position]
            if inside and loop.name in self._position:
                loops.append(Loop(min(inside), self._position[loop.name], self._program.trip_count(loop)))
        return sorted(loops, key=lambda loop: (loop.first, -loop.end))

    def _number(self, parameter: int | None) -> int | None:
        """Return which argument a parameter of the compiled program is; None for a token."""
        return None if parameter is None or parameter < self._tokens else parameter - self._tokens

    def _maker(self, value: Value) -> Instruction:
        return self.line(value.place.name.partition("{")[0])

    def _buffers(self) -> Iterator[list[Value]]:
        """Yield values that are one buffer by definition: what a loop takes, updates in place and gives back."""
        at_address: dict[tuple[int, int, int], list[Value]] = defaultdict(list)
        for value in sorted(self._values, key=lambda value: (value.first, value.last)):
            kind = self._allocations[value.place.allocation].kind
            if value.place.size and kind in ("output", "temporaries"):
                at_address[value.place.allocation, value.place.offset, value.place.size].append(value)
        for values in at_address.values():
            group = values[:1]
            for value in values[1:]:
                if value.first <= max(member.last for member in group) and self._continues(group[-1], value):
                    group.append(value)
                else:
                    yield group
                    group = [value]
            yield group

    def _continues(self, earlier: Value, later: Value) -> bool:
        """Return whether `later` is the same buffer as `earlier` at its address, and no other that reuses the place."""
        maker = self._maker(later)
        in_place = any(word in f"{maker.name} {maker.opcode} {maker.rest}" for word in _UPDATES)
        return later.place.phi or in_place or (earlier.place.phi and self._maker(earlier).opcode == "parameter")

    def _kind(self, group: list[Value], in_output: bool) -> tuple[Category, Pass]:
        """Return the category of a buffer, and the pass in which it is made."""
        makers = [(value.first, self._origins.of(value.place.name)) for value in _computed_first(group)]
        passes = [self._made_in(step, maker) for step, maker in makers]
        made_in: Pass = next((own for own in passes if own), self._pass_of_step[group[0].first])
        last = max(value.last for value in group)
        output = in_output and last >= len(self.schedule) - 1
        if not output and any(_is_logits(maker.path) for _, maker in makers):
            return "logits", made_in
        if made_in in ("backward", "run again") and (output or self._used_by_optimizer(group, last)):
            return "gradients", made_in
        if output:
            return "output", made_in
        if made_in == "run again":
            return "rematerialised", made_in
        kept = made_in == "forward" and self._pass_of_step[last] in ("backward", "optimizer")
        return "residuals" if kept else "workspace", made_in

    def _made_in(self, step: int, maker: Instruction) -> Pass:
        own = _own_pass(maker)
        # What belongs to nothing differentiated is the optimizer's work only once gradients are being made.
        early = self._pass_of_step[step] in ("forward", "")
        return "" if own == "optimizer" and early else own

    def _used_by_optimizer(self, group: list[Value], last: int) -> bool:
        users = {(self._position.get(user, 0), user) for value in group for user in value.users}
        passes = [self._made_in(step, self.line(user)) for step, user in users]
        return self._pass_of_step[last] == "optimizer" or "optimizer" in passes


def find_passes(passes: list[Pass], loops: Sequence[Loop] = ()) -> list[tuple[Pass, int, int]]:
    """Return where the forward pass ends and the backward one, by the passes of a schedule's steps: (pass, first, end).

    Compilers interleave them a little: each border lies where the fewest steps are on its wrong side. To the optimizer
    a step in one of the loops counts as often as it runs: what waits for no gradient, such as a learning rate or keys
    of random numbers, may stand before the loop over layers, and be more lines than that has. Empty for a program that
    differentiates nothing.
    """
    backward = [own in ("backward", "run again") for own in passes]
    if not any(backward):
        return []
    start = _border([own == "forward" for own in passes], backward)
    runs = np.ones(len(passes), np.int64)
    for loop in loops:
        runs[loop.first : loop.end] *= loop.trips or 1
    gradients, optimizer = runs * backward, runs * [own == "optimizer" for own in passes]
    end = start + _border(gradients[start:], optimizer[start:]) if any(optimizer[start:]) else len(passes)
    rows: list[tuple[Pass, int, int]] = [("forward", 0, start), ("backward", start, end)]
    rows.append(("optimizer", end, len(passes)))
    return [row for row in rows if row[1] < row[2]]


def _border(before: Sequence[int] | np.ndarray, after: Sequence[int] | np.ndarray) -> int:
    """Return the place with the fewest of `after` before it and of `before` after it."""
    return int(np.argmin(np.cumsum([0, *after]) - np.cumsum([0, *before])))


def _own_pass(line: Instruction) -> Pass:
    # Without a path of its own it is the compiler's: a copy, a constant, an argument. Of a sharded program all paths
    # begin with `shard_map`.
    named = "/" in line.path and line.operation not in ("", "shard_map")
    return differentiation_pass(line.path) or ("optimizer" if named else "")


def _is_logits(path: str) -> bool:
    """Return whether it is made within `jax.named_scope("logits")`, and by no product of that scope in reverse."""
    inside = re.search(r"\blogits\b", path) is not None
    return inside and not (path.endswith("dot_general") and "transpose(" in path)


def _computed_first(group: list[Value]) -> list[Value]:
    """Return the values with those that are computed first, then those that only pass through a loop."""
    return sorted(group, key=lambda value: value.place.phi)


def _stays(group: list[Value]) -> Iterator[tuple[int, int]]:
    first, last = group[0].first, group[0].last
    for value in group[1:]:
        if value.first > last + 1:
            yield first, last
            first = value.first
        last = max(last, value.last)
    yield first, last
