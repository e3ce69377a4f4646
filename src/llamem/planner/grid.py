"""`python -m llamem table`: what fits where, for a whole grid of questions, each row by that chip's compiler."""

import dataclasses
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from jaxmem.chips.names import chip_called
from jaxmem.fitting import NothingFits
from jaxmem.report import GiB
from llamem.adapters.lora import LoraConfig
from llamem.llama.config import PRESETS, LlamaConfig
from llamem.planner.result import Found
from llamem.planner.search import find_plan
from llamem.planner.sizes import usual_types

MODELS = (
    "llama3.2-1b",
    "llama3.2-3b",
    "llama3.1-8b",
    "llama3.1-70b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
)
WAYS: dict[str, dict[str, Any]] = {
    "all parameters": {},
    "adapters over 16 bits": {"lora": LoraConfig(ranks=(16,))},
    "adapters over four bits": {"lora": LoraConfig(ranks=(16,)), "quantize": "q4_0"},
}
TOKENS = (2048, 4096, 8192, 32_768, 131_072)
# Chips and slices that people have or rent.
PLACES = ("t4", "l4", "a10g", "rtx3090", "rtx4090", "rtx5090", "a100-40", "a100-80", "h100", "h200", "v5e-1", "v6e-1")
PLACES += ("v5e-8", "v6e-8", "v5p-8", "h100-8", "v5e:16x16", "v5p:2x4x4", "v5p:4x4x4")
HOST_BYTES = 512 * GiB  # what a rented machine has at most, where a plan needs the host
_BEGIN = '{"model": '  # of a row
MOVED = 0.01  # of a peak: more is told by `check`


@dataclasses.dataclass(frozen=True)
class Question:
    """What a row answers."""

    model: str
    way: str
    chip: str
    tokens: int

    @property
    def batch_size(self) -> int:
        """One sequence for each chip of a slice."""
        return chip_called(self.chip).devices

    @property
    def can_be(self) -> bool:
        """Whether the model reads so much, and can be trained so there: four bits on one chip, 70B there in no more."""
        four_bits, single = "quantize" in WAYS[self.way], self.batch_size == 1
        if four_bits and not single:  # blocks are not split
            return False
        if self.model == "llama3.1-70b" and single and not four_bits:
            return False
        return self.tokens <= PRESETS[self.model].max_seq_len

    def is_longer_than(self, other: "Question") -> bool:
        """Whether the other asks the same of fewer tokens."""
        return self.tokens > other.tokens and dataclasses.replace(self, tokens=other.tokens) == other


def questions_of(
    models: Sequence[str], ways: Sequence[str], chips: Sequence[str], tokens: Sequence[int]
) -> list[Question]:
    """Return the questions of a grid, short ones of a model, a way and a chip before long ones."""
    everything = (Question(m, w, c, n) for m in models for w in ways for c in chips for n in sorted(tokens))
    return [question for question in everything if question.can_be]


def fill(file: Path, questions: Sequence[Question], progress: Callable[[str], None]) -> None:
    """Append a row to `file`, JSON in lines, for each question that has none.

    Stop it and start it again: what is there stays. Two questions are asked at a time, because half of an answer is a
    wait for the chip's compiler, in a process of its own. After a question that nothing fits, longer ones of the same
    model, way and chip are answered without a compiler.
    """
    rows = {_question(row): row for row in read(file)}
    file.parent.mkdir(parents=True, exist_ok=True)
    lengths: dict[Question, list[Question]] = {}  # of the same model, way and chip
    for question in questions:
        if question not in rows:
            lengths.setdefault(dataclasses.replace(question, tokens=0), []).append(question)
    writing, stopped = threading.Lock(), threading.Event()
    with file.open("a+", encoding="utf-8") as out, ThreadPoolExecutor(2) as pool:
        out.seek(0)
        text = out.read()
        out.truncate(len(text[: _end_of_rows(text)].encode()))

        def answer(asked: list[Question]) -> None:
            for question in asked:
                if stopped.is_set():
                    return
                hopeless = any(not row["fits"] and question.is_longer_than(other) for other, row in list(rows.items()))
                row = _row(question, None, "a shorter one does not fit") if hopeless else ask(question)
                with writing:
                    rows[question] = row
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                    progress(f"{len(rows.keys() & questions)} of {len(questions)}: {_in_words(row)}")

        try:
            for answered in [pool.submit(answer, asked) for asked in lengths.values()]:
                answered.result()
        except BaseException:  # Ctrl-C too: what has not begun does not begin
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def check(file: Path, count: int, seed: int, progress: Callable[[str], None]) -> int:
    """Ask `count` rows of a file again, drawn at random; return of how many the answer or the peak, by 1 %, moved."""
    rows = [row for row in read(file) if row["by"]]
    moved = 0
    for row in random.Random(seed).sample(rows, min(count, len(rows))):
        again = ask(_question(row))
        near = abs(row["peak_bytes"] - again["peak_bytes"]) <= MOVED * row["peak_bytes"]
        moved += not (near and row["fits"] == again["fits"])
        progress(
            f"{_in_words(row)}; again: {again['peak_bytes']:,} bytes, {again['peak_bytes'] - row['peak_bytes']:+,}"
        )
    return moved


def ask(question: Question) -> dict[str, Any]:
    """Return the row of a question: first with nothing but the chip's memory, then with a host's too."""
    way, chip = WAYS[question.way], chip_called(question.chip)
    config = LlamaConfig.from_name(question.model, **usual_types(chip, way.get("lora")))
    options: dict[str, Any] = {
        "seq_len": question.tokens,
        "batch_size": chip.devices,
        "progress": lambda _: None,
        **way,
    }
    why = ""
    # Layers that are updated one by one, which one chip alone does, are clipped one by one.
    clip = "global" if "lora" in way or chip.devices > 1 else "layer"
    hosts: list[dict[str, Any]] = [{"host_bytes": 0}, {"host_bytes": HOST_BYTES, "clip": clip}]
    for host in hosts:
        try:
            return _row(question, find_plan(config, question.chip, **options, **host), "")
        except NothingFits as nothing:
            why = str(nothing)
    return _row(question, None, why)


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Yield a file's rows; what was cut off at its end is none. Raises ValueError for a line that is no row."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    for number, line in enumerate(text[: _end_of_rows(text)].splitlines(), 1):
        try:
            row = json.loads(line)
            _question(row)
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"{file}, line {number}, is no row of a table: {line[:60]!r}. Name a file of rows."
            ) from None
        yield row


def _end_of_rows(text: str) -> int:
    """Return where the last whole line ends: what begins as a row, and is not written to its end, comes after."""
    end = text.rfind("\n") + 1
    return end if text[end:].startswith(_BEGIN[: len(text) - end]) else len(text)


def _question(row: dict[str, Any]) -> Question:
    return Question(row["model"], row["way"], row["chip"], row["tokens"])


def _in_words(row: dict[str, Any]) -> str:
    asked = f"{row['model']}, {row['way']}, {row['chip']}, {row['tokens']:,}"
    return f"{asked}: {row['peak_bytes']:,} bytes" if row["fits"] else f"{asked}: nothing fits"


def _row(question: Question, found: Found | None, why: str) -> dict[str, Any]:
    row: dict[str, Any] = {**dataclasses.asdict(question), "batch": question.batch_size, "fits": found is not None}
    row |= {"peak_bytes": 0, "host_bytes": 0, "seconds": 0.0, "plan": "", "as_tiled": False, "by": "", "why": ""}
    if found is None:
        row["why"] = why
    else:
        row["peak_bytes"], row["host_bytes"] = found.peak_bytes, found.estimate.host_bytes
        row["seconds"] = round(found.estimate.seconds.total, 3)
        row["plan"] = repr(found.plan)
        row["as_tiled"] = found.estimate.question.stands_in(found.plan)  # attention was compiled in plain JAX
        row["by"] = found.report.compiler if found.report else ""
    row["day"] = date.today().isoformat()
    return row
