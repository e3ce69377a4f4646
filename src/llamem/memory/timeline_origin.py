"""Which operation the contents of a buffer come from, where the instruction that writes it only moves them."""

from collections.abc import Sequence

from llamem.memory.hlo import ENTRY, Instruction, Program

# Instructions of which an argument in another place, order or type is made, and nothing else.
_COPIES = ("parameter", "copy", "copy-start", "copy-done", "bitcast", "reshape", "transpose", "convert")
# Those whose first operand is what they write: in another place, order or type, or with a few changes.
_MOVES = (*_COPIES[1:], "get-tuple-element", "scatter")
_MOST_HOPS = 12


class Origins:
    """The instructions of an optimised program, to walk back from what writes a buffer to what computes its contents.

    A scan puts a layer's residual into its stack with a `dynamic-update-slice`, and compilers copy, reshape and fuse:
    the interesting operation is the one before.
    """

    def __init__(self, program: Program):
        self._computations = program.computations
        self._by_name = {line.name: line for lines in program.computations.values() for line in lines}

    def named(self, name: str) -> Instruction:
        """Return the instruction of this name; an empty one where the program's text has none."""
        return self._by_name.get(name) or Instruction(name, (), "", (), "")

    def argument_of(self, line: Instruction) -> int | None:
        """Return the number of the program's argument of which the line is a copy, or which it casts; else None."""
        for _ in range(_MOST_HOPS):
            if line.opcode == "parameter":
                return int(line.operands[0]) if line in self._computations[ENTRY] else None
            inside = self._computations.get(line.named("calls"), ()) if line.opcode == "fusion" else (line,)
            if not inside or len(line.operands) != 1 or not {one.opcode for one in inside} <= {*_COPIES}:
                return None
            line = self.named(line.operands[0])
        return None

    def of(self, value: str) -> Instruction:
        """Return what computes a value such as "fusion.3{1}"; its own instruction where nothing tells more."""
        name, _, index = value.rstrip("}").partition("{")
        passed: dict[str, str] = {}  # what the fusion that the walk is in is given for each of its parameters
        line = own = self.named(name)
        for _ in range(_MOST_HOPS):
            if line.opcode == "parameter" and line.name in passed:
                following = passed[line.name]
            elif inside := self._moved_inside(line):
                root = inside[-1]
                passed = {one.name: line.operands[int(one.operands[0])] for one in inside if one.opcode == "parameter"}
                number = int(index) if index.isdigit() else 0
                following = root.operands[number] if root.opcode == "tuple" else root.name
            elif line.opcode == "dynamic-update-slice":
                following = line.operands[1]
            elif line.opcode in _MOVES and line.operands[0] in self._by_name:
                following = line.operands[0]
            else:
                break
            line, index = self.named(following), ""
        return line if line.path else own

    def _moved_inside(self, line: Instruction) -> Sequence[Instruction]:
        """Return the instructions inside a fusion that only moves, or does not say itself what it computes."""
        moves = "dynamic_update_slice" in line.rest or "dynamic-update-slice" in line.name
        is_told = line.path and not moves
        return () if line.opcode != "fusion" or is_told else self._computations.get(line.named("calls"), ())
