"""A proof that an NVIDIA GPU's program reads slices where it wrote them: the compiler's notes beside the indices."""

import dataclasses
import math
import re

from llamem.memory.hlo import Instruction, Program

_ARITHMETIC = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "negate": lambda a: -a,
    "select": lambda chosen, a, b: a if chosen else b,
    **dict.fromkeys(("copy", "bitcast", "convert"), lambda a: a),
}


@dataclasses.dataclass(frozen=True)
class SliceNotes:
    """What a GPU's program notes of its slices in loops, compared with the indices that the slices carry.

    `right` is how many notes say the same, `wrong` are those that do not, in words. Nothing is proved of a slice whose
    index cannot be followed: it counts in neither.
    """

    right: int
    wrong: tuple[str, ...]


def check_slice_notes(program: Program) -> SliceNotes:
    """Compare each `dynamic_slice_config` of an optimised program with the slice's own index along its first axis.

    Each index is computed for the first, second and last turn of the loop. A program without such notes, as other
    compilers write, reads by its indices: nothing is wrong with it, and nothing is counted.
    """
    scalars = _Scalars(program)
    right, wrong = 0, []
    for name, lines in program.computations.items():
        for line in lines:
            config = re.search(r'"dynamic_slice_config":\{([^}]*)\}', line.rest)
            if config is None:
                continue
            noted = {key: int(value) for key, value in re.findall(r'"(\w+)":"(-?\d+)"', config[1])}
            try:
                turns = _offsets(scalars, name, line)
            except LookupError:
                continue
            said = {turn: noted.get("byte_offset", 0) + turn * noted.get("byte_stride", 0) for turn in turns}
            right += said == turns
            if said != turns:
                where = ", ".join(f"turn {turn}: byte {turns[turn]:,}, noted {said[turn]:,}" for turn in turns)
                wrong.append(f"{line.name} of {line.operation or name}: {where}")
    return SliceNotes(right, tuple(wrong))


def _offsets(scalars: "_Scalars", computation: str, line: Instruction) -> dict[int, int]:
    """Return where the slice begins, in bytes, by the turn of its loop: the first, the second and the last."""
    is_update = line.opcode == "dynamic-update-slice"
    shapes = {name: other.shapes[0] for name, other in scalars.lines[computation].items() if other.shapes}
    whole = line.shapes[0] if is_update else shapes[line.operands[0]]
    part = shapes[line.operands[1]] if is_update else line.shapes[0]
    if part.sizes[1:] != whole.sizes[1:] or not re.match(r"\{([\d,]+,)?0[:}]|$", whole.layout):
        raise LookupError("it is no slice of the first axis")
    stride = int(math.prod(whole.sizes[1:]) * whole.item_bytes)
    trips = scalars.trips_around(computation)
    starts = {
        turn: scalars.value(computation, line.operands[2 if is_update else 1], turn)
        for turn in sorted({0, min(1, trips - 1), trips - 1})
    }
    return {turn: stride * max(0, min(start, whole.sizes[0] - part.sizes[0])) for turn, start in starts.items()}


class _Scalars:
    """Whole numbers of a program in a turn of the loop around them; LookupError for one that cannot be followed."""

    def __init__(self, program: Program):
        self._program = program
        self.lines = {name: {line.name: line for line in lines} for name, lines in program.computations.items()}
        self._callers = {
            called: (name, line)
            for name, lines in program.computations.items()
            for line in lines
            for called in line.called
        }

    def trips_around(self, computation: str) -> int:
        """Return how often the innermost loop around a computation runs."""
        above, caller = self._callers[computation]
        if caller.opcode != "while":
            return self.trips_around(above)
        trips = self._program.trip_count(caller)
        if not trips:
            raise LookupError(f"{caller.name} does not say how often it runs")
        return trips

    def value(self, computation: str, name: str, turn: int) -> int:
        """Return the number of this name, in one turn of the innermost loop around the computation."""
        line = self.lines[computation][name]
        if line.opcode == "constant":
            return int(line.operands[0])
        if line.opcode == "parameter":
            above, caller = self._callers[computation]
            return self.value(above, caller.operands[int(line.operands[0])], turn)
        place = int(line.named("index") or 0)
        if line.opcode == "get-tuple-element":
            line = self.lines[computation][line.operands[0]]
            if line.opcode == "parameter":
                return self._counter(computation, place, turn)
        if line.opcode in ("fusion", "call", "async-start"):
            inside = line.called[0]
            root = self._program.computations[inside][-1]
            return self.value(inside, root.operands[place] if root.opcode == "tuple" else root.name, turn)
        operands = [self.value(computation, operand, turn) for operand in line.operands]
        if line.opcode == "compare":
            return int({"LT": operands[0] < operands[1], "GE": operands[0] >= operands[1]}[line.named("direction")])
        return _ARITHMETIC[line.opcode](*operands)

    def _counter(self, computation: str, place: int, turn: int) -> int:
        """Return the counter of a loop, which stands at this place of its arguments."""
        told = self._callers[computation][1].rest
        counter = re.search(r'"known_induction_variable":\{"tuple_index":"(\d+)"\}', told)
        steps = re.search(r'"known_init_step":\{"init":"(-?\d+)","step":"(-?\d+)"\}', told)
        if not (counter and steps and place == int(counter[1])):
            raise LookupError("its index is no counter of a loop")
        return int(steps[1]) + turn * int(steps[2])
