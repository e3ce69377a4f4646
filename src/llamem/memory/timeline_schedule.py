"""From a compiler's dump to the buffers of a timeline, and what each is: by who makes it, who uses it and when."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from llamem.memory.buffer_assignment import Allocation, Place
from llamem.memory.hlo import Instruction, Program
from llamem.memory.jaxprs import differentiation_pass
from llamem.memory.provenance import Category
from llamem.memory.timeline import ROOM, Loop, Pass, Span
from llamem.memory.timeline_dump import Value, read_lives
from llamem.memory.timeline_origin import Origins

_UPDATES = ("dynamic-update-slice", "dynamic_update_slice")


def read_schedule(
    stem: str, allocations: dict[int, Allocation], places: dict[int, Place], program: Program
) -> dict[str, Any]:
    """Return what `Timeline.from_schedule` reads, for JSON: of a program, its memory, and the dump's files of values.

    `stem`: the path that those begin with. Raises ValueError where one is missing, cut short, or of a form that is not
    known.
    """
    if not program.computations:
        raise ValueError("the compiler's dump holds no program.")
    try:
        reader = _Reader(stem, allocations, places, program)
        return {
            "assigned_bytes": sum(
                one.size for one in allocations.values() if one.space == "device" and one.kind != "thread"
            ),
            "steps": reader.steps,
            "passes": reader.passes,
            "loops": [dataclasses.astuple(loop) for loop in reader.loops()],
            "operations": [reader.line(name).operation or name for name in reader.schedule],
            "buffers": [dataclasses.astuple(span) for span in (*reader.held_throughout(), *reader.made())],
        }
    except (LookupError, AttributeError, TypeError) as error:  # a file that can be read, and says something else
        raise ValueError(f"the compiler's dump is of a form that is not known: {error!r}") from error


class _Reader:
    def __init__(self, stem: str, allocations: dict[int, Allocation], places: dict[int, Place], program: Program):
        self.schedule, self._values = read_lives(stem, places)
        self._allocations, self._program = allocations, program
        self._origins = Origins(program)
        self._position = {name: step for step, name in enumerate(self.schedule)}
        self.steps = max([len(self.schedule), *(value.last + 1 for value in self._values)])
        self.passes = find_passes([_own_pass(self.line(name)) for name in self.schedule])
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
        for number, one in self._allocations.items():
            place = one.size, 0, self.steps - 1, one.space, number, 0
            if one.kind in ("argument", "constant"):
                yield Span(one.kind, *place, one.shape, "other", "", "", "", one.parameter)
            elif one.kind == "output":
                yield Span(ROOM, *place, results.get(number, ""), "output", "", "a result, not written yet", "")

    def made(self) -> Iterator[Span]:
        """Yield what the program makes: one for each stay of a buffer in memory."""
        for group in self._buffers():
            chosen = next((value for value in _computed_first(group) if _own_pass(self._maker(value))), group[0])
            place, line = chosen.place, self._origins.of(chosen.place.name)
            allocation = self._allocations[place.allocation]
            argument = self._origins.argument_of(self._maker(group[0])) if len(group) == 1 else None
            told = *self._kind(group, allocation.is_output), line.operation, self._program.source(line), argument
            for first, last in _stays(group):
                lies_in = allocation.space, place.allocation, place.offset, place.shape
                yield Span(place.name, place.size, first, last, *lies_in, *told)

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
        told = [own for step, maker in makers if (own := self._made_in(step, maker))]
        made_in: Pass = told[0] if told else self._pass_of_step[group[0].first]
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


def find_passes(passes: list[Pass]) -> list[tuple[Pass, int, int]]:
    """Return where the forward pass ends and the backward one, by the passes of a schedule's steps: (pass, first, end).

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
    return [row for row in found if row[1] < row[2]]


def _border(before: list[bool], after: list[bool]) -> int:
    """Return the place with the fewest of `after` before it and of `before` after it."""
    return int(np.argmin(np.cumsum([0, *after]) - np.cumsum([0, *before])))


def _own_pass(line: Instruction) -> Pass:
    # Without a path of its own it is the compiler's: a copy, a constant, an argument.
    return differentiation_pass(line.path) or ("optimizer" if "/" in line.path and line.operation else "")


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
