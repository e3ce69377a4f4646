"""Counting in an optimised program's text: its matrix products and collectives, those in loops as often as they run."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|called_computations|true_computation|false_computation)=\{?([^,}\s]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of an optimised program: `name = shape opcode(operands), rest`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str


def compiled_matmul_flops(text: str) -> int | None:
    """FLOPs of the matrix products that the compiler left in its program.

    Dots, the convolutions that TPUs make of them, and calls of cuBLAS. Not seen: Pallas and cuDNN kernels, and products
    with vectors that became sums. Of a conditional every branch counts. None for no text, or where a loop does not say
    how often it runs.
    """
    program = _parse(text)
    times = _executions(program)
    if not program or times is None:
        return None
    total = 0
    for computation, instructions in program.items():
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        total += times.get(computation, 0) * sum(_flops(instruction, shapes) for instruction in instructions)
    return total


def collectives(text: str) -> list[dict]:
    """What the devices say to each other: rows of operation, times run, bytes of the results on one device, in all."""
    program = _parse(text)
    times = _executions(program) or {}
    rows: dict[str, dict] = {}
    for computation, instructions in program.items():
        for instruction in instructions:
            # An asynchronous one is counted where it is done: there its shape is that of its result alone.
            kind, runs = instruction.opcode.removesuffix("-done"), times.get(computation, 0)
            if kind in _COLLECTIVES and runs:
                n_bytes = sum(item_bytes(dtype) * math.prod(sizes) for dtype, sizes in _arrays(instruction.shape))
                row = rows.setdefault(kind, {"operation": kind, "times": 0, "bytes": 0})
                row["times"] += runs
                row["bytes"] += int(runs * n_bytes)
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def item_bytes(dtype: str) -> float:
    """Bytes of one element of an HLO type such as "bf16", "f8e4m3fn" or "pred"."""
    if dtype in ("pred", "token"):
        return float(dtype == "pred")
    bits = int(re.sub(r"\D", "", dtype.split("e")[0]) or 8)
    return bits / 8


def _parse(text: str) -> dict[str, list[Instruction]]:
    program: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            current = program.setdefault("ENTRY" if line.startswith("ENTRY") else start[1], [])
        elif found := _INSTRUCTION.match(line):
            inside, _, rest = found[5].partition(")")
            current.append(Instruction(found[2], found[3], found[4], _operands(inside), rest))
    return program


def _operands(inside: str) -> tuple[str, ...]:
    """Names of operands; of a constant, its text."""
    return tuple(re.findall(r"%([\w.\-]+)", inside)) or (inside,)


def _executions(program: dict[str, list[Instruction]]) -> dict[str, int] | None:
    times: dict[str, int] = defaultdict(int)
    waiting = [("ENTRY", 1)]
    while waiting:
        computation, runs = waiting.pop()
        times[computation] += runs
        for instruction in program.get(computation, ()):
            called = [name.strip("%") for name in _CALLED.findall(instruction.rest)]
            for branches in _BRANCHES.findall(instruction.rest):
                called += [name.strip(" %") for name in branches.split(",")]
            trips = _trip_count(instruction, program) if instruction.opcode == "while" else 1
            if trips is None:
                return None
            waiting += [(name, runs * trips) for name in called]
    return times


def _trip_count(loop: Instruction, program: dict[str, list[Instruction]]) -> int | None:
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    # The TPU compiler does not say, but its condition does: JAX's scans count from 0, by 1, while below a constant.
    condition = re.search(r"\bcondition=%?([\w.\-]+)", loop.rest)
    lines = program.get(condition[1], []) if condition else []
    constants = {line.name: line.operands[0] for line in lines if line.opcode == "constant"}
    bounds = [constants.get(line.operands[-1]) for line in lines if "direction=LT" in line.rest]
    return int(bounds[0]) if len(bounds) == 1 and bounds[0] is not None else None


def _flops(instruction: Instruction, shapes: dict[str, str]) -> int:
    if instruction.opcode == "dot":
        contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    elif instruction.opcode == "custom-call" and "__cublas$" in instruction.rest:
        contracting = re.search(r'"lhs_contracting_dimensions":\[([\d,"]*)\]', instruction.rest)
    elif instruction.opcode == "convolution":
        return _convolution_flops(instruction, shapes)
    else:
        return 0
    _, out = next(_arrays(instruction.shape))
    _, lhs = next(_arrays(shapes[instruction.operands[0]]))
    axes = [int(axis) for axis in re.findall(r"\d+", contracting[1] if contracting else "")]
    return 2 * math.prod(out) * math.prod(lhs[axis] for axis in axes)


def _convolution_flops(instruction: Instruction, shapes: dict[str, str]) -> int:
    (_, out), (_, lhs), (_, kernel) = (
        next(_arrays(shape)) for shape in (instruction.shape, *(shapes[name] for name in instruction.operands[:2]))
    )
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    assert labels, instruction
    lhs_of, kernel_of, out_of = (
        dict(zip(names, sizes, strict=True)) for names, sizes in zip(labels.groups(), (lhs, kernel, out), strict=True)
    )
    window = {
        name: values.split("x")
        for name, values in re.findall(r"(\w+)=([\dx_\-]+)", _inside(instruction.rest, "window={", "}"))
    }
    products = out_of["b"] * out_of["f"] * kernel_of["i"]
    for i, axis in enumerate(sorted(name for name in lhs_of if name.isdigit())):
        option = lambda name, default, i=i: window[name][i] if name in window else default  # noqa: E731
        stride, dilate = int(option("stride", "1")), int(option("rhs_dilate", "1"))
        low = int(option("pad", "0_0").split("_")[0])
        # Batches of matrix products become convolutions over a spatial axis full of holes: only what meets data counts.
        positions = np.arange(out_of[axis])[:, None] * stride + np.arange(kernel_of[axis]) * dilate - low
        holes = int(option("lhs_dilate", "1"))
        products *= int(np.sum((positions >= 0) & (positions <= (lhs_of[axis] - 1) * holes) & (positions % holes == 0)))
    groups = re.search(r"batch_group_count=(\d+)", instruction.rest)
    return 2 * products // (int(groups[1]) if groups else 1)


def _inside(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def _arrays(shape: str) -> Iterator[tuple[str, list[int]]]:
    for dtype, sizes in _SHAPE.findall(shape):
        yield dtype, [int(size) for size in sizes.split(",") if size]
