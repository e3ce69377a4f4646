"""A fixture that holds a step's peak: `pytest_plugins = ["jaxmem.pytest_plugin"]` in conftest.py, then

    def test_peak(peak):
        peak(step, *shapes, chip="v5e-1", donate_argnums=(0,))

compares with the file beside the test, `test_file.peaks.json`; `pytest --update-peaks` writes it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxmem.common.files import read_json, write_whole
from jaxmem.compiling import compile_report
from jaxmem.report import Report, compare

_MOST_BYTES = 50_000_000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-peaks`."""
    parser.addoption("--update-peaks", action="store_true", help="write what `peak` measures beside the tests")


@pytest.fixture
def peak(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Return `peak(step, *shapes, within=0.02, **options)`: compile a step, compare its peak with the kept one.

    `within`: by which part it may grow. `options`: those of `jaxmem.compile_report`. Returns the report. Fails where
    the peak grew by more, and says which arrays came; where nothing is kept, and says how to keep it. Skips where the
    kept peak is another compiler's or JAX's: a difference would not be the program's.
    """
    file = Path(request.path).with_suffix(".peaks.json")

    def check(step: Callable[..., Any], *shapes: Any, within: float = 0.02, **options: Any) -> Report:
        report = compile_report(step, *shapes, **options)
        name = f"{request.node.name} on {report.chip.name}"
        kept = read_json(file, _MOST_BYTES) if file.is_file() else {}
        if request.config.getoption("--update-peaks"):
            entry = {"jax": jax.__version__, "report": report.plain()}
            write_whole(file, json.dumps(kept | {name: entry}, indent=1, sort_keys=True) + "\n")
            return report
        if name not in kept:
            pytest.fail(f"{file} holds no peak of {name}: keep today's with `pytest --update-peaks`.", pytrace=False)
        before = Report.from_plain(kept[name]["report"])
        if (before.compiler, kept[name]["jax"]) != (report.compiler, jax.__version__):
            then, now = f"jax {kept[name]['jax']}, {before.compiler}", f"jax {jax.__version__}, {report.compiler}"
            pytest.skip(f"{name} was kept by {then}, this is {now}: not compared. Keep today's with --update-peaks.")
        if report.peak_bytes > before.peak_bytes * (1 + within):
            pair = compare({"kept": before, "now": report})
            pytest.fail(f"{name} grew by more than {100 * within:g} %:\n{pair}\n{pair.changes}", pytrace=False)
        return report

    return check
