"""How the course's stored answers come about: what a notebook asks is written down while it runs, then packed.

With compilers, a run records their answers, and by what each question is known at this version of JAX. Without, at
another version, it records by what the same questions are known there: the stored answer to a question is the one to
that of the same likeness, the first to the first. A likeness is what no version of JAX changes: the chip, the shapes of
what goes in and comes out, and which operations run. How often they do is not in it: 0.10 traces a layer's attention
once more where its output is saved.
"""

import datetime
import json
import lzma
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import filelock
import jax

from jaxmem.answers import Question, digest
from jaxmem.common.files import write_whole
from jaxmem.reading.timeline import Timeline
from jaxmem.tracing.jaxprs import PRODUCTS, equations, given_name, moved_to_host
from llamem_course.stored_answers import StoredAnswers

# Operations that mean the same in every version of JAX, and say what a program computes, keeps and moves.
_TOLD = {*PRODUCTS, "scan", "while", "exp", "log", "tanh", "logistic", "sin", "cos", "rsqrt"}
_VERSION = ".".join(map(str, jax.__version_info__[:2]))


def likeness(question: Question) -> str:
    """Return by what a question is paired with that of another version of JAX."""
    traced = question.traced
    inputs = [(leaf.shape.shape, str(leaf.shape.dtype), leaf.donated, leaf.on_host) for leaf in question.leaves]
    places = [tuple(getattr(leaf.shape.sharding, "spec", None) or ()) for leaf in question.leaves]
    outputs = [(out.shape, str(out.dtype)) for out in traced.out_avals]
    kinds: set[tuple[str, str]] = set()
    for eqn, _ in equations(traced.jaxpr):
        if (name := given_name(eqn)) is not None:
            kinds.add(("name", name))
        elif eqn.primitive.name in _TOLD:
            for out in eqn.outvars:
                # How many numbers, and not in which shape: versions differ in axes of one.
                size, dtype = getattr(out.aval, "size", 0), getattr(out.aval, "dtype", "")
                if size > 1:
                    kinds.add((eqn.primitive.name, f"{size} {dtype}"))
    alike = (question.chip.name, inputs, places, outputs, moved_to_host(traced.jaxpr) > 0, sorted(kinds))
    return digest(repr(alike))[:12]


class Recorder(StoredAnswers):
    """The stored answers of a notebook, which write down in a file what they are asked and what compilers answer."""

    def __init__(self, file: Path, into: Path):
        super().__init__(file)
        self._into = into
        self._waiting: list[tuple[str, Timeline]] = []  # whose schedule nobody looked at yet
        self._left: dict[str, list[int]] = defaultdict(list)  # of each likeness, answers not yet paired
        self._paired: dict[str, int | None] = {}
        for number, alike in enumerate(self.held.get("likenesses", ())):
            self._left[alike].append(number)
        into.parent.mkdir(parents=True, exist_ok=True)

    def answer(self, question: Question) -> dict[str, Any] | None:
        """Return the answer to the question that is like this one at the version that recorded it."""
        if question.key not in self._paired:
            left = self._left[likeness(question)]
            self._paired[question.key] = left.pop(0) if left else None
            self._write(question, answer=self._paired[question.key])
        number = self._paired[question.key]
        return None if number is None else self.given(question, self.held["answers"][number])

    def heard(self, question: Question, answer: dict[str, Any], timeline: Timeline | None) -> None:
        """Write an answer down, once for each question, and keep its timeline to see whether somebody looks at it."""
        if question.key not in self._paired:
            self._paired[question.key] = None
            self._write(question, answer=answer | {"compile_seconds": 0.0})
        if timeline is not None:
            self._waiting.append((question.key, timeline))

    def note_looks(self, *_: Any) -> None:
        """Write down whose timelines were looked at: what lies where is worked out when somebody asks a timeline."""
        looked_at = {key for key, timeline in self._waiting if "_held" in vars(timeline)}
        self._waiting = [(key, timeline) for key, timeline in self._waiting if key not in looked_at]
        for key in sorted(looked_at):
            self._line({"looked_at": key})

    def _write(self, question: Question, **answer: Any) -> None:
        names = {"key": question.key, "names": question.names, "lines": question.lines}
        self._line({**names, "likeness": likeness(question), **answer})

    def _line(self, row: dict[str, Any]) -> None:
        with self._into.open("a", encoding="utf-8") as out:
            out.write(f"{json.dumps(row)}\n")


def pack(recorded: Path, file: Path, parameters: dict[str, Any]) -> str:
    """Put what a notebook's run with compilers recorded into its file of answers; return a sentence on them.

    `parameters`: those that the notebook ran with. Keys of other versions of JAX stay where the questions are the same.
    Nine tenths of an answer are its schedule, which is kept where somebody looked at the timeline made of it.
    """
    asked, looked_at = _read(recorded)
    answers = []
    for row in asked:
        answer = row["answer"]
        if row["key"] not in looked_at and answer.pop("schedule", None):
            answer["no_schedule"] = "this stored answer has no schedule."
        answers.append(answer)
    today, likenesses, first = datetime.date.today(), [row["likeness"] for row in asked], [row["key"] for row in asked]
    before = StoredAnswers(file).held
    is_same = before.get("first") == first
    others = {version: table for version, table in before.get("keys", {}).items() if version != _VERSION and is_same}
    held = {"day": f"{today.day} {today:%B %Y}", "parameters": parameters, "answers": answers}
    held |= {"likenesses": likenesses, "first": first, "lines": before["lines"] if others else [], "keys": others}
    _store(held, file, [(row, number) for number, row in enumerate(asked)])
    return f"{len(answers)} answers, keys for JAX {', '.join(held['keys'])}, {file.stat().st_size:,} bytes"


def add_keys(recorded: Path, file: Path) -> str:
    """Add to a file of answers what a run without compilers, at another version of JAX, recorded; return a sentence.

    Of questions that are alike and are not asked as often as they were, none is added.
    """
    asked, _ = _read(recorded)
    with filelock.FileLock(Path(tempfile.gettempdir(), f"{file.name}.lock")):  # two versions may run side by side
        held = StoredAnswers(file).held
        if not held.get("likenesses"):
            return "no answers are stored, so that there are no keys to add"
        often, now = Counter(held["likenesses"]), Counter(row["likeness"] for row in asked)
        paired = [(row, row["answer"]) for row in asked if often[row["likeness"]] == now[row["likeness"]]]
        _store(held, file, paired)
    missing = len(held["answers"]) - len(paired)
    return f"{len(paired)} keys for JAX {_VERSION} added, {missing} answers without one, {file.stat().st_size:,} bytes"


def _store(held: dict[str, Any], file: Path, asked: list[tuple[dict[str, Any], int]]) -> None:
    lines = {line: i for i, line in enumerate(held["lines"])}
    table = {}
    for row, number in asked:
        places = [lines.setdefault(line, len(lines)) for line in row["lines"]]
        table[row["key"]] = [number, row["names"], places]
    held["keys"][_VERSION], held["lines"] = table, list(lines)
    write_whole(file, lzma.compress(json.dumps(held, separators=(",", ":")).encode(), preset=9))


def _read(recorded: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the questions that were recorded, in order, and the keys of those whose timelines were looked at."""
    text = recorded.read_text(encoding="utf-8") if recorded.is_file() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    return [row for row in rows if "key" in row], {row["looked_at"] for row in rows if "looked_at" in row}
