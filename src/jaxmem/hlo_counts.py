"""What an optimised program computes, sends and keeps: its matrix products, collectives and largest buffers."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from jaxmem.flops import Window, convolution_flops
from jaxmem.hlo import Instruction, Program, Shape
from jaxmem.report import Buffer, Collective

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


def collectives(program: Program) -> list[Collective] | None:
    """Return what devices send each other, by kind: how often, and the bytes of the results on one device, in all.

    A TPU's asynchronous collective stands in each of the fusions that it runs beside, always with the numbers of its
    channel and its chain: it is counted once. Without a chain each line is one: all that `jax.shard_map` sends goes
    through one channel. None where some are there, and a loop does not say how often it runs.
    """
    times_of = program.executions
    sent: dict[tuple[str, str], tuple[int, int]] = {}
    for computation, instructions in program.computations.items():
        runs = 1 if times_of is None else times_of.get(computation, 0)
        for instruction in instructions:
            # In a pair of start and done the shape at the end is that of the result alone.
            kind = instruction.opcode.removesuffix("-done")
            if kind in _COLLECTIVES and runs:
                chain = re.search(r'\bchain_id="(\d+)"', instruction.rest)
                line = f"{computation}/{instruction.name}"
                channel = f"{instruction.named('channel_id')}, chain {chain[1]}" if chain else line
                n_bytes = sum(shape.item_bytes * math.prod(shape.sizes) for shape in instruction.shapes)
                sent[kind, channel] = max(sent.get((kind, channel), (0, 0)), (runs, int(runs * n_bytes)))
    if times_of is None and sent:
        return None
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in sent):
        times, n_bytes = zip(*(row for (of_kind, _), row in sent.items() if of_kind == kind), strict=True)
        rows.append(Collective(kind, sum(times), sum(n_bytes)))
    return sorted(rows, key=lambda row: -row.bytes)


def largest_buffers(program: Program, count: int) -> list[Buffer]:
    """Return the largest arrays that a program writes to the device's memory, one row per shape and operation.

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
    return sorted(rows.values(), key=lambda row: -row.bytes)[:count]


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
        here = {name: values.split("x")[i] for name, values in options.items()}
        stride, dilation, holes = (int(here.get(name, 1)) for name in ("stride", "rhs_dilate", "lhs_dilate"))
        low = int(here.get("pad", "0_0").split("_")[0])
        windows.append(Window(lhs[axis], kernel[axis], out[axis], stride, dilation, holes, low))
    return convolution_flops(out["b"] * out["f"], kernel["i"], windows)
