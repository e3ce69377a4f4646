"""A fixture that holds a step's peak: `pytest_plugins = ["jaxmem.pytest_plugin"]` in conftest.py, then

    def test_peak(peak):
        peak(step, *shapes, chip="v5e-1", donate_argnums=(0,))

compares with the file beside the test, `test_file.peaks.json`; `pytest --update-peaks` writes it.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxmem.common.files import read_json, write_whole
from jaxmem.common.printing import size_text
from jaxmem.compiling import compile_report
from jaxmem.report import Alike, Report, arrays_at_peak, changed_arrays, growth

_MOST_BYTES = 50_000_000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-peaks`."""
    parser.addoption("--update-peaks", action="store_true", help="write what `peak` measures beside the tests")


@pytest.fixture
def peak(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Return `peak(step, *shapes, within=0.02, **options)`: compile a step, compare its peak with the kept one.

    `within`: by which part it may grow. `options`: those of `jaxmem.compile_report`. Returns the report. Fails where
    the peak grew by more, and says which arrays came; where nothing is kept, and says how to keep it. Warns where it
    fell by more. Skips where the kept peak is another compiler's or JAX's: a difference would not be the program's.
    """
    file = Path(request.path).with_suffix(".peaks.json")

    def check(step: Callable[..., Any], *shapes: Any, within: float = 0.02, **options: Any) -> Report:
        report = compile_report(step, *shapes, **options)
        name = f"{request.node.name} on {report.chip.name}"
        compiler = report.compiler.rpartition(", ")[0]  # wherever it is installed
        now = {"jax": jax.__version__, "compiler": compiler, "peak_bytes": report.peak_bytes}
        arrays = arrays_at_peak(report)
        kept = read_json(file, _MOST_BYTES) if file.is_file() else {}
        if request.config.getoption("--update-peaks"):
            entries = sorted((kept | {name: now | {"arrays": arrays}}).items())
            lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries)
            write_whole(file, f"{{\n{lines}\n}}\n")
            return report
        try:
            before, arrays_before = kept[name], [Alike(*row) for row in kept[name]["arrays"]]
            part = growth(before["peak_bytes"], report.peak_bytes)
            tools = before["jax"], before["compiler"]
        except (KeyError, TypeError):
            pytest.fail(f"{file} holds no peak of {name}: keep today's with `pytest --update-peaks`.", pytrace=False)
        if tools != (now["jax"], now["compiler"]):
            pytest.skip(
                f"{name} was kept with JAX {tools[0]} and the compiler of {tools[1]}; here are JAX {now['jax']} and "
                f"that of {compiler}. Not compared: keep today's with `pytest --update-peaks`."
            )
        change = f"from {size_text(before['peak_bytes'])} to {size_text(report.peak_bytes)}, by {100 * part:+.1f} %"
        if part > within:
            rows = changed_arrays(arrays_before, arrays)
            pytest.fail(f"{name} grew {change}, more than {100 * within:g} %:\n{rows}", pytrace=False)
        if part < -within:
            warnings.warn(f"{name} fell {change}: hold it with `pytest --update-peaks`.", stacklevel=2)
        return report

    return check
