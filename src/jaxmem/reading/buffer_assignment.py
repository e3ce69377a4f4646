"""XLA's buffer assignment as it is dumped: allocations, and the times between which each value lives.

A compiler writes it into `*-buffer-assignment.txt` of the folder named by `xla_dump_to`, long before it makes any code.

With `xla_dump_to` a compiler leaves three files beside the optimised program: `-live-range.txt` (the schedule, bodies
of loops in line, and the steps between which each position of a value is alive), `-buffer-assignment.txt` (allocations,
and the place of each value in one), `-buffer-assignment-values.txt` (each value's positions, its users, and the
instruction that makes it). No compiler promises their form: whatever does not fit raises ValueError.
"""

import dataclasses
import re
from collections import defaultdict
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
        if match := re.match(r"allocation (\d+): size (\d+), (.*)", line):
            number = int(match[1])
            allocations[number] = _allocation(int(match[2]), match[3], platform)
        elif match := re.match(r" value: <(\d+) (\S+)( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)", line):
            shape = re.sub(r"\{[^}]*\}", "", match[6])
            places[int(match[1])] = Place(match[2], number, int(match[5]), int(match[4]), shape, bool(match[3]))
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


_LIVE, _VALUES = "-live-range.txt", "-buffer-assignment-values.txt"


@dataclasses.dataclass(frozen=True)
class Value:
    """An array that the program makes: its place in memory, the step of its making, and that of its last use.

    The name in its place is that of the instruction that makes it, with the index of the result in braces if there are
    several; `users` are the names of those that read it.
    """

    place: Place
    first: int
    last: int
    users: tuple[str, ...]


def read_lives(stem: str, places: dict[int, Place]) -> tuple[tuple[str, ...], tuple[Value, ...]]:
    """Return the names of a program's instructions in their order, and the values that they make.

    `stem`: the path that the dump's files begin with. Raises ValueError where one is missing, cut short, or strange.
    """
    if not Path(stem + _LIVE).is_file():
        raise ValueError(
            "the compiler at hand wrote down no live ranges. That of JAX 0.7 does not: update JAX, or name a chip to "
            "compile for, such as chip='v5e-1'. And what JAX finds in its own cache on disk is not compiled anew: for "
            'a timeline, jax.config.update("jax_enable_compilation_cache", False) before the first program.'
        )
    schedule, spans = _live_ranges(_text(stem + _LIVE))
    known = _values(_text(stem + _VALUES))
    of_position = {position: number for number, (positions, _) in known.items() for position in positions}
    lives: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for name, span in spans.items():
        number = of_position.get(name)
        if number is None or number not in places:
            raise ValueError(f"the compiler's dump calls {name} alive and names no place for it.")
        lives[number].append(span)
    values = []
    for number, parts in lives.items():
        _, users = known[number]
        first, last = min(start for start, _ in parts), max(end for _, end in parts)
        values.append(Value(places[number], first, last, users))
    return schedule, tuple(values)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the compiler's dump cannot be read: {error}") from error


def _live_ranges(text: str) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
    sequence, heading, rest = text.partition("\n  BufferLiveRange:\n")
    ranges, complete, _ = rest.partition("\n  Live ranges at ")
    schedule = re.findall(r"^    \d+:(\S+)$", sequence, re.MULTILINE)
    if not (heading and complete and schedule):
        raise ValueError("the compiler's live ranges are cut short, or of a form that is not known.")
    spans = {name: (int(a), int(b)) for name, a, b in re.findall(r"^    (\S.*):(\d+)-(\d+)$", ranges, re.MULTILINE)}
    return tuple(schedule), spans


def _values(text: str) -> dict[int, tuple[list[str], tuple[str, ...]]]:
    """Return each value's positions and users, by its number."""
    table = {}
    # A value's entry is its number, then positions, users, and the line of the instruction that makes it.
    for entry in re.split(r"^<(?=\d+ )", text, flags=re.MULTILINE)[1:]:
        positions, _, users = entry.partition(" from instruction: ")[0].partition(" uses:\n")
        names = re.findall(r"^  (\S+)(?: \{([\d,]*)\})?$", positions, re.MULTILINE)
        number = int(entry.partition(" ")[0])
        table[number] = (
            [f"{name}{{{index}}}" for name, index in names],
            tuple(re.findall(r"^  (\S+), operand", users, re.MULTILINE)),
        )
    return table
