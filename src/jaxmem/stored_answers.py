"""Compilers' answers that were kept: in the user's cache, and those that travel with the course.

The course's are for where there is no compiler: macOS, or no network. A notebook asks the same questions wherever it
runs with its own parameters, and the answers of the day when its outputs were stored are in a small file beside the
package. A question is known again by what does not depend on the version of JAX that traces it: the chip, the shapes of
what goes in and comes out, and how often which operation runs that no version renames. Where two questions of one
notebook look alike and have different answers, neither is stored.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import lzma
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax.extend import core as jex_core

from jaxmem.chips.chip import Chip
from jaxmem.common.files import cache_folder, write_whole
from jaxmem.reading.dump import needed_bytes
from jaxmem.reading.timeline import Timeline
from jaxmem.tracing.arguments import Leaf
from jaxmem.tracing.jaxprs import PRODUCTS, equations, given_name, moved_to_host

# Operations that mean the same in every version of JAX, and say what a program computes, keeps and moves.
_TOLD = {*PRODUCTS, "scan", "while", "exp", "log", "tanh", "logistic", "sin", "cos", "rsqrt"}

_answers: dict[str, dict[str, Any]] = {}
_about: dict[str, str] = {"notebook": "none"}
_taken: set[str] = set()  # chips whose stored answers were given and not yet spoken of


def use(file: Path) -> dict[str, Any]:
    """Answer from this file from now on, where there is no compiler: no file, no answers.

    Return the parameters of the notebook that it belongs to, as they are stored.
    """
    _answers.clear()
    _about["notebook"] = file.name.partition(".")[0]
    if file.is_file():
        held = json.loads(lzma.decompress(file.read_bytes()))
        _answers.update(held["answers"])
        _about.update(day=held["day"])
        return held.get("parameters", {})
    return {}


def are_there() -> bool:
    """Return whether a file of answers is in use."""
    return bool(_answers)


def fingerprint(traced: jex_core.ClosedJaxpr, chip: Chip, depth: str, leaves: Sequence[Leaf]) -> str:
    """Return by what a question to a chip's compiler is known again."""
    inputs = [(leaf.shape.shape, str(leaf.shape.dtype), leaf.donated, leaf.on_host) for leaf in leaves]
    places = [tuple(getattr(leaf.shape.sharding, "spec", None) or ()) for leaf in leaves]
    outputs = [(out.shape, str(out.dtype)) for out in traced.out_avals]
    counts: Counter[tuple[str, str]] = Counter()
    for eqn, times in equations(traced.jaxpr):
        if (name := given_name(eqn)) is not None:
            counts["name", name] += times
        elif eqn.primitive.name in _TOLD:
            for out in eqn.outvars:
                # How many numbers, and not in which shape: versions differ in axes of one.
                size, dtype = getattr(out.aval, "size", 0), getattr(out.aval, "dtype", "")
                if size > 1:
                    counts[eqn.primitive.name, f"{size} {dtype}"] += times
    question = (chip.name, depth, inputs, places, outputs, moved_to_host(traced.jaxpr) > 0, sorted(counts.items()))
    return hashlib.sha256(repr(question).encode()).hexdigest()[:24]


def find(question: str, chip: Chip) -> dict[str, Any] | None:
    """Return the stored answer to a question about a chip, which says that it is one; None where there is none."""
    answer = _answers.get(question)
    if answer is None:
        return None
    _taken.add(chip.name)
    return answer | {"compiler": f"{answer['compiler']}: stored, of {_about['day']}"}


def taken() -> str:
    """Return a sentence on the stored answers that were given since the last call; "" where none was."""
    if not _taken:
        return ""
    chips = ", ".join(sorted(_taken))
    _taken.clear()
    return f"(There is no compiler for {chips} here: shown are the answers stored with the course on {_about['day']}.)"


def record(question: str, answer: dict[str, Any]) -> None:
    """Write an answer down for `pack`, where `$LLAMEM_RECORD_ANSWERS` names a folder: in one for each notebook."""
    if folder := os.environ.get("LLAMEM_RECORD_ANSWERS"):
        kept = {name: value for name, value in answer.items() if name != "compile_seconds"} | {"compile_seconds": 0.0}
        text = json.dumps(kept, sort_keys=True)
        file = Path(folder) / _about["notebook"] / f"{question}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
        write_whole(file, text)


def watched(timeline: Timeline, question: str) -> Timeline:
    """Return the timeline; while answers are recorded, one that writes down for `pack` that somebody looked at it."""
    if not (folder := os.environ.get("LLAMEM_RECORD_ANSWERS")):
        return timeline
    mark = Path(folder) / _about["notebook"] / f"{question}.looked_at"

    class Watched(Timeline):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("__"):
                mark.touch()
            return super().__getattribute__(name)

    return Watched(**{field.name: getattr(timeline, field.name) for field in dataclasses.fields(timeline)})


def pack(folder: Path, file: Path, day: str, parameters: dict[str, Any]) -> tuple[int, int]:
    """Put the answers written down in a folder into one file; return how many, and how many look alike and differ.

    `parameters`: those that the notebook ran with.

    Nine tenths of an answer are its schedule, which is kept where somebody looked at the timeline made of it.
    """
    answers: dict[str, dict[str, Any]] = {}
    alike = set()
    for answer_file in sorted(folder.glob("*.json")):
        question = answer_file.name.partition("-")[0]
        if question in answers:
            alike.add(question)
        answers[question] = json.loads(answer_file.read_text())
        looked_at = (folder / f"{question}.looked_at").exists()
        if not looked_at and answers[question].pop("schedule", None):
            answers[question]["no_schedule"] = "this stored answer has no schedule."
    for question in alike:
        del answers[question]
    text = json.dumps({"day": day, "parameters": parameters, "answers": answers}, separators=(",", ":"))
    write_whole(file, lzma.compress(text.encode(), preset=9))
    return len(answers), len(alike)


def cached(program: str, compile_it: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer kept for a program, or else that of `compile_it`, kept from now on.

    `program` names all that an answer depends on. An answer that other code of this package read is no answer of this.
    Of errors only the refusal of a program as too big is kept. Where the cache cannot be read or written, it compiles,
    and a warning says so once.
    """
    key = hashlib.sha256(f"{_reading_code()} {program}".encode()).hexdigest()
    file = cache_folder("reports") / f"{key[:32]}.json"
    with contextlib.suppress(OSError, ValueError):  # never compiled, not to be read
        return json.loads(file.read_text())
    answer = compile_it()
    if "error" not in answer or needed_bytes(answer["error"]) is not None:  # others may not be there next time
        try:
            write_whole(file, json.dumps(answer))
        except OSError as error:
            _warn_once(str(file.parent), str(error))
    return answer


# What only says where answers come from, and where they go.
_READS_NOTHING = ("checks", "command", "compilers", "files", "fitting", "printing", "stored_answers")


@functools.cache
def _reading_code() -> str:
    texts = [
        file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py")) if file.stem not in _READS_NOTHING
    ]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


@functools.cache
def _warn_once(folder: str, reason: str) -> None:
    warnings.warn(
        f"reports cannot be kept in {folder} ({reason}): each one is compiled anew, every time. Set LLAMEM_CACHE to a "
        "folder that can be written.",
        stacklevel=4,
    )
