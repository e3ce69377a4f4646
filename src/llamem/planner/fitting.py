"""Find which of several programs fits a chip: anyone's step, made in different ways."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from textwrap import shorten
from typing import Any

from llamem._checks import check_whole, show
from llamem.memory import GiB, Report, compile_report
from llamem.memory.chips import find_chip
from llamem.memory.show import Shown, Table
from llamem.planner.asking import Answer, NothingFits, Progress, ask_in_turn, fits, verdict

Program = Callable[[], tuple[Any, ...]]  # returns a step and the shapes of its arguments


@dataclasses.dataclass(frozen=True, repr=False)
class Fitting(Shown):
    """The program that was found, the compiler's report of it, and all answers, by name in the order of asking.

    `how` are the arguments of `make_step` that it was made with, where it came from `options` or `largest`.
    """

    name: str
    how: Mapping[str, Any]
    report: Report
    answers: Mapping[str, Answer]

    def parts_shown(self) -> Iterable[str | Table]:
        """Return what was found, and a table of all that the compiler was asked about."""
        yield f"{self.name}: {self.report.peak_bytes / GiB:.2f} GiB on {self.report.chip.name}, fits"
        yield _table(self.answers)


def find_fitting(
    programs: Mapping[str, Program],
    chip: str = "local",
    *,
    bisect: bool = False,
    donate_argnums: tuple[int, ...] = (0,),
    progress: Progress = print,
) -> Fitting:
    """Return the first of several programs that fits a chip, by that chip's own compiler. Nothing is computed.

    `programs`: by name, functions without arguments that return `(step, *arguments)`, the arguments as shapes, from the
    fastest program to the one that needs least memory; `llamem.options` makes such a mapping. `bisect=True` asks about
    fewer of them where each needs less than the one before. `donate_argnums`, `chip`: see `llamem.compile_report`.

    Raises NothingFits, with the table of answers, and ValueError where no program could be compiled.
    """
    if not isinstance(programs, Mapping) or not programs or not all(map(callable, programs.values())):
        raise ValueError(
            f"find_fitting({show(programs)}): expected programs by name, each a function that returns (step, "
            "*arguments): llamem.options(make_step, remat=['minimal', 'nothing']), or a dict of your own."
        )
    names = list(programs)

    def choose(answers: Mapping[str, Answer]) -> str | None:
        high = min((i for i, name in enumerate(names) if fits(answers.get(name))), default=len(names))
        low = max((i for i, name in enumerate(names[:high]) if name in answers), default=-1)
        return None if high - low < 2 else names[(low + high) // 2 if bisect else low + 1]

    def compile_one(name: str) -> Report:
        step, *arguments = programs[name]()
        return compile_report(step, *arguments, donate_argnums=donate_argnums, chip=chip)

    answers = ask_in_turn(choose, compile_one, chip, progress)
    name = next((name for name in names if fits(answers.get(name))), None)
    return _fitting(name, getattr(programs[name], "keywords", {}) if name else {}, answers, chip)


def options(make_step: Callable[..., tuple[Any, ...]], **settings: Iterable[Any]) -> dict[str, Program]:
    """Return the programs `make_step(**how)` for all combinations of the settings' values, the last varying fastest.

    Give each setting's values from the fastest to the one that needs least memory:
    `options(make_step, batch=[8, 4], remat=["minimal", "nothing"])`.
    """
    ways = [dict(zip(settings, way, strict=True)) for way in product(*settings.values())]
    return {_words(how): partial(make_step, **how) for how in ways}


def largest(
    make_step: Callable[..., tuple[Any, ...]],
    setting: str,
    chip: str = "local",
    *,
    multiple_of: int = 1,
    at_most: int = 2**20,
    donate_argnums: tuple[int, ...] = (0,),
    progress: Progress = print,
) -> Fitting:
    """Return the largest whole number for which `make_step(**{setting: number})` fits a chip, by its own compiler.

    The number is a multiple of `multiple_of`, doubled until it does not fit, then bisected; one that the compiler
    cannot answer, as the table then says, counts as too large. `make_step` returns `(step, *arguments)` of shapes.
    Raises as `find_fitting`, and ValueError where nothing limits the chip's memory.
    """
    most = check_whole("at_most", at_most, at_least=check_whole("multiple_of", multiple_of)) // multiple_of
    if find_chip(chip).capacity_bytes is None:
        raise ValueError(f"largest(..., chip={chip!r}): nothing limits this chip's memory, so that everything fits.")

    def choose(answers: Mapping[int, Answer]) -> int | None:
        low = max((count for count, answer in answers.items() if fits(answer)), default=0)
        high = min((count for count, answer in answers.items() if not fits(answer)), default=2 * most + 1)
        count = min(max(2 * low, 1), most) if high > most else (low + high) // 2
        return None if count == low or count in answers else count

    def compile_one(count: int) -> Report:
        step, *arguments = make_step(**{setting: count * multiple_of})
        return compile_report(step, *arguments, donate_argnums=donate_argnums, chip=chip)

    answers = ask_in_turn(choose, compile_one, chip, progress, lambda count: f"{setting}={count * multiple_of}")
    count = max((count for count, answer in answers.items() if fits(answer)), default=0)
    named = {f"{setting}={one * multiple_of}": answer for one, answer in answers.items()}
    name = f"{setting}={count * multiple_of}" if count else None
    return _fitting(name, {setting: count * multiple_of}, named, chip)


def _fitting(name: str | None, how: Mapping[str, Any], answers: Mapping[str, Answer], chip: str) -> Fitting:
    table = _table(answers)
    reports = [answer for answer in answers.values() if isinstance(answer, Report)]
    if not reports:
        raise ValueError(f"none of these programs could be compiled for {chip}:\n{table}")
    if name is None:
        raise NothingFits(f"nothing fits on {chip}:\n{table}", min(reports, key=lambda report: report.peak_bytes))
    found = answers[name]
    assert isinstance(found, Report)
    return Fitting(name, how, found, answers)


def _table(answers: Mapping[str, Answer]) -> Table:
    rows = []
    for name, answer in answers.items():
        known = isinstance(answer, Report)
        largest = f"{answer.buffers[0].shape} {answer.buffers[0].source}" if known and answer.buffers else ""
        rows.append(
            (
                name,
                shorten(verdict(answer), 100, placeholder=" .."),
                f"{answer.matmul_flops / 1e12:.2f}" if known else "",
                largest,
            )
        )
    return Table(("program", "compiled", "TFLOP", "largest array"), rows)


def _words(how: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={show(value)}" for name, value in how.items())
