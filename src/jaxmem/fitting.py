"""Ask a chip's compiler about one program after the other, until one fits: anyone's step, made in different ways."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from itertools import product
from textwrap import shorten
from typing import Any, TypeVar

import jax
from jax.extend import core as jex_core

from jaxmem.chips.names import find_chip
from jaxmem.common.checks import check_whole, show
from jaxmem.common.printing import Shown, Table
from jaxmem.compiling import compile_report
from jaxmem.report import GiB, Report
from jaxmem.tracing.arguments import shard_bytes, with_arrays_alone
from jaxmem.tracing.flops import count_products
from jaxmem.tracing.jaxprs import computed_again, equations, given_name

Progress = Callable[[str], None] | None
Answer = Report | str  # a string says why there is none
Program = Callable[[], tuple[Any, ...]]  # returns a step and the shapes of its arguments
Name = TypeVar("Name", bound=Hashable)
MOST_ASKED = 8  # programs, by `largest`: each costs seconds


class NothingFits(ValueError):
    """Nothing that was tried fits; the message says what came nearest."""


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
    donate_argnums: tuple[int, ...] = (),
    progress: Progress = print,
) -> Fitting:
    """Return the first of several programs that fits a chip, by that chip's own compiler. Nothing is computed.

    `programs`: by name, functions without arguments that return `(step, *arguments)`, the arguments as shapes. They are
    tried in the order given: the first that fits need not be the fastest. `jaxmem.options` makes such a mapping.
    `donate_argnums`, `chip`: see `jaxmem.compile_report`.

    Raises NothingFits, with the table of answers, and ValueError where no program could be compiled.
    """
    if not isinstance(programs, Mapping) or not programs or not all(map(callable, programs.values())):
        raise ValueError(
            f"find_fitting({show(programs)}): expected programs by name, each a function that returns (step, "
            "*arguments): jaxmem.options(make_step, remat=['minimal', 'nothing']), or a dict of your own."
        )

    answers: dict[str, Answer] = {}
    for name, program in programs.items():
        if report := ask(name, _compiling(program, chip, donate_argnums), answers, chip, progress):
            return Fitting(name, getattr(program, "keywords", {}), report, answers)
    raise _nothing_fits(answers, chip)


def options(make_step: Callable[..., tuple[Any, ...]], **settings: Iterable[Any]) -> dict[str, Program]:
    """Return the programs `make_step(**how)` for all combinations of the settings' values, the last varying fastest.

    That is the order in which they are tried. `options(make_step, batch=[8, 4], remat=["minimal", "nothing"])` tries
    both ways of a batch of 8 before one of 4: the largest batch first. Raises ValueError for a setting without a list
    of values: a single value, a text, whose letters would be taken for values, or an empty list.
    """
    for name, values in settings.items():
        several = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
        settings[name] = values = list(values) if several else values
        if not several or not values:
            example = values if not several else 8
            raise ValueError(
                f"options(make_step, {name}={show(values)}): expected a list of values in the order to try them; "
                f"of a single one, {name}=[{show(example)}]."
            )
    ways = [dict(zip(settings, way, strict=True)) for way in product(*settings.values())]
    names = [", ".join(f"{name}={show(value)}" for name, value in keywords.items()) for keywords in ways]
    return {name: partial(make_step, **keywords) for name, keywords in zip(names, ways, strict=True)}


def largest(
    make_step: Callable[..., tuple[Any, ...]],
    setting: str,
    chip: str = "local",
    *,
    multiple_of: int | None = None,
    at_most: int = 2**20,
    donate_argnums: tuple[int, ...] = (),
    progress: Progress = print,
) -> Fitting:
    """Return the largest whole number for which `make_step(**{setting: number})` fits a chip, by its own compiler.

    The peaks of two numbers give a line, and the line the next number to ask about: four or five programs where peaks
    grow evenly. After eight the largest that fits is returned, and the table says which larger one does not. Numbers
    are multiples of `multiple_of`; without it, those from 1,024 on are multiples of 128, as chips' tiles are. A number
    that the compiler cannot answer, as the table then says, counts as too large. `make_step` returns
    `(step, *arguments)` of shapes. Raises as `find_fitting`, and ValueError where nothing limits the chip's memory.
    """
    if multiple_of is not None:
        check_whole("multiple_of", multiple_of)
    check_whole("at_most", at_most, at_least=multiple_of or 1)
    capacity = find_chip(chip).capacity_bytes
    if capacity is None:
        raise ValueError(f"largest(..., chip={chip!r}): nothing limits this chip's memory, so that everything fits.")

    answers: dict[str, Answer] = {}
    peaks: dict[int, int] = {}
    low, high, fitting = 0, at_most + 1, None  # the largest that fits, and the smallest that does not
    while len(answers) < MOST_ASKED:
        first, last = _at_least(low + 1, multiple_of), _at_most(high - 1, multiple_of)
        if first > last:
            break
        guess = _next_number(peaks, capacity, low, high, refused=high <= at_most)
        number = min(max(_at_most(guess, multiple_of), first), last)
        name, program = f"{setting}={number}", partial(make_step, **{setting: number})
        report = ask(name, _compiling(program, chip, donate_argnums), answers, chip, progress)
        if isinstance(answer := answers[name], Report):
            peaks[number] = answer.peak_bytes
        if report:
            low, fitting = number, Fitting(name, program.keywords, report, answers)
        else:
            high = number
    if fitting is None:
        raise _nothing_fits(answers, chip)
    return fitting


def keep_what_fits(
    make_step: Callable[[Any], tuple[Any, ...]],
    chip: str = "local",
    *,
    at_most: int | None = None,
    donate_argnums: tuple[int, ...] = (0,),
    progress: Progress = print,
) -> Fitting:
    """Return the step that keeps as many named activations as fit a chip, or `at_most` bytes, by its own compiler.

    `make_step(policy)` returns `(step, *arguments)` of shapes, with `jax.checkpoint(layer, policy=policy)` around its
    layers; names are those that `jax.ad_checkpoint.checkpoint_name` gives in them. What spares most products for each
    byte comes first, and what does not fit beside it is left out: at most eight programs. `how["policy"]` of the answer
    is the policy, its name the line that makes it; the table has each one's price, in bytes and in products.

    Raises NothingFits where even no name fits, and ValueError for a step without names.
    """
    nothing, only = jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.save_only_these_names
    sizes = _named_bytes(make_step(nothing))
    if not sizes:
        raise ValueError(
            "keep_what_fits(make_step): no activation of the step has a name. Give some inside of the layer, h = "
            'jax.ad_checkpoint.checkpoint_name(h, "h"), and give make_step\'s policy to jax.checkpoint(layer, policy=).'
        )
    products = _products(make_step(nothing))
    spared = {name: (products - _products(make_step(only(name)))) / max(size, 1) for name, size in sizes.items()}
    order = sorted(sizes, key=lambda name: -spared[name])

    answers: dict[str, Answer] = {}
    found: Fitting | None = None

    def fits(names: tuple[str, ...]) -> bool:
        nonlocal found
        policy = only(*names) if names else nothing
        line = f"save_only_these_names({', '.join(map(repr, names))})" if names else "nothing_saveable"
        program = partial(make_step, policy)
        report = ask(line, _compiling(program, chip, donate_argnums), answers, chip, progress)
        if report is None or (at_most is not None and report.peak_bytes > at_most):
            return False
        found = Fitting(line, {"policy": policy}, report, answers)
        return True

    if fits(tuple(order)) or not fits(()):
        if found is None:
            raise _nothing_fits(answers, chip if at_most is None else f"{at_most / GiB:.2f} GiB of {chip}")
        return found
    kept: tuple[str, ...] = ()
    for name in order:
        if len(answers) < MOST_ASKED and len(kept) + 1 < len(order) and fits((*kept, name)):
            kept = (*kept, name)
    assert found is not None  # nothing_saveable fits
    return found


def _traced_step(program: tuple[Any, ...]) -> jex_core.ClosedJaxpr:
    step, arguments = with_arrays_alone(program[0], program[1:])
    return jax.make_jaxpr(step)(*arguments)


def _products(program: tuple[Any, ...]) -> int:
    return count_products(_traced_step(program).jaxpr).flops


def _named_bytes(program: tuple[Any, ...]) -> dict[str, int]:
    """Return how many bytes each name's activations have, those of all turns of loops together."""
    sizes: dict[str, int] = {}
    for eqn, times in equations(_traced_step(program).jaxpr):
        if (name := given_name(eqn)) is not None and not computed_again(eqn):
            sizes[name] = max(sizes.get(name, 0), times * shard_bytes(eqn.outvars[0].aval))
    return sizes


def _next_number(peaks: Mapping[int, int], capacity: int, low: int, high: int, *, refused: bool) -> int:
    """Return where the line through the two peaks nearest to the capacity reaches it.

    `low` fits, `high` does not, or is where the search ends if nothing was `refused`. Where the line leads beyond what
    was refused, the one from `low` to `high` is taken. While there is no line, the number is four times the one that
    fits, or between the two, nearer to the smaller.
    """
    nearest = sorted(peaks, key=lambda number: abs(peaks[number] - capacity))[:2]
    for numbers in (nearest, [low, high]):
        if len(numbers) < 2 or not peaks.keys() >= set(numbers):
            continue
        first, second = numbers
        slope = (peaks[first] - peaks[second]) / (first - second)
        number = first + (capacity - peaks[first]) / slope if slope > 0 else math.inf
        if slope > 0 and (number < high or not refused):
            return min(int(number), 16 * max(low, 1))  # further out a line says little
    return 4 * low if low and not refused else math.isqrt(max(low, 1) * high)


def _at_most(number: int, multiple_of: int | None) -> int:
    """Return the largest number that may be asked about up to this one."""
    return number - number % (multiple_of or (128 if number >= 1024 else 1))


def _at_least(number: int, multiple_of: int | None) -> int:
    """Return the smallest number that may be asked about from this one on."""
    return number + -number % (multiple_of or (128 if number >= 1024 else 1))


def ask(
    name: Name, compile_one: Callable[[], Report], answers: dict[Name, Answer], chip: str, progress: Progress
) -> Report | None:
    """Ask a chip's compiler about a program, and write down the answer; return the report if the program fits.

    A program that cannot be traced, or that kills the compiler, is answered by the first line of its error.
    """
    announce = progress or (lambda text: None)
    announce(f"asking {chip}'s compiler, {len(answers) + 1}: {name}")
    try:
        answers[name] = answer = compile_one()
    except (RuntimeError, ValueError, TypeError) as error:
        answers[name] = answer = (str(error).splitlines() or [type(error).__name__])[0]
    announce(f"  {_verdict(answer)}")
    return answer if isinstance(answer, Report) and answer.fits else None


def _compiling(program: Program, chip: str, donate_argnums: tuple[int, ...]) -> Callable[[], Report]:
    def compile_one() -> Report:
        step, *arguments = program()
        return compile_report(step, *arguments, donate_argnums=donate_argnums, chip=chip)

    return compile_one


def _verdict(answer: Answer) -> str:
    if isinstance(answer, str):
        return f"no answer: {answer}"
    return f"{answer.peak_bytes / GiB:.2f} GiB: {'fits' if answer.fits else 'does not fit'}"


def _nothing_fits(answers: Mapping[str, Answer], chip: str) -> ValueError:
    if all(isinstance(answer, str) for answer in answers.values()):
        return ValueError(f"none of these programs could be compiled for {chip}:\n{_table(answers)}")
    return NothingFits(f"nothing fits on {chip}:\n{_table(answers)}")


def _table(answers: Mapping[str, Answer]) -> Table:
    rows = []
    for name, answer in answers.items():
        of_report = ("", "")
        if isinstance(answer, Report):
            array = f"{answer.buffers[0].shape} {answer.buffers[0].source}" if answer.buffers else ""
            of_report = (f"{answer.matmul_flops / 1e12:.2f}", array)
        rows.append((name, shorten(_verdict(answer), 100, placeholder=" .."), *of_report))
    return Table(("program", "compiled", "TFLOP", "largest array"), rows)
