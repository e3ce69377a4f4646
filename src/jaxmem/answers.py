"""Compilers' answers that were kept: the cache of reports on disk, and a source of answers where there is no compiler.

An answer is known again by the whole program, every operation with its shapes and parameters, and by what its compiler
is told beside it: the chip, what is donated, what lies on the host, how far it goes. Numbers are those of the
arithmetic; scopes and lines of Python are those of the program at hand, or none.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.extend import core as jex_core

from jaxmem.chips.chip import Chip
from jaxmem.chips.compilers import Compilers
from jaxmem.common.files import cache_folder, write_whole
from jaxmem.reading.dump import needed_bytes
from jaxmem.reading.stablehlo import Lowered, digest
from jaxmem.reading.timeline import SOURCE, Timeline
from jaxmem.tracing.arguments import Leaf


@dataclasses.dataclass(frozen=True)
class Question:
    """A program for a chip that is not there: its `key` is all that an answer's numbers depend on, but for whose word.

    `names` and `lines` are a digest of its operations' scopes, and the lines that asked for them (`Lowered`). `traced`
    and its `leaves` are the program itself.
    """

    chip: Chip
    key: str
    names: str
    lines: tuple[str, ...]
    traced: jex_core.ClosedJaxpr
    leaves: Sequence[Leaf]


def question(
    chip: Chip, lowered: Lowered, facts: Mapping[str, Any], traced: jex_core.ClosedJaxpr, leaves: Sequence[Leaf]
) -> Question:
    """Return the question of a lowered program; `facts` are what its compiler is told beside it."""
    told = (chip.platform, chip.device_kind, chip.topology, chip.devices, chip.gpu, chip.capacity_bytes, chip.bandwidth)
    key = digest(f"{chip.name} {told} {sorted(facts.items())} {lowered.arithmetic}")
    return Question(chip, key, digest(lowered.names), lowered.lines, traced, leaves)


class Source:
    """Answers in place of compilers: what `answer_from` is given."""

    def answer(self, question: Question) -> dict[str, Any] | None:
        """Return the answer to exactly this question, where no compiler is there; None for any other."""
        raise NotImplementedError

    def heard(self, question: Question, answer: dict[str, Any], timeline: Timeline | None) -> None:
        """Hear what a compiler said, and the timeline that was made of it."""


_sources: list[Source] = []


def answer_from(source: Source | None) -> None:
    """Ask this source from now on where there is no compiler; None: no source."""
    _sources[:] = [] if source is None else [source]


def source() -> Source | None:
    """Return what answers where there is no compiler; None where nothing does."""
    return _sources[0] if _sources else None


def with_lines(answer: dict[str, Any], then: Sequence[str], now: Sequence[str]) -> dict[str, Any]:
    """Return an answer with lines of Python as they are `now`; it was given for the same names at the lines `then`."""
    if tuple(then) == tuple(now):
        return answer
    moved: dict[str, str] = {}
    for before, after in zip(then, now, strict=True):
        moved.setdefault(before, after)
    for table in ("buffers", "costs"):
        rows = [row | {"source": moved.get(row["source"], "")} for row in answer.get(table, ())]
        answer = answer | {table: rows}
    if schedule := answer.get("schedule"):
        rows = [[*row[:SOURCE], moved.get(row[SOURCE], ""), *row[SOURCE + 1 :]] for row in schedule["buffers"]]
        answer["schedule"] = schedule | {"buffers": rows}
    return answer


def without_names(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer says of a program with other names: its numbers, and no arrays by name."""
    words = "the answer is that of the same arithmetic under other names, so that its arrays are not told by name."
    return {name: value for name, value in answer.items() if name not in ("schedule", "costs")} | {
        "buffers": [],
        "no_schedule": words,
    }


def cached(question: Question, compilers: Compilers, compile_it: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of these compilers that is kept, or else that of `compile_it`, kept from now on.

    An answer that other code of this package read is no answer of this, nor is one that is damaged. Of errors only the
    refusal of a program as too big is kept. Where the cache cannot be read or written, it compiles, and a warning says
    so once.
    """
    file = cache_folder("reports") / f"{digest(f'{_reading_code()} {compilers} {question.key} {question.names}')}.json"
    with contextlib.suppress(OSError, ValueError):  # never compiled, not to be read
        mark, _, text = file.read_text(encoding="utf-8").partition("\n")
        if mark == _MARK + digest(text):
            held = json.loads(text)
            with contextlib.suppress(OSError):
                os.utime(file)  # the oldest go first
            return with_lines(held["answer"], held["lines"], question.lines)
    answer = compile_it()
    if "error" not in answer or needed_bytes(answer["error"]) is not None:  # others may not be there next time
        text = json.dumps({"answer": answer, "lines": question.lines})
        try:
            write_whole(file, f"{_MARK}{digest(text)}\n{text}")
            _keep_small()
        except OSError as error:
            _warn_once(str(file.parent), str(error))
    return answer


_MARK = "jaxmem report "  # how a file begins that this package wrote
_MOST_BYTES = 2**29  # some thousands of answers


def kept_reports() -> dict[Path, int]:
    """Return the files of the cache of reports and their bytes, the oldest first: what this package wrote, no other."""
    files = []
    for file in cache_folder("reports").glob("*.json"):
        with contextlib.suppress(OSError), file.open("rb") as content:  # another process removed it
            if re.fullmatch(r"[0-9a-f]{32}", file.stem) and content.read(len(_MARK)) == _MARK.encode():
                facts = os.fstat(content.fileno())
                files.append((facts.st_mtime, file, facts.st_size))
    return {file: size for _, file, size in sorted(files)}


def clear_reports() -> None:
    """Remove all reports that are kept."""
    for file in kept_reports():
        file.unlink(missing_ok=True)


def _keep_small() -> None:
    """Remove the oldest reports where all of them are too many bytes."""
    sizes = kept_reports()
    too_many = sum(sizes.values()) - _MOST_BYTES
    for file, size in sizes.items():
        if too_many <= 0:
            return
        too_many -= size
        file.unlink(missing_ok=True)


# What only says where answers come from, and where they go.
_READS_NOTHING = {
    *("__main__", "advice", "answers", "checks", "compilers", "files", "fitting", "lazy", "magic"),
    *("notes", "printing", "pytest_plugin", "report_files"),
}


@functools.cache
def _reading_code() -> str:
    texts = [
        file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py")) if file.stem not in _READS_NOTHING
    ]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


@functools.cache
def _warn_once(folder: str, reason: str) -> None:
    warnings.warn(
        f"reports cannot be kept in {folder} ({reason}): each one is compiled anew, every time. Set JAXMEM_CACHE to a "
        "folder that can be written.",
        stacklevel=4,
    )
