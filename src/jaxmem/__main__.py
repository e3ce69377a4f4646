"""`python -m jaxmem`: report a step's memory, compare such reports, list chips, fetch compilers, empty the cache."""

import argparse
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxmem.answers import clear_reports, kept_reports
from jaxmem.chips.chip import CHIPS
from jaxmem.chips.compilers import fetch_compilers, find_compilers, remove_compilers
from jaxmem.chips.names import available
from jaxmem.common.files import cache_folder
from jaxmem.common.printing import Table, size_text
from jaxmem.compiling import compile_report
from jaxmem.report import Report, compare, growth
from jaxmem.report_files import read_reports, write_reports

FITS, GREW, BAD_INPUT = 0, 1, 2  # exit codes
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 1e3, "MB": 1e6, "GB": 1e9}

_NOTHING = "nothing. Nothing there bears the mark of what jaxmem fetched; older versions left none."


class _OfTheModule(Exception):
    """What the module that was named raises: where, is what its author needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked for; return 0, 1 where a program does not fit or has grown, 2 with a sentence for bad input."""
    parser = argparse.ArgumentParser(prog="python -m jaxmem", description="Memory of JAX programs, by real compilers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    report = commands.add_parser("report", help="what a training step needs on chips that need not be here")
    add = report.add_argument
    add(
        "step",
        help="package.module:make_step or file.py:make_step, a function without arguments that returns (step, "
        "*arguments), the arguments as arrays or jax.ShapeDtypeStruct",
    )
    add("--chip", nargs="+", default=["local"], metavar="NAME", help="such as v5e-1 h100; default the device at hand")
    add(
        "--donate",
        nargs="*",
        type=int,
        default=[],
        metavar="N",
        help="jax.jit's donate_argnums: which arguments the step may overwrite",
    )
    add("--at-most", type=_bytes, metavar="SIZE", help="such as 15GiB: exit 1 where a peak is above it")
    add("--json", type=Path, metavar="FILE", help="write the reports, for `python -m jaxmem diff`")
    add("--markdown", action="store_true", help="print tables as Markdown")
    report.set_defaults(run=_report)

    diff = commands.add_parser("diff", help="how peaks differ between two files of `report --json`")
    add = diff.add_argument
    add("before", type=Path)
    add("after", type=Path)
    add("--fail-above", type=_part, metavar="PERCENT", help="such as 2%%: exit 1 where a peak grew by more")
    add("--markdown", action="store_true", help="print tables as Markdown")
    diff.set_defaults(run=_diff)

    chips = commands.add_parser("chips", help="the chips known by name")
    chips.set_defaults(run=_chips)

    compilers = commands.add_parser("compilers", help="fetch the compilers of chips that are not there, or remove them")
    add = compilers.add_argument
    add("--chip", choices=("tpu", "gpu", "all"), default="all", help="whose compilers; default all")
    add("--path", help="the folder; default $JAXMEM_COMPILERS or ~/.cache/llamem/compilers")
    add("--remove", action="store_true", help="remove all that were fetched, and nothing else")
    compilers.set_defaults(run=_compilers)

    cache = commands.add_parser("cache", help="how much is kept of the compilers' answers")
    cache.add_argument("--clear", action="store_true", help="remove all of it, and nothing else")
    cache.set_defaults(run=_cache)

    given = parser.parse_args(arguments)
    try:
        return given.run(given)
    except _OfTheModule as error:
        traceback.print_exception(error.__cause__)
        return BAD_INPUT
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except Exception:  # of the module that was named: Python's own exit code would say that a peak grew
        traceback.print_exc()
        return BAD_INPUT


def _report(given: argparse.Namespace) -> int:
    make_step = find_function(given.step)
    step, *arguments = _made(make_step, given.step)
    reports: dict[str, Report] = {}
    for chip in given.chip:
        reports[chip] = compile_report(step, *arguments, chip=chip, donate_argnums=tuple(given.donate))
        print(_text(reports[chip].parts_shown(), given.markdown), end="\n\n")
    if given.json:
        write_reports(given.json, reports)
    too_large = [
        f"{chip}: {size_text(report.peak_bytes)} is more than "
        + (
            f"--at-most {size_text(given.at_most)}"
            if report.fits
            else f"the {size_text(report.capacity_bytes or 0)} it has"
        )
        for chip, report in reports.items()
        if not report.fits or (given.at_most is not None and report.peak_bytes > given.at_most)
    ]
    print("\n".join(too_large), file=sys.stderr, end="\n" if too_large else "")
    return GREW if too_large else FITS


def _diff(given: argparse.Namespace) -> int:
    before, after = read_reports(given.before), read_reports(given.after)
    if not (chips := [chip for chip in before if chip in after]):
        raise ValueError(
            f"{given.before} is of {', '.join(before)} and {given.after} of {', '.join(after)}: expected a chip that "
            "is in both. Ask `python -m jaxmem report` for the same --chip."
        )
    grew = []
    for chip in chips:
        pair = compare({"before": before[chip], "after": after[chip]})
        changes = pair.changes
        parts = [*pair.parts_shown(), changes if changes.rows else "No array of a MiB or more came or went."]
        print(_text(parts, given.markdown), end="\n\n")
        if before[chip].compiler != after[chip].compiler:
            print(f"note: before by {before[chip].compiler}, after by {after[chip].compiler}.\n")
        part = growth(before[chip].peak_bytes, after[chip].peak_bytes)
        if given.fail_above is not None and part > given.fail_above:
            grew.append(f"{chip}: the peak grew by {100 * part:.1f} %, more than {100 * given.fail_above:g} %")
    for file, other, own in ((given.before, after, before), (given.after, before, after)):
        for chip in (chip for chip in other if chip not in own):
            print(f"note: {file} has no report for {chip}: not compared.\n")
    print("\n".join(grew), file=sys.stderr, end="\n" if grew else "")
    return GREW if grew else FITS


def _chips(given: argparse.Namespace) -> int:
    rows = [
        (name, chip.device_kind, size_text(chip.capacity_bytes or 0), "yes" if available(name) else "no")
        for name, chip in CHIPS.items()
    ]
    print(Table(("chip", "kind", "memory of one", "compiler here"), rows))
    print("And several TPUs by how they are connected: v5e:16x16, v6e:2x4, v5p:4x4x8.")
    return FITS


def _cache(given: argparse.Namespace) -> int:
    folder, files = cache_folder("reports"), kept_reports()
    n_bytes, word = sum(files.values()), "report" if len(files) == 1 else "reports"
    if given.clear:
        clear_reports()
    print(f"{folder}: {len(files)} {word}, {size_text(n_bytes)}{', removed' if given.clear else ''}")
    return FITS


def _compilers(given: argparse.Namespace) -> int:
    if given.remove:
        removed = remove_compilers(given.path)
        print("removed: " + (", ".join(map(str, removed)) or _NOTHING))
        return FITS
    print(f"compilers: {fetch_compilers(given.chip, path=given.path)}")
    for target in ("tpu", "cuda") if given.path is None else ():
        if compilers := find_compilers(target):
            print(f"for {target}: {compilers.name}")
    return FITS


def find_function(name: str) -> Callable[[], Any]:
    """Return the function that `package.module:name` or `path/file.py:name` means, from the folder at hand.

    Raises ValueError for a name without a colon and ImportError where module or function are not there, each with
    what was expected.
    """
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise ValueError(f"{name!r}: expected package.module:make_step or path/file.py:make_step.")
    sys.path.insert(0, str(Path.cwd()))
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).resolve().parent))
        place = Path(place).stem
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise ImportError(
                f"{name!r}: {place} imports {error.name or error}, which is not installed here."
            ) from error
        raise ImportError(f"{name!r}: {error}. Run it in the folder from which `import {place}` works.") from None
    except Exception as error:
        raise _OfTheModule from error
    if not callable(found := getattr(module, function, None)):
        raise ImportError(f"{name!r}: {module.__file__} has no function {function}.")
    return found


def _made(make_step: Callable[[], Any], name: str) -> tuple[Any, ...]:
    try:
        made = make_step()
    except Exception as error:
        raise _OfTheModule from error
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise TypeError(
            f"{name} returned {type(made).__name__}: expected a tuple, the step first and then the arguments that it "
            "is called with, as arrays or shapes: return step, state, batch."
        )
    return made


def _text(parts: Any, markdown: bool) -> str:
    return "\n\n".join(
        _markdown(part) if markdown and isinstance(part, Table) else str(part) for part in parts if str(part)
    )


def _markdown(table: Table) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in line) + " |" for line in lines)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([\d.]+)\s*([KMG]?I?B?)", text.upper())
    if not match or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 15GiB, 900MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def _part(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: expected percent, such as 2%")
    return float(match[1]) / 100


if __name__ == "__main__":
    sys.exit(main())
