"""What a compiler writes down while it works, in the folder named by `xla_dump_to`: read into the answer for a report.

Memory is assigned long before any code is made, so that this can be read while the compiler still works.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llamem.memory.buffer_assignment import ASSIGNMENT, Allocation, Platform, program_stem, read_assignment
from llamem.memory.hlo_counts import describe

# What the compilers for TPUs and for GPUs write next, once memory is assigned and the files that say how are closed. A
# program that a TPU's compiler refuses as too big never comes so far.
_NEXT = ("*jit_call*after_optimizations_after_buffer_assignment.txt", "*jit_call*.ir-no-opt.ll")


def memory_is_assigned(folder: Path) -> bool:
    """Whether the compiler has assigned the program's memory, found that it fits, and written down how, to the end."""
    return any(any(folder.glob(pattern)) for pattern in _NEXT) and any(folder.glob(f"*{ASSIGNMENT}"))


def read_dump(folder: Path, platform: Platform) -> dict[str, Any]:
    """The answer that a dump folder holds, for JSON: bytes of memory, and what `describe` reads in the program's text.

    What the compiler did not write down is left out.
    """
    answer: dict[str, Any] = {}
    stem = program_stem(folder)
    if (assignment := Path(stem + ASSIGNMENT)).is_file():
        allocations, _ = read_assignment(assignment.read_text(), platform)
        answer |= assigned_bytes(allocations.values())
    if (program := Path(f"{stem}.txt")).is_file():
        answer |= describe(program.read_text())
    return answer


def needed_bytes(error: str) -> int | None:
    """What a program would need, in the message of a compiler that refuses it as too big; None in any other message."""
    # Older compilers say "Used"; newer ones speak of temporaries, where the number is of all that must fit.
    found = re.search(r"(?:required for HLO temporaries \(|hbm\. Used )([\d.]+)([KMGT])", error)
    return int(float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[found[2]]) if found else None


def assigned_bytes(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Bytes of arguments, outputs, what both share, temporaries, constants, and all on the host, as assigned."""
    names = ("argument", "output", "alias", "temp", "constant", "host")
    table = dict.fromkeys((f"{name}_bytes" for name in names), 0)
    for one in allocations:
        if one.space == "host":
            table["host_bytes"] += one.size
        elif one.space == "device":
            donated = one.kind == "argument" and one.is_output  # an output overwrites it
            table["argument_bytes"] += one.size if one.kind == "argument" else 0
            table["alias_bytes"] += one.size if donated else 0
            table["output_bytes"] += one.size if donated or one.kind == "output" else 0
            table["temp_bytes"] += one.size if one.kind == "temporaries" else 0
            table["constant_bytes"] += one.size if one.kind == "constant" else 0
    return table


def analysed_bytes(analysis: Any) -> dict[str, int | None]:
    """The same from JAX's `compiled.memory_analysis()`, and XLA's own peak, None where it does not say."""
    names = ("argument", "output", "alias", "temp")
    table = {f"{name}_bytes": int(getattr(analysis, f"{name}_size_in_bytes")) for name in names}
    host = {name: int(getattr(analysis, f"host_{name}_size_in_bytes")) for name in names}
    host_bytes = host["argument"] + host["output"] - host["alias"] + host["temp"]
    return table | {"host_bytes": host_bytes, "xla_peak_bytes": getattr(analysis, "peak_memory_in_bytes", None)}
