"""`python -m jaxmem report` and `diff`, reports as files, and the pytest fixture: answers, exit codes, messages."""

import json
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmem import GiB, Report, compare, compile_report
from jaxmem.__main__ import main

pytest_plugins = ["pytester"]

STEP = """
import jax, jax.numpy as jnp

def make_step(layers=3, remat=True):
    def loss(w, x):
        body = lambda x, w: (jnp.tanh(x @ w), None)
        return (jax.lax.scan(jax.checkpoint(body) if remat else body, x, w)[0] ** 2).mean()
    shapes = jax.ShapeDtypeStruct((layers, 512, 512), jnp.float32), jax.ShapeDtypeStruct((3000, 512), jnp.float32)
    return jax.grad(loss), *shapes

def deeper(): return make_step(layers=5)
def forgotten(): return make_step(layers=40, remat=False)
def kept(): return make_step(layers=40)
def no_tuple(): return make_step()[0]
def misspelt(): return mke_step()
"""


@pytest.fixture
def step_file(tmp_path, monkeypatch):
    (tmp_path / "some_step.py").write_text(STEP)
    (tmp_path / "needs_more.py").write_text("import absent_package")
    (tmp_path / "raises.py").write_text("raise RuntimeError('boom')")
    monkeypatch.chdir(tmp_path)
    return "some_step.py"


def test_a_report_is_read_back_equal_in_every_field():
    shapes = jax.ShapeDtypeStruct((301, 512), jnp.float32), jax.ShapeDtypeStruct((512, 77), jnp.bfloat16)
    report = compile_report(lambda x, w: jnp.tanh(x @ w).sum(), *shapes, chip="cpu")
    assert Report.from_json(report.to_json()) == report
    plain = json.loads(report.to_json())
    assert plain["fits"] is True and plain["peak_bytes"] == report.peak_bytes and plain["schema"] == 1
    for wrong in (plain | {"schema": 2}, [plain], {"schema": 1}, plain | {"chip": None}):
        with pytest.raises(ValueError, match="schema"):
            Report.from_json(json.dumps(wrong))


@pytest.mark.quick
def test_a_checkpoint_that_was_forgotten_fails_the_gate_and_is_named(step_file, capsys):
    for name in ("kept", "forgotten"):
        assert main(["report", f"{step_file}:{name}", "--json", f"{name}.json"]) == 0
    capsys.readouterr()
    assert main(["diff", "kept.json", "kept.json", "--fail-above", "0%"]) == 0
    assert "No array of a MiB or more came or went" in capsys.readouterr().out
    assert main(["diff", "kept.json", "forgotten.json"]) == 0
    assert main(["diff", "kept.json", "forgotten.json", "--fail-above", "2%", "--markdown"]) == 1
    out, error = capsys.readouterr()
    assert "the peak grew by" in error and "| --- |" in out
    # 40 residuals of [3000, 512] in f32; the inputs of the layers are kept in both.
    kept, forgotten = (
        Report.from_plain(json.loads(Path(f"{n}.json").read_text())["reports"]["local"]) for n in ("kept", "forgotten")
    )
    assert forgotten.peak_bytes > kept.peak_bytes
    if kept.timeline:
        came = [row for row in compare({"kept": kept, "forgotten": forgotten}).changes.rows if row[0].startswith("+")]
        assert came[0][1:3] == ("residuals", "2 x f32[40,3000,512]"), came


def test_what_is_above_the_limit_ends_with_one_and_what_cannot_be_asked_with_two(step_file, capsys):
    assert main(["report", "some_step:make_step", "--at-most", "900GiB"]) == 0
    assert main(["report", "some_step:deeper", "--at-most", "1MiB"]) == 1
    assert "more than --at-most 1.00 MiB" in capsys.readouterr().err
    for wrong, says in {
        "some_step": "expected package.module:make_step",
        "absent_step:make_step": "No module named 'absent_step'",
        "some_step:absent": "has no function absent",
        "some_step:no_tuple": "return step, state, batch",
        "some_step:misspelt": "name 'mke_step' is not defined",
        "needs_more:make_step": "needs_more imports absent_package, which is not installed here",
        "raises:make_step": 'raises.py", line 1',
    }.items():
        assert main(["report", wrong]) == 2
        assert says in capsys.readouterr().err
    assert main(["report", "some_step:make_step", "--chip", "v9"]) == 2
    assert main(["diff", step_file, step_file]) == 2
    assert "no JSON object" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["report", "some_step:make_step", "--at-most", "much"])


def test_a_chip_of_one_file_alone_is_named_and_another_schema_is_refused(step_file, tmp_path, capsys):
    assert main(["report", "some_step:make_step", "--json", "one.json"]) == 0
    one = json.loads(Path("one.json").read_text())
    (report,) = one["reports"].values()
    Path("two.json").write_text(json.dumps(one | {"reports": one["reports"] | {"other": report}}))
    Path("later.json").write_text(json.dumps(one | {"schema": 2}))
    for pair in (("one.json", "two.json"), ("two.json", "one.json")):
        assert main(["diff", *pair]) == 0
        assert "note: one.json has no report for other: not compared" in capsys.readouterr().out
    assert main(["diff", "one.json", "later.json"]) == 2
    assert "later.json holds no reports of schema 1" in capsys.readouterr().err


def test_only_reports_of_one_chip_are_said_to_change():
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    one = compile_report(lambda x: x @ x, shape, chip="cpu")
    assert "change" not in str(compare({"one": one})) and "+0.0 %" in str(compare({"one": one, "same": one}))
    assert one.peak_bytes < GiB


def test_the_fixture_keeps_a_peak_beside_the_test_and_holds_it(pytester):
    pytester.makeconftest('pytest_plugins = ["jaxmem.pytest_plugin"]')

    def run(layers, *options):
        pytester.makepyfile(
            test_peak_of_a_step=textwrap.dedent(STEP)
            + f"\ndef test_peak(peak):\n    assert peak(*make_step({layers}), chip='cpu').peak_bytes > 0\n"
        )
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:nbval", "-W", "default", *options)

    run(3).stdout.fnmatch_lines(["*holds no peak of test_peak on cpu: keep today's with*--update-peaks*"])
    run(3, "--update-peaks").assert_outcomes(passed=1)
    run(3).assert_outcomes(passed=1)
    grown = run(5)
    grown.assert_outcomes(failed=1)
    grown.stdout.fnmatch_lines(["*test_peak on cpu grew from * to *, more than 2 %*", "*+*weights*f32?5,512,512?*"])
    file = pytester.path / "test_peak_of_a_step.peaks.json"
    assert len(file.read_text().splitlines()) == 3
    shrunk = run(1)
    shrunk.assert_outcomes(passed=1, warnings=1)
    shrunk.stdout.fnmatch_lines(["*fell from*hold it with*"])
    file.write_text(file.read_text().replace(jax.__version__, "0.0.1"))
    run(5).assert_outcomes(skipped=1)


def test_the_magic_compiles_the_last_call_and_runs_what_stands_before_it():
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "jaxmem.magic")
    shell.run_cell("import jax.numpy as jnp")
    asked: Any = shell.run_cell_magic("peak", "cpu", "x = jnp.ones((300, 200))\nf = lambda x: x @ x.T\nf(x)")
    assert asked.reports["cpu"].argument_bytes == 4 * 300 * 200
    with pytest.raises(ValueError, match="the call in the cell's last line"):
        shell.run_cell_magic("peak", "cpu", "x = 1")
