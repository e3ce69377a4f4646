"""Compilers' answers that travel with the course: for where there is no compiler, such as macOS, or no network.

A notebook asks the same questions wherever it runs with its own parameters. The answers of the day when its outputs
were stored are in a file of its own, once, and beside them by what each question is known: one key for every version of
JAX that lowers it to a text of its own. What is not exactly a stored question has no answer.
"""

import dataclasses
import json
import lzma
from pathlib import Path
from typing import Any

from jaxmem.answers import Question, Source, with_lines, without_names

FOLDER = Path(__file__).parent / "answers"


@dataclasses.dataclass(frozen=True)
class Known:
    """By what a stored question is known at one version of JAX: which answer it has, its names and lines there."""

    answer: int
    names: str
    lines: tuple[str, ...]


class StoredAnswers(Source):
    """The answers of one notebook; of none where the file is not there.

    `file` holds JSON: "day", "parameters" of the notebook, "answers", "likenesses" and "first" keys of those (see
    `recording`), "lines" of Python, and "keys": for each version of JAX, of each key the number of its answer, its
    names and the numbers of its lines.
    """

    def __init__(self, file: Path):
        held = json.loads(lzma.decompress(file.read_bytes())) if file.is_file() else {}
        self.held: dict[str, Any] = held
        self.day: str = held.get("day", "")
        self.parameters: dict[str, Any] = held.get("parameters", {})
        self._known: dict[str, list[Known]] = {}
        for table in held.get("keys", {}).values():
            for key, (number, names, lines) in table.items():
                known = Known(number, names, tuple(held["lines"][i] for i in lines))
                self._known.setdefault(key, []).append(known)
        self._taken: set[str] = set()  # chips whose answers were given and not yet spoken of

    @property
    def are_there(self) -> bool:
        """Whether there is any answer."""
        return bool(self._known)

    def answer(self, question: Question) -> dict[str, Any] | None:
        """Return the stored answer to exactly this question, which says that it is one; None where there is none.

        Under other names the numbers are the same, and its arrays are not told.
        """
        known = self._known.get(question.key)
        if known is None:
            return None
        answer = self.held["answers"][known[0].answer]
        same = next((one for one in known if one.names == question.names), None)
        return self.given(question, with_lines(answer, same.lines, question.lines) if same else without_names(answer))

    def given(self, question: Question, answer: dict[str, Any]) -> dict[str, Any]:
        """Return an answer that says that it is stored, and of when; it is spoken of after the cell."""
        self._taken.add(question.chip.name)
        return answer | {"compiler": f"{answer['compiler']}: stored, of {self.day}"}

    def taken(self) -> str:
        """Return a sentence on the answers that were given since the last call; "" where none was."""
        if not self._taken:
            return ""
        chips = ", ".join(sorted(self._taken))
        self._taken.clear()
        return f"(There is no compiler for {chips} here: shown are the answers stored with the course on {self.day}.)"
