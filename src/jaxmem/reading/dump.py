"""What a compiler writes down while it works, in the folder named by `xla_dump_to`: read into the answer for a report.

Memory is assigned long before any code is made, so that this can be read while the compiler still works.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxmem.reading.buffer_assignment import ASSIGNMENT, Allocation, Platform, program_stem, read_assignment
from jaxmem.reading.cost import estimated_cycles
from jaxmem.reading.hlo import describe, kernel_constant_bytes, parse
from jaxmem.reading.timeline import read_schedule

# What the compilers for TPUs and for GPUs write next, once memory is assigned and the files that say how are closed: of
# GPUs' kernels the first code. A program that a TPU's compiler refuses as too big never comes so far.
_NEXT = ("*jit_call*after_optimizations_after_buffer_assignment.txt", "*jit_call*.ptx", "*jit_call*.ir-no-opt.ll")

_ASSIGNED, _GENERATED = "after_optimizations", "after_codegen"  # how the names of a program's two files end
_TOTALS = "-memory-usage-report.txt"
_ROOM = 2**20  # bytes that must be left where compilers write


def memory_is_assigned(folder: Path) -> bool:
    """Return whether the compiler has assigned memory, found that the program fits, and written all of that down."""
    return any(any(folder.glob(pattern)) for pattern in _NEXT) and any(folder.glob(f"*{ASSIGNMENT}"))


def read_dump(folder: Path, platform: Platform) -> dict[str, Any]:
    """Return the answer that a dump folder holds, for JSON, each of its files read once.

    Bytes of memory, where they are assigned; what `describe` says of the program, of none where there is none; and
    "schedule", as `read_schedule` gives it, or "no_schedule", with what is wrong. Where a TPU's compiler went to the
    end also "costs" and "untimed", as `estimated_cycles` has them.
    """
    stem = program_stem(folder)
    allocations, places = read_assignment(_text(stem + ASSIGNMENT), platform)
    program = parse(_text(stem + ".txt"))
    if allocations and (hidden := kernel_constant_bytes(program)):
        allocations[max(allocations) + 1] = Allocation(hidden, "device", "constant", None, False, "")
    answer = assigned_bytes(allocations.values()) if allocations else {}
    answer |= describe(program)
    generated = parse(_text(f"{stem.removesuffix(_ASSIGNED)}{_GENERATED}.txt"))
    cycles = estimated_cycles(generated, program) or {"step": {}}
    step = cycles.pop("step")
    answer |= cycles
    try:
        return answer | {"schedule": read_schedule(stem, allocations, places, program, step)}
    except ValueError as error:
        return answer | {"no_schedule": str(error)}


def check_complete(folder: Path) -> None:
    """Raise OSError where the files of a program's memory are cut short, as they are where their file system is full.

    What is set aside is compared with the totals that the compiler writes beside it.
    """
    check_room(folder)
    text, totals = (_text(program_stem(folder) + ending) for ending in (ASSIGNMENT, _TOTALS))
    assigned = sum(map(int, re.findall(r"^allocation \d+: size (\d+), ", text, re.MULTILINE)))
    total = sum(map(int, re.findall(r"^Total bytes: (\d+)", totals, re.MULTILINE)))
    if assigned != total:
        raise OSError(f"the compiler wrote down {assigned:,} of {total:,} bytes of memory")


def check_room(folder: Path) -> None:
    """Raise OSError where the file system of this folder is full."""
    with (folder / "room").open("wb") as file:
        file.write(bytes(_ROOM))


def _text(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def needed_bytes(error: str) -> int | None:
    """Return what a program would need, by the message of a compiler that refuses it as too big; None in any other."""
    # The compiler speaks of temporaries, and the number is of all that must fit.
    match = re.search(r"required for HLO temporaries \(([\d.]+)([KMGT])", error)
    return int(float(match[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[match[2]]) if match else None


def remedy(error: str) -> str:
    """Return what to do about a compiler's message, where it is a known one; else ""."""
    return next((words for message, words in _REMEDIES.items() if re.search(message, error)), "")


_REMEDIES = {
    "Non-hashable static arguments": (
        " All arguments of a report are traced, so that none can be static: leave static_argnums out, and close over "
        "the setting, functools.partial(fn, setting=...)."
    ),
    "cuDNN (not found|is not detected)": (
        " cuDNN's attention is not compiled for a GPU that is not here: its library comes with the GPU's software. "
        "Take another implementation for the report, or ask on the GPU itself with chip='local'."
    ),
}


def assigned_bytes(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Return bytes of arguments, outputs, what both share, temporaries, constants, and all on the host, as assigned."""
    names = ("argument", "output", "alias", "temp", "constant", "host")
    table = dict.fromkeys((f"{name}_bytes" for name in names), 0)
    for allocation in allocations:
        if allocation.space == "host":
            table["host_bytes"] += allocation.size
        elif allocation.space == "device":
            donated = allocation.kind == "argument" and allocation.is_output  # an output overwrites it
            table["argument_bytes"] += allocation.size if allocation.kind == "argument" else 0
            table["alias_bytes"] += allocation.size if donated else 0
            table["output_bytes"] += allocation.size if donated or allocation.kind == "output" else 0
            table["temp_bytes"] += allocation.size if allocation.kind == "temporaries" else 0
            table["constant_bytes"] += allocation.size if allocation.kind == "constant" else 0
    return table
