"""Ask a chip's compiler about one program after the other: the search under `find_fitting` and `find_plan`."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from llamem.memory import GiB, Report

Progress = Callable[[str], None] | None
Answer = Report | str  # a string says why there is none
Name = TypeVar("Name", bound=Hashable)


class NothingFits(ValueError):
    """Nothing that was tried fits; `closest` is what came nearest, an estimate or a report, None where nothing did."""

    def __init__(self, message: str, closest: Any = None):
        super().__init__(message)
        self.closest = closest


def ask_in_turn(
    choose: Callable[[Mapping[Name, Answer]], Name | None],
    compile_one: Callable[[Name], Report],
    chip: str,
    progress: Progress,
    words: Callable[[Any], str] = str,
) -> dict[Name, Answer]:
    """Compile what `choose`, given all answers so far, names next, until it names None. Return all answers.

    A program that cannot be traced, or that kills the compiler, is answered by the first line of its error.
    """
    answers: dict[Name, Answer] = {}
    tell = progress or (lambda text: None)
    while (name := choose(answers)) is not None:
        tell(f"asking {chip}'s compiler, {len(answers) + 1}: {words(name)}")
        try:
            answers[name] = compile_one(name)
        except (RuntimeError, ValueError, TypeError) as error:
            answers[name] = (str(error).splitlines() or [type(error).__name__])[0]
        tell(f"  {verdict(answers[name])}")
    return answers


def fits(answer: Answer | None) -> bool:
    """Return whether a program was compiled and fits."""
    return isinstance(answer, Report) and answer.fits


def verdict(answer: Answer) -> str:
    """Return an answer in a few words."""
    if isinstance(answer, str):
        return f"no answer: {answer}"
    return f"{answer.peak_bytes / GiB:.2f} GiB: {'fits' if answer.fits else 'does not fit'}"
