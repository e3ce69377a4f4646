"""The one reader of HLO text, which compilers write: a program as computations of instructions, each with its line.

From it come what an optimised program computes, sends and keeps: matrix products, collectives, largest buffers.
"""

import dataclasses
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import jax

from jaxmem.common.printing import line_of_source
from jaxmem.tracing.flops import Window, convolution_flops

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
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""

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
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    @property
    def operation(self) -> str:
        """The end of its path, "while/body/dot_general", or ""."""
        ours = re.compile(r"jit\((call|fn|flat)\)|call_exported|closed_call")
        return "/".join([part for part in self.path.split("/") if not ours.fullmatch(part)][-4:])


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, the first one to run under `ENTRY`; the tables that say which line made what; for how many
    devices it is one program.
    """

    computations: dict[str, list[Instruction]]
    tables: dict[str, dict[int, str]]
    devices: int = 1

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
        # The TPU compiler does not say, but JAX's scans show it: they count by 1 while below a constant, from 0,
        # or from 1 where the first turn was taken out of the loop.
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
        if start is None or not _constant(start).isdigit() or step is None or step.opcode != "add":
            return None
        operands = [_origin(body, name) for name in step.operands]
        added = {(line.named("index"), _constant(line)) for line in operands if line}
        turns = max(int(_constant(bound)) - int(_constant(start)), 0)
        return turns if added == {(place, ""), ("", "1")} else None

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
        elif match := _INSTRUCTION.match(line):
            name, shapes, opcode, after = match.groups()
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
    partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
    return Program(computations, tables, int(partitions[1]) if partitions else 1)


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
    instruction = next((line for line in lines if line.name == name), None)
    if instruction is not None and instruction.opcode == "copy":
        return _origin(lines, instruction.operands[0])
    return instruction


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


_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Names for memory that another line already counts, or that is none.
_NO_BUFFER = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional", "constant", "opt-barrier"}

_CPU_KERNEL = '"fusion_config":{"kind":"__'


def describe(program: Program, largest: int = 12) -> dict[str, Any]:
    """Return all that a report says of an optimised program, for JSON: FLOPs, collectives and the `largest` buffers."""
    sent = collectives(program)
    return {
        "compiled_matmul_flops": compiled_matmul_flops(program),
        "collectives": None if sent is None else [dataclasses.asdict(row) for row in sent],
        "buffers": [dataclasses.asdict(row) for row in largest_buffers(program, largest)],
        "kernel_array_bytes": max((size for _, size in _inside_cpu_kernels(program)), default=0),
    }


def kernel_constant_bytes(program: Program) -> int:
    """Return the bytes of constants that a CPU's fused kernels hold: they have no allocation of their own."""
    return sum(size for line, size in _inside_cpu_kernels(program) if line.opcode == "constant")


def _inside_cpu_kernels(program: Program) -> Iterator[tuple[Instruction, int]]:
    """Yield what is made and held inside of the CPU's fused kernels, and its bytes; not what they are given or return.

    They come from XNNPACK's successor, YNN: a product and what follows it in one call, since jax 0.10.
    """
    lines = [line for instructions in program.computations.values() for line in instructions]
    called = {line.named("calls") for line in lines if line.opcode == "fusion" and _CPU_KERNEL in line.rest}
    for name in called:
        for line in program.computations.get(name, [])[:-1]:
            if line.opcode != "parameter":
                yield line, int(sum(math.prod(shape.sizes) * shape.item_bytes for shape in line.shapes))


def compiled_matmul_flops(program: Program) -> int | None:
    """Count the FLOPs of the matrix products that the compiler left, those in loops as often as they run.

    Dots, convolutions (also those that TPUs make of dots), and calls of cuBLAS and of cuDNN's convolutions. Not seen:
    the kernels of Pallas and of attention, and products with vectors that became sums. Of a conditional every branch
    counts. None for no program, or where a loop does not say how often it runs.
    """
    times = program.executions
    if not program.computations or times is None:
        return None
    total = 0
    for computation, instructions in program.computations.items():
        shapes = {instruction.name: instruction.shapes for instruction in instructions}
        total += times.get(computation, 0) * sum(_flops(instruction, shapes) for instruction in instructions)
    return total


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array that the compiled program writes to the device's memory: `bf16[16,8192]`, the operation of JAX's that it
    is the result of, and the line that asked for it, `model.py:12` or "".

    `at_once`: how many of this shape and operation lie in memory at the same time, at most; None where the compiler
    wrote down no schedule, or the array is written where another lies.
    """

    shape: str
    bytes: int
    operation: str
    source: str
    at_once: int | None = None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of messages between chips: "all-gather", how many, and the bytes of all their results on one chip.

    `arriving`: the bytes that reach one chip, where they go round rings of the chips that take part. Of n chips that
    gather a result of b bytes, b (n - 1) / n; that sum and scatter, of which b are left, b (n - 1); that sum, and all
    have the whole, twice the first. None in an answer from where nobody counted it.
    """

    operation: str
    times: int
    bytes: int
    arriving: int | None = None


def collectives(program: Program) -> list[Collective] | None:
    """Return what devices send each other, by kind: how often, and the bytes of the results on one device, in all.

    A TPU's asynchronous collective stands in each of the fusions that it runs beside, always with the numbers of its
    channel and its chain: it is counted once. Without a chain each line is one: all that `jax.shard_map` sends goes
    through one channel. None where some are there, and a loop does not say how often it runs.
    """
    times_of = program.executions
    sent: dict[tuple[str, str], tuple[int, int, int]] = {}
    for computation, instructions in program.computations.items():
        runs = 1 if times_of is None else times_of.get(computation, 0)
        by_name = {instruction.name: instruction for instruction in instructions}
        for instruction in instructions:
            # In a pair of start and done the shape at the end is that of the result alone.
            kind = instruction.opcode.removesuffix("-done")
            if kind in _COLLECTIVES and runs:
                chain = re.search(r'\bchain_id="(\d+)"', instruction.rest)
                line = f"{computation}/{instruction.name}"
                channel = f"{instruction.named('channel_id')}, chain {chain[1]}" if chain else line
                shapes, last = instruction.shapes, instructions[-1]
                if kind == "all-reduce" and last.opcode == "dynamic-slice" and last.operands[0] == instruction.name:
                    kind, shapes = "reduce-scatter", last.shapes  # a TPU's kernel: nothing but the slice is written
                n_bytes = sum(shape.item_bytes * math.prod(shape.sizes) for shape in shapes)
                start = by_name.get(instruction.operands[0]) if instruction.opcode.endswith("-done") else instruction
                arriving = n_bytes * _share_arriving(kind, _chips_taking_part(start or instruction, program.devices))
                found = runs, int(runs * n_bytes), int(runs * arriving)
                sent[kind, channel] = max(sent.get((kind, channel), (0, 0, 0)), found)
    if times_of is None and sent:
        return None
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in sent):
        columns = zip(*(row for (of_kind, _), row in sent.items() if of_kind == kind), strict=True)
        rows.append(Collective(kind, *(sum(column) for column in columns)))
    return sorted(rows, key=lambda row: -row.bytes)


def _share_arriving(kind: str, chips: int) -> float:
    """Return the bytes that reach a chip for each byte of a collective's result on it."""
    shares = {"all-reduce": 2 * (chips - 1) / chips, "reduce-scatter": chips - 1, "collective-permute": 1}
    return shares.get(kind, (chips - 1) / chips)


def _chips_taking_part(instruction: Instruction, all_of_them: int) -> int:
    """Return how many chips a collective is among, which it writes as "{{0,1},{2,3}}", "[2,2]<=[4]" or "{}"."""
    if first := re.search(r"replica_groups=\{\{([\d,]+)\}", instruction.rest):
        return first[1].count(",") + 1
    counts = re.search(r"replica_groups=\[\d+,(\d+)\]", instruction.rest)
    return int(counts[1]) if counts else all_of_them


def largest_buffers(program: Program, count: int) -> list[Buffer]:
    """Return the largest arrays that a program writes to the device's memory, one row per shape and operation.

    Arrays of layers that differ by a number in their operation alone are one row: `blocks_*/dot_general`.

    What happens inside a fusion or a reduction stays in registers, and what lies in on-chip memory or in the host's is
    not the device's: none of these counts.
    """
    lines = [line for instructions in program.computations.values() for line in instructions]
    # Bodies of loops and branches are computations too, but what they write stays.
    inner = {name for line in lines for name in (line.named("calls"), line.named("to_apply"))}
    rows: dict[tuple[str, str], Buffer] = {}
    for computation, instructions in program.computations.items():
        for line in instructions if computation not in inner else ():
            if line.opcode in _NO_BUFFER or line.opcode.endswith(("-start", "-done")):
                continue
            operation, source = line.operation or line.opcode, program.source(line)
            for shape in line.shapes:  # a fusion may write several arrays
                if shape.memory_space == 0:
                    n_bytes = int(math.prod(shape.sizes) * shape.item_bytes)
                    rows.setdefault((str(shape), operation), Buffer(str(shape), n_bytes, operation, source))
    return sorted(of_layers_once(rows.values()), key=lambda row: -row.bytes)[:count]


def unnumbered(operation: str) -> str:
    """Return an operation's name with a star in the place of each number, so that layers have one."""
    return re.sub(r"\d+", "*", operation)


def of_layers_once(rows: Iterable[Buffer]) -> list[Buffer]:
    """Return the rows with those of layers, equal but for numbers in their operation, as one."""
    alike: dict[tuple[str, str], Buffer] = {}
    for row in rows:
        first = alike.setdefault((row.shape, unnumbered(row.operation)), row)
        if first.operation != row.operation:
            alike[row.shape, unnumbered(row.operation)] = dataclasses.replace(
                first, operation=unnumbered(row.operation)
            )
    return list(alike.values())


def _flops(instruction: Instruction, shapes: dict[str, tuple[Shape, ...]]) -> int:
    if instruction.opcode == "dot":
        contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    elif instruction.opcode == "custom-call" and "__cublas$" in instruction.rest:
        contracting = re.search(r'"lhs_contracting_dimensions":\[([\d,"]*)\]', instruction.rest)
    elif instruction.opcode == "convolution" or "__cudnn$conv" in instruction.rest:
        return _convolution_flops(instruction, shapes)
    else:
        return 0
    out, lhs = instruction.shapes[0].sizes, shapes[instruction.operands[0]][0].sizes
    axes = [int(axis) for axis in re.findall(r"\d+", contracting[1] if contracting else "")]
    return 2 * math.prod(out) * math.prod(lhs[axis] for axis in axes)


def _convolution_flops(instruction: Instruction, shapes: dict[str, tuple[Shape, ...]]) -> int:
    first, second = (shapes[name][0].sizes for name in instruction.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    assert labels, instruction
    result = instruction.shapes[0].sizes
    if "__cudnn$convBackwardInput" in instruction.rest:  # cuDNN writes a gradient with the labels of its convolution
        sizes = (result, second, first)
    elif "__cudnn$convBackwardFilter" in instruction.rest:
        sizes = (first, result, second)
    else:
        sizes = (first, second, result)
    arrays = zip(labels.groups(), sizes, strict=True)
    lhs, kernel, out = (dict(zip(names, sizes, strict=True)) for names, sizes in arrays)
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    options = dict(re.findall(r"(\w+)=([\dx_\-]+)", window[1] if window else ""))
    windows = []
    for i, axis in enumerate(sorted(name for name in lhs if name.isdigit())):
        axis_options = {name: values.split("x")[i] for name, values in options.items()}
        stride, dilation, holes = (int(axis_options.get(name, 1)) for name in ("stride", "rhs_dilate", "lhs_dilate"))
        low = int(axis_options.get("pad", "0_0").split("_")[0])
        windows.append(Window(lhs[axis], kernel[axis], out[axis], stride, dilation, holes, low))
    return convolution_flops(out["b"] * out["f"], kernel["i"], windows)
