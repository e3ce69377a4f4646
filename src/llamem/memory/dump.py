"""What a compiler writes down while it works, in the folder named by `xla_dump_to`: read into the answer for a report.

Memory is assigned long before any code is made, so that this can be read while the compiler still works.
"""

import re
from pathlib import Path
from typing import Any

from llamem.memory.hlo_counts import describe

_ASSIGNMENT = "*jit_call*after_optimizations-buffer-assignment.txt"
_PROGRAM = "*jit_call*after_optimizations.txt"
# What the compilers for TPUs and for GPUs write next, once the files above are closed. A program that a TPU's compiler
# refuses as too big never comes so far.
_NEXT = ("*jit_call*after_optimizations_after_buffer_assignment.txt", "*jit_call*.ir-no-opt.ll")
_HOST = 5  # of the memory spaces: 0 is the device's memory, 1 on-chip memory, 5 the host's


def memory_is_assigned(folder: Path) -> bool:
    """Whether the compiler has assigned the program's memory, found that it fits, and written down how, to the end."""
    return any(any(folder.glob(pattern)) for pattern in _NEXT) and any(folder.glob(_ASSIGNMENT))


def read_dump(folder: Path) -> dict[str, Any]:
    """The answer that a dump folder holds, for JSON: bytes of memory, and what `describe` reads in the program's text.

    What the compiler did not write down is left out.
    """
    answer: dict[str, Any] = {}
    if (file := next(folder.glob(_ASSIGNMENT), None)) is not None:
        answer |= assigned_bytes(file.read_text())
    if (file := next(folder.glob(_PROGRAM), None)) is not None:
        answer |= describe(file.read_text())
    return answer


def needed_bytes(error: str) -> int | None:
    """What a program would need, in the message of a compiler that refuses it as too big; None in any other message."""
    # Older compilers say "Used"; newer ones speak of temporaries, where the number is of all that must fit.
    found = re.search(r"(?:required for HLO temporaries \(|hbm\. Used )([\d.]+)([KMGT])", error)
    return int(float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[found[2]]) if found else None


def assigned_bytes(text: str) -> dict[str, int]:
    """Bytes of arguments, outputs, what both share, temporaries, and all on the host, in a buffer assignment."""
    table = dict.fromkeys(("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "host_bytes"), 0)
    for size, kind in re.findall(r"^allocation \d+: size (\d+), (.*)$", text, re.MULTILINE):
        n_bytes = int(size)
        space = re.search(r"\bcolor (\d+)", kind)
        if space is not None:
            table["host_bytes"] += n_bytes if int(space[1]) == _HOST else 0
        elif "parameter " in kind:
            table["argument_bytes"] += n_bytes
            if "maybe-live-out" in kind:  # a donated argument, which an output overwrites
                table["alias_bytes"] += n_bytes
                table["output_bytes"] += n_bytes
        elif "maybe-live-out" in kind:
            table["output_bytes"] += n_bytes
        elif "preallocated-temp" in kind:
            table["temp_bytes"] += n_bytes
    return table


def analysed_bytes(analysis: Any) -> dict[str, int]:
    """The same from JAX's `compiled.memory_analysis()`."""
    names = ("argument", "output", "alias", "temp")
    table = {f"{name}_bytes": int(getattr(analysis, f"{name}_size_in_bytes")) for name in names}
    host = {name: int(getattr(analysis, f"host_{name}_size_in_bytes")) for name in names}
    return table | {"host_bytes": host["argument"] + host["output"] - host["alias"] + host["temp"]}
