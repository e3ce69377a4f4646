"""The one reader of XLA's buffer assignment: the pieces of memory that a program is given, and what lies where in them.

A compiler writes it into `*-buffer-assignment.txt` of the folder named by `xla_dump_to`, long before it makes any code.
"""

import dataclasses
import re
from pathlib import Path
from typing import Literal

Platform = Literal["cpu", "tpu", "cuda"]
Space = Literal["device", "on-chip", "host"]
AllocationKind = Literal["argument", "constant", "output", "temporaries", "thread"]

_HOST = 5  # of XLA's memory spaces: 0 is the device's memory, 1 a TPU's on-chip memory, 5 the host's
ASSIGNMENT = "-buffer-assignment.txt"


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory in one piece: an argument's, a constant's, an output's, or the one that all temporaries share.

    `parameter` is the number of the argument that lies in it; `is_output`: it holds a result when the program ends, in
    place of a donated argument, too. `shape` is the argument's, "" of others. A "thread" is what calls within the
    program pass to each other: no memory of its own.
    """

    size: int
    space: Space
    kind: AllocationKind
    parameter: int | None
    is_output: bool
    shape: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value lies. `phi`: it is where ways meet, a loop's argument or result."""

    name: str
    allocation: int
    offset: int
    size: int
    shape: str
    phi: bool


def program_stem(folder: Path) -> str:
    """Return the path that the files of the largest program in a dump begin with; "" where there is none."""
    for ending in (ASSIGNMENT, ".txt"):  # an old compiler may write its program alone
        if files := sorted(folder.glob(f"*after_optimizations{ending}"), key=lambda file: file.stat().st_size):
            return str(files[-1]).removesuffix(ending)
    return ""


def read_assignment(text: str, platform: Platform) -> tuple[dict[int, Allocation], dict[int, Place]]:
    """Return allocations by their number, and the places of values by the value's number."""
    allocations: dict[int, Allocation] = {}
    places: dict[int, Place] = {}
    number = -1
    for line in text.splitlines():
        if found := re.match(r"allocation (\d+): size (\d+), (.*)", line):
            number = int(found[1])
            allocations[number] = _allocation(int(found[2]), found[3], platform)
        elif found := re.match(r" value: <(\d+) (\S+)( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)", line):
            shape = re.sub(r"\{[^}]*\}", "", found[6])
            places[int(found[1])] = Place(found[2], number, int(found[5]), int(found[4]), shape, bool(found[3]))
    return allocations, places


def _allocation(size: int, words: str, platform: Platform) -> Allocation:
    color, parameter = re.search(r"\bcolor (\d+)", words), re.search(r"\bparameter (\d+)", words)
    shape = re.search(r"shape \|([^|]*)\|", words)
    is_output = "maybe-live-out" in words
    if parameter:
        kind: AllocationKind = "argument"
    elif "constant" in words:
        kind = "constant"
    elif "thread-local" in words:
        kind = "thread"
    else:
        kind = "output" if is_output else "temporaries"
    number = int(parameter[1]) if parameter else None
    space = _space(int(color[1]) if color else 0, platform)
    return Allocation(size, space, kind, number, is_output, shape[1] if shape else "")


def _space(color: int, platform: Platform) -> Space:
    if color == _HOST:
        return "host"
    # A GPU's compiler has colors of its own for memory that is the device's all the same.
    return "device" if color == 0 or platform == "cuda" else "on-chip"
