"""A proof that an NVIDIA GPU's program reads slices where it wrote them: the compiler's notes beside the indices."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from llamem.memory.gpu_offload import FAULTY_PASS
from llamem.memory.hlo import Instruction, Program


@dataclasses.dataclass(frozen=True)
class SliceNotes:
    """What a GPU's program notes of its slices in loops, compared with the indices that the slices carry.

    `right` is how many notes say the same, `wrong` are those that do not, in words, and `unknown` those whose index
    could not be followed: nothing is proved of them.
    """

    right: int
    wrong: tuple[str, ...]
    unknown: tuple[str, ...]


def check_slice_notes(program: Program) -> SliceNotes:
    """Compare each `dynamic_slice_config` of an optimised program with the slice's own index.

    Each index is computed for the first, second and last turn of the loop. A program without such notes, as other
    compilers write, reads by its indices: nothing is wrong with it, and nothing is counted.
    """
    scalars = _Scalars(program)
    right, wrong, unknown = 0, [], []
    for name, lines in program.computations.items():
        for line in lines:
            config = re.search(r'"dynamic_slice_config":\{([^}]*)\}', line.rest)
            if config is None:
                continue
            noted = {key: int(value) for key, value in re.findall(r'"(\w+)":"(-?\d+)"', config[1])}
            try:
                turns = _offsets(scalars, program.computations[name], name, line)
            except LookupError as error:
                unknown.append(f"{line.name}: {error}")
                continue
            said = {turn: noted.get("byte_offset", 0) + turn * noted.get("byte_stride", 0) for turn in turns}
            if said == turns:
                right += 1
            else:
                where = ", ".join(f"turn {turn}: byte {turns[turn]:,}, noted {said[turn]:,}" for turn in turns)
                wrong.append(f"{line.name} of {line.operation or name}: {where}")
    return SliceNotes(right, tuple(wrong), tuple(unknown))


def wrong_slice_notes(wrong: Sequence[str]) -> Iterator[str]:
    """Yield the warning of a report, where a program has `SliceNotes.wrong`."""
    if wrong:
        yield (
            f"WRONG NUMBERS: {len(wrong)} slices are read or written at another place than the program says, a fault "
            f"of this compiler: {wrong[0]}. Update jaxlib, or switch the pass off: "
            f'compiler_options={{"xla_disable_hlo_passes": "{FAULTY_PASS}"}}.'
        )


def _offsets(scalars: "_Scalars", lines: list[Instruction], computation: str, line: Instruction) -> dict[int, int]:
    """Return where the slice begins, in bytes, by the turn of its loop: the first, the second and the last."""
    is_update = line.opcode == "dynamic-update-slice"
    indices = line.operands[2 if is_update else 1 :]
    shapes = {other.name: other.shapes[0] for other in lines}
    whole = line.shapes[0] if is_update else shapes[line.operands[0]]
    part = shapes[line.operands[1]] if is_update else line.shapes[0]
    trips = scalars.trips_around(computation)
    return {
        turn: sum(
            max(0, min(scalars.value(computation, index, turn), size - length)) * stride
            for index, size, length, stride in zip(
                indices, whole.sizes, part.sizes, _strides(whole.sizes, whole.layout, whole.item_bytes), strict=True
            )
        )
        for turn in sorted({0, min(1, trips - 1), trips - 1})
    }


def _strides(sizes: tuple[int, ...], layout: str, item_bytes: float) -> list[int]:
    """Return bytes from one index of each axis to the next; `layout` begins with the axes, the fastest first."""
    found = re.match(r"\{([\d,]+)", layout)
    order = [int(axis) for axis in found[1].split(",")] if found else list(reversed(range(len(sizes))))
    strides, step = [0] * len(sizes), item_bytes
    for axis in order:
        strides[axis] = int(step)
        step *= sizes[axis]
    return strides


class _Scalars:
    """Whole numbers of a program in a turn of the loop around them; LookupError for one that cannot be followed."""

    def __init__(self, program: Program):
        self._program = program
        self._lines = {name: {line.name: line for line in lines} for name, lines in program.computations.items()}
        self._callers = {
            called: (name, line)
            for name, lines in program.computations.items()
            for line in lines
            for called in line.called
        }

    def trips_around(self, computation: str) -> int:
        """Return how often the innermost loop around a computation runs."""
        _, loop = self._loop(computation)
        trips = self._program.trip_count(loop)
        if not trips:
            raise LookupError(f"{loop.name} does not say how often it runs")
        return trips

    def value(self, computation: str, name: str, turn: int) -> int:
        """Return the number of this name, in one turn of the innermost loop around the computation."""
        line = self._lines[computation][name]
        if line.opcode == "constant":
            return int(line.operands[0])
        if line.opcode == "parameter":
            above, caller = self._callers[computation]
            return self.value(above, caller.operands[int(line.operands[0])], turn)
        if line.opcode == "get-tuple-element":
            return self._element(computation, line, turn)
        if line.opcode in ("fusion", "call", "async-start"):
            inside = line.called[0]
            return self.value(inside, self._program.computations[inside][-1].name, turn)
        if line.opcode == "compare":
            return self._compared(line, [self.value(computation, operand, turn) for operand in line.operands])
        if line.opcode not in _ARITHMETIC:
            raise LookupError(f"its index comes from {line.opcode} {line.name}")
        return _ARITHMETIC[line.opcode](*(self.value(computation, operand, turn) for operand in line.operands))

    def _element(self, computation: str, line: Instruction, turn: int) -> int:
        """Return one of several results of a fusion, or of a loop's arguments its counter."""
        whole, place = self._lines[computation][line.operands[0]], int(line.named("index"))
        if whole.opcode == "fusion":
            inside = whole.called[0]
            return self.value(inside, self._program.computations[inside][-1].operands[place], turn)
        caller = self._callers.get(computation)
        told = caller[1].rest if caller else ""
        counter = re.search(r'"known_induction_variable":\{"tuple_index":"(\d+)"\}', told)
        steps = re.search(r'"known_init_step":\{"init":"(-?\d+)","step":"(-?\d+)"\}', told)
        if not (counter and steps and place == int(counter[1])):
            raise LookupError(f"its index comes from {line.name}, which is no counter of a loop")
        return int(steps[1]) + turn * int(steps[2])

    def _loop(self, computation: str) -> tuple[str, Instruction]:
        if computation not in self._callers:
            raise LookupError("it lies in no loop")
        above, caller = self._callers[computation]
        return (above, caller) if caller.opcode == "while" else self._loop(above)

    @staticmethod
    def _compared(line: Instruction, values: list[int]) -> int:
        first, second = values
        return int({"LT": first < second, "GE": first >= second}[line.named("direction")])


_ARITHMETIC = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "negate": lambda a: -a,
    "select": lambda chosen, a, b: a if chosen else b,
    "copy": lambda a: a,
    "bitcast": lambda a: a,
    "convert": lambda a: a,
}
