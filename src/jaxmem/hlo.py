"""The one reader of HLO text, which compilers write: a program as computations of instructions, each with its line."""

import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax

from jaxmem.printing import line_of_source

ENTRY = "ENTRY"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|called_computations|true_computation|false_computation)=\{?([^,}\s]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's type: "bf16", its sizes, and its layout in braces, "{1,0:T(8,128)S(5)}", or ""."""

    dtype: str
    sizes: tuple[int, ...]
    layout: str = ""

    @property
    def item_bytes(self) -> float:
        """Bytes of one element; of a type such as "s4" half a byte, of "f8e4m3fn" one."""
        if self.dtype in ("pred", "token"):
            return float(self.dtype == "pred")
        return int(re.sub(r"\D", "", self.dtype.split("e")[0]) or 8) / 8

    @property
    def memory_space(self) -> int:
        """Where it lies: 0 in the device's memory, 1 in a TPU's on-chip memory, 5 in the host's."""
        space = re.search(r"S\((\d+)\)", self.layout)
        return int(space[1]) if space else 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program: `name = shapes opcode(operands), rest`; several shapes where the result is a tuple."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]  # names; of a constant, its text
    rest: str

    def named(self, attribute: str) -> str:
        """Return the word after `attribute=`; "" where the line has no such thing."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs, every branch of a conditional among them."""
        names = [name.strip("%") for name in _CALLED.findall(self.rest)]
        for branches in _BRANCHES.findall(self.rest):
            names += [name.strip(" %") for name in branches.split(",")]
        return names

    @property
    def path(self) -> str:
        """The path that JAX gave it, `op_name`, or ""."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def operation(self) -> str:
        """The end of its path, "while/body/dot_general", or ""."""
        ours = re.compile(r"jit\((call|fn|flat)\)|call_exported|closed_call")
        return "/".join([part for part in self.path.split("/") if not ours.fullmatch(part)][-4:])


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, the first one to run under `ENTRY`; and the tables that say which line made what."""

    computations: dict[str, list[Instruction]]
    tables: dict[str, dict[int, str]]

    @cached_property
    def executions(self) -> dict[str, int] | None:
        """How often each computation runs; None where a loop does not say how often its body does."""
        times: dict[str, int] = defaultdict(int)
        waiting = [(ENTRY, 1)]
        while waiting:
            computation, runs = waiting.pop()
            times[computation] += runs
            for instruction in self.computations.get(computation, ()):
                trips = self.trip_count(instruction) if instruction.opcode == "while" else 1
                if trips is None:
                    return None
                waiting += [(name, runs * trips) for name in instruction.called]
        return times

    def trip_count(self, loop: Instruction) -> int | None:
        """Return how often a `while` runs its body, or None."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        # The TPU compiler does not say, but JAX's scans show it: they count from 0, by 1, while below a constant.
        condition, body = (self.computations.get(loop.named(name), []) for name in ("condition", "body"))
        around = next((lines for lines in self.computations.values() if loop in lines), [])
        compared = [line.operands for line in condition if "direction=LT" in line.rest]
        if len(compared) != 1 or not body:
            return None
        counter, bound = (_origin(condition, name) for name in compared[0])
        place = counter.named("index") if counter else ""
        if not place or bound is None or not _constant(bound).isdigit():
            return None
        start, step = _element(around, loop.operands[0], int(place)), _element(body, body[-1].name, int(place))
        if start is None or _constant(start) != "0" or step is None or step.opcode != "add":
            return None
        added = {(line.named("index"), _constant(line)) for name in step.operands if (line := _origin(body, name))}
        return int(_constant(bound)) if added == {(place, ""), ("", "1")} else None

    def source(self, instruction: Instruction) -> str:
        """Return the line of Python that asked for it, `file.py:12`, or ""."""
        if direct := re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.rest):
            return line_of_source(direct[1], int(direct[2]))
        frame = instruction.named("stack_frame_id")
        location = _field(self.tables["StackFrames"].get(int(frame or 0), ""), "file_location_id")
        place = self.tables["FileLocations"].get(location, "")
        file = self.tables["FileNames"].get(_field(place, "file_name_id"), "").strip('"')
        only_compiled = not file or os.path.basename(file) == "compiler_process.py"
        return "" if only_compiled else line_of_source(file, _field(place, "line"))


def parse(text: str) -> Program:
    """Read a program; an empty text is one without computations."""
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    instructions: list[Instruction] = []
    types: dict[str, str] = {}
    table: dict[int, str] = {}
    for line in text.splitlines():
        number, _, entry = line.partition(" ")
        if line in tables:
            table = tables[line]
        elif number.isdigit():
            table[int(number)] = entry
        elif start := _COMPUTATION.match(line):
            instructions = computations.setdefault(ENTRY if line.startswith(ENTRY) else start[1], [])
        elif found := _INSTRUCTION.match(line):
            name, shapes, opcode, after = found.groups()
            inside, _, rest = after.partition(")")
            operands = tuple(re.findall(r"%([\w.\-#]+)", inside)) or (inside,)
            # libtpu 0.0.52 writes "%loop#2" where others first have a line that takes the element out: here it is.
            for operand in (operand for operand in operands if "#" in operand and operand not in types):
                whole, _, place = operand.rpartition("#")
                types[operand] = list(_elements(types[whole]))[int(place)]
                shape = tuple(_shapes(types[operand]))
                instructions.append(Instruction(operand, shape, "get-tuple-element", (whole,), f", index={place}"))
            types[name] = shapes
            instructions.append(Instruction(name, tuple(_shapes(shapes)), opcode, operands, rest))
    return Program(computations, tables)


def aliased_arguments(text: str) -> list[Shape]:
    """Return types and shapes of the arguments whose memory a program's results take over."""
    table = re.search(r"input_output_alias=\{(.*?\)) \}", text)
    numbers = set(re.findall(r"\((\d+), \{", table[1])) if table else set()
    lines = [line for line in parse(text).computations.get(ENTRY, []) if line.opcode == "parameter"]
    return [line.shapes[0] for line in lines if line.operands[0] in numbers]


def optimised_text(compiled: Any) -> str:
    """Return the optimised program as text; "" where XLA cannot print it (some TPU programs, libtpu 0.0.51)."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return ""


def _origin(lines: list[Instruction], name: str) -> Instruction | None:
    """Return the instruction of this name; where it copies another one, that one."""
    found = next((line for line in lines if line.name == name), None)
    return _origin(lines, found.operands[0]) if found is not None and found.opcode == "copy" else found


def _element(lines: list[Instruction], name: str, place: int) -> Instruction | None:
    """Return what stands at a place of the tuple of this name; None where that is no tuple."""
    whole = _origin(lines, name)
    return _origin(lines, whole.operands[place]) if whole is not None and whole.opcode == "tuple" else None


def _constant(line: Instruction) -> str:
    """Return the text of a constant, or ""."""
    return line.operands[0] if line.opcode == "constant" else ""


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, sizes, layout in _SHAPE.findall(text):
        yield Shape(dtype, tuple(int(size) for size in sizes.split(",") if size), layout)


def _elements(type_of_tuple: str) -> Iterator[str]:
    """Yield the types in one such as "(s32[], (f32[8]{0:T(8,128)}, u32[]))": here two."""
    depth, start = 0, 1
    for end, letter in enumerate(type_of_tuple):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            yield type_of_tuple[start:end].strip()
            start = end + 1


def _field(entry: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", entry)
    return int(match[1]) if match else 0
