"""Reading what a compiler made: its memory table, the largest buffers in it and who asked for them."""

import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax

from llamem.memory.hlo_counts import collectives, compiled_matmul_flops, item_bytes
from llamem.memory.show import line_of_source

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# Names for memory that another line already counts, or that is none.
_NO_BUFFER = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional", "constant", "opt-barrier"}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")


def optimised_text(compiled: Any) -> str:
    """The optimised program as text; "" where XLA cannot print it (seen with some TPU programs, libtpu 0.0.51)."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return ""


def describe(text: str, largest: int = 12) -> dict[str, Any]:
    """What an optimised program computes and sends, and its `largest` buffers: shape, bytes, operation, source line."""
    return {
        "compiled_matmul_flops": compiled_matmul_flops(text),
        "collectives": collectives(text),
        "buffers": largest_buffers(text, largest),
    }


def largest_buffers(text: str, count: int) -> list[dict[str, Any]]:
    """The largest arrays that an optimised program writes to memory, one row per shape and operation.

    What happens inside a fusion stays in registers, and layouts marked `S(1)` live in a TPU's
    on-chip memory, `S(5)` in the host's: none of these counts.
    """
    tables = {name: dict(_table(text, name)) for name in _TABLES}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in _lines_outside_fusions(text):
        match = _INSTRUCTION.match(line)
        if match is None or match[2] in _NO_BUFFER or match[2].endswith(("-start", "-done")):
            continue
        operation, source = _operation(line) or match[2], _source(line, tables)
        for dtype, sizes, layout in _SHAPE.findall(match[1]):  # a fusion may write several arrays
            if re.search(r"S\([1-9]", layout):
                continue
            n_bytes = math.prod(int(size) for size in sizes.split(",") if size) * item_bytes(dtype)
            row = {"shape": f"{dtype}[{sizes}]", "bytes": n_bytes, "operation": operation, "source": source}
            rows.setdefault((row["shape"], operation), row)
    return sorted(rows.values(), key=lambda row: -row["bytes"])[:count]


def _lines_outside_fusions(text: str) -> Iterator[str]:
    # Bodies of fusions and of reductions; loop bodies are named by `body=` and stay.
    inner = set(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", text))
    inside = False
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            inside = line.split("(")[0].strip().lstrip("%") in inner
        elif not inside:
            yield line


def _operation(line: str) -> str:
    match = re.search(r'op_name="([^"]*)"', line)
    if match is None:
        return ""
    parts = [
        part
        for part in match[1].split("/")
        if not re.fullmatch(r"jit\((call|fn|flat)\)|call_exported|closed_call", part)
    ]
    return "/".join(parts[-4:])


def _source(line: str, tables: dict[str, dict[int, str]]) -> str:
    if direct := re.search(r'source_file="([^"]*)" source_line=(\d+)', line):
        return line_of_source(direct[1], int(direct[2]))
    frame = re.search(r"stack_frame_id=(\d+)", line)
    if frame is None:
        return ""
    location = _field(tables["StackFrames"].get(int(frame[1]), ""), "file_location_id")
    place = tables["FileLocations"].get(location, "")
    file = tables["FileNames"].get(_field(place, "file_name_id"), "").strip('"')
    own = not file or os.path.basename(file) == "compiler_process.py"
    return "" if own else line_of_source(file, _field(place, "line"))  # which only compiled it


def _field(entry: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", entry)
    return int(match[1]) if match else 0


def _table(text: str, name: str) -> Iterator[tuple[int, str]]:
    start = text.find(f"\n{name}\n")
    for line in text[start + len(name) + 2 :].splitlines() if start >= 0 else ():
        number, _, entry = line.partition(" ")
        if not number.isdigit():
            return
        yield int(number), entry
