"""From a compiler's dump to a table of buffers and what each is: told from who makes it, who uses it and when."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from llamem.memory.hlo import ENTRY, Instruction, parse
from llamem.memory.name_stacks import differentiation_pass
from llamem.memory.timeline_dump import Allocation, Value, read_files
from llamem.memory.timeline_origin import Origins

Pass = Literal["forward", "backward", "run again", "optimizer", ""]

_HOST = 5  # of XLA's memory spaces: 0 is the device's memory, others lie on the chip itself
_COPIES = ("copy", "copy-start", "copy-done")
_UPDATES = ("dynamic-update-slice", "dynamic_update_slice")


def schedule_or_reason(folder: Path, platform: Literal["cpu", "tpu", "cuda"]) -> dict[str, Any]:
    """For a report's answer: "schedule", as `read_schedule` gives it, or "no_schedule", with what is wrong."""
    try:
        return {"schedule": read_schedule(folder, platform)}
    except ValueError as error:
        return {"no_schedule": str(error)}


def read_schedule(folder: Path, platform: Literal["cpu", "tpu", "cuda"]) -> dict[str, Any]:
    """What `Timeline.from_schedule` reads, for JSON, from the files that the compiler left in `folder`.

    Raises ValueError where a file is missing, cut short, or of a form that is not known.
    """
    try:
        return _table(_Reader(folder, platform))
    except (LookupError, AttributeError, TypeError) as error:  # a file that can be read, and says something else
        raise ValueError(f"the compiler's dump is of a form that is not known: {error!r}") from error


def _table(reader: "_Reader") -> dict[str, Any]:
    rows = [*reader.held_throughout(), *reader.made()]
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    return {
        "steps": reader.steps,
        "assigned_bytes": reader.assigned_bytes(),
        "phases": reader.phases,
        "loops": reader.loops(),
        "operations": [number(reader.line(name).operation or name) for name in reader.schedule],
        "buffers": [[number(cell) if isinstance(cell, str) else cell for cell in row] for row in rows],
        "texts": list(texts),
    }


class _Reader:
    def __init__(self, folder: Path, platform: str):
        dump = read_files(folder)
        self.schedule, self._allocations, self._values = dump.schedule, dump.allocations, dump.values
        self._platform = platform
        self._program = parse(dump.program)
        self._origins = Origins(self._program)
        self._position = {name: step for step, name in enumerate(self.schedule)}
        self.steps = max([len(self.schedule), *(value.last + 1 for value in self._values)])
        self.phases = phases([_own_pass(self.line(name)) for name in self.schedule])
        self._phase_of_step: list[Pass] = [""] * self.steps
        for name, first, end in self.phases:
            # After the last step what the program puts out is still alive.
            end = self.steps if end == len(self.schedule) else end
            self._phase_of_step[first:end] = [name] * (end - first)

    def line(self, name: str) -> Instruction:
        return self._origins.named(name)

    def assigned_bytes(self) -> int:
        """The device memory that the compiler set aside."""
        shared = (allocation for allocation in self._allocations.values() if "thread-local" not in allocation.kind)
        return sum(allocation.size for allocation in shared if self._space(allocation.color) == "device")

    def held_throughout(self) -> Iterator[list[Any]]:
        """Rows of arguments, which the caller holds (those donated become outputs), and of constants."""
        for number, allocation in self._allocations.items():
            if _is_held(allocation):
                shape = re.search(r"shape \|([^|]*)\|", allocation.kind)
                place = [number, 0, allocation.size, self._space(allocation.color), 0, self.steps - 1]
                name = "constant" if allocation.parameter is None else "argument"
                yield [*place, name, shape[1] if shape else "", "other", "", "", "", allocation.parameter]

    def made(self) -> Iterator[list[Any]]:
        """Rows of what the program makes: one for each stay of a buffer in memory."""
        for group in self._buffers():
            allocation = self._allocations[group[0].allocation]
            chosen = next((value for value in _computed_first(group) if _own_pass(self._maker(value))), group[0])
            line = self._origins.of(chosen.name)
            what = [chosen.name, chosen.shape, *self._kind(group, allocation.kind)]
            place = [chosen.allocation, chosen.offset, chosen.size, self._space(allocation.color)]
            told = [line.operation, self._program.source(line), self._copied_argument(group)]
            for first, last in _stays(group):
                yield [*place, first, last, *what, *told]

    def loops(self) -> list[tuple[int, int, int | None]]:
        """Of each loop in the schedule its first step, the one after its last, and how often it runs, if it says."""
        computations = self._program.computations
        rows: list[tuple[int, int, int | None]] = []
        for loop in (line for lines in computations.values() for line in lines if line.opcode == "while"):
            lines = [line for part in ("condition", "body") for line in computations.get(loop.named(part), ())]
            inside = [self._position[line.name] for line in lines if line.name in self._position]
            if inside and loop.name in self._position:
                rows.append((min(inside), self._position[loop.name], self._program.trip_count(loop)))
        return sorted(rows, key=lambda row: (row[0], -row[1]))

    def _space(self, color: int) -> str:
        if color == _HOST:
            return "host"
        # A GPU's compiler has colors of its own for memory that is the device's all the same.
        return "device" if color == 0 or self._platform == "cuda" else "on-chip"

    def _maker(self, value: Value) -> Instruction:
        return self.line(value.name.partition("{")[0])

    def _buffers(self) -> Iterator[list[Value]]:
        """Values that are one buffer by definition: what a loop takes, updates in place and gives back."""
        at_address: dict[tuple[int, int, int], list[Value]] = defaultdict(list)
        for value in sorted(self._values, key=lambda value: (value.first, value.last)):
            allocation = self._allocations[value.allocation]
            if value.size and not _is_held(allocation) and "thread-local" not in allocation.kind:
                at_address[value.allocation, value.offset, value.size].append(value)
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
        """Whether `later` is the same buffer as `earlier` at its address, and not another that reuses the place."""
        maker = self._maker(later)
        in_place = any(word in f"{maker.name} {maker.opcode} {maker.rest}" for word in _UPDATES)
        return later.phi or in_place or (earlier.phi and self._maker(earlier).opcode == "parameter")

    def _kind(self, group: list[Value], allocation: str) -> tuple[str, Pass]:
        """The category of a buffer, and the pass in which it is made."""
        makers = [(value.first, self._origins.of(value.name)) for value in _computed_first(group)]
        told = [own for step, maker in makers if (own := self._made_in(step, maker))]
        made_in: Pass = told[0] if told else self._phase_of_step[group[0].first]
        last = max(value.last for value in group)
        output = "maybe-live-out" in allocation and last >= len(self.schedule) - 1
        if not output and any(_is_logits(_op_name(maker)) for _, maker in makers):
            return "logits", made_in
        if made_in in ("backward", "run again") and (output or self._used_by_optimizer(group, last)):
            return "gradients", made_in
        if output:
            return "output", made_in
        if made_in == "run again":
            return "rematerialised", made_in
        kept = made_in == "forward" and self._phase_of_step[last] in ("backward", "optimizer")
        return "residuals" if kept else "workspace", made_in

    def _made_in(self, step: int, maker: Instruction) -> Pass:
        own = _own_pass(maker)
        # What belongs to nothing differentiated is the optimizer's work only once gradients are being made.
        early = self._phase_of_step[step] in ("forward", "")
        return "" if own == "optimizer" and early else own

    def _used_by_optimizer(self, group: list[Value], last: int) -> bool:
        users = {(self._position.get(user, 0), user) for value in group for user in value.users}
        passes = [self._made_in(step, self.line(user)) for step, user in users]
        return self._phase_of_step[last] == "optimizer" or "optimizer" in passes

    def _copied_argument(self, group: list[Value]) -> int | None:
        """The number of the argument that this is a plain copy of, in another layout or memory; else None."""
        maker = self._maker(group[0])
        if len(group) > 1 or maker.opcode not in _COPIES:
            return None
        source = self.line(maker.operands[0])
        argument = source.opcode == "parameter" and source in self._program.computations[ENTRY]
        return int(source.operands[0]) if argument else None


def phases(passes: list[Pass]) -> list[tuple[Pass, int, int]]:
    """Where the forward pass ends and the backward one, by the passes of a schedule's steps: (pass, first, end).

    Compilers interleave them a little: each border lies where the fewest steps are on its wrong side. Empty for a
    program that differentiates nothing.
    """
    backward = [own in ("backward", "run again") for own in passes]
    if not any(backward):
        return []
    start = _border([own == "forward" for own in passes], backward)
    optimizer = [own == "optimizer" for own in passes]
    end = start + _border(backward[start:], optimizer[start:]) if any(optimizer[start:]) else len(passes)
    found: list[tuple[Pass, int, int]] = [("forward", 0, start), ("backward", start, end)]
    found.append(("optimizer", end, len(passes)))
    return [phase for phase in found if phase[1] < phase[2]]


def _border(before: list[bool], after: list[bool]) -> int:
    """The place with the fewest of `after` before it and of `before` after it."""
    wrong = sum(before)
    best, place = wrong, 0
    for step, (early, late) in enumerate(zip(before, after, strict=True), 1):
        wrong += late - early
        if wrong < best:
            best, place = wrong, step
    return place


def _own_pass(line: Instruction) -> Pass:
    path = _op_name(line)
    # Without a path of its own it is the compiler's: a copy, a constant, an argument.
    return differentiation_pass(path) or ("optimizer" if "/" in path and line.operation else "")


def _op_name(line: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', line.rest)
    return found[1] if found else ""


def _is_logits(path: str) -> bool:
    """Whether it is made within `jax.named_scope("logits")`, and is not one of that scope's products in reverse."""
    inside = re.search(r"\blogits\b", path) is not None
    return inside and not (path.endswith("dot_general") and "transpose(" in path)


def _is_held(allocation: Allocation) -> bool:
    return allocation.parameter is not None or "constant" in allocation.kind


def _computed_first(group: list[Value]) -> list[Value]:
    """First the values that are computed, then those that only pass through a loop."""
    return sorted(group, key=lambda value: value.phi)


def _stays(group: list[Value]) -> Iterator[tuple[int, int]]:
    first, last = group[0].first, group[0].last
    for value in group[1:]:
        if value.first > last + 1:
            yield first, last
            first = value.first
        last = max(last, value.last)
    yield first, last
