"""The benchmark for accelerators, which always runs on a CPU as well: its programs, its arithmetic, a small run."""

import re
import subprocess
import sys
from pathlib import Path

import accelerator
import jax
import pytest
from accelerator_programs import programs
from measured import Measurement

import jaxmem

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "accelerator.py"


def bytes_of(shapes):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("small", [True, False])
def test_twenty_programs_of_every_kind(small):
    found = programs(small)
    assert len(found) >= 20 and all(name == program.name for name, program in found.items())
    for features in ("neither", "tiling", "remat", "both"):
        step = found[f"training step, {features}"]
        assert step.flops and step.tokens and step.donate_argnums == (0,)


def test_a_row_adds_the_rise_to_the_arguments(monkeypatch):
    """The rise itself is given: in a worker that has freed much before, part of a real one can hide."""
    rise = Measurement(rise_bytes=7 * 2**20, start_bytes=0, counted_by="beads", exact=False)
    monkeypatch.setattr(accelerator, "measure", lambda *args, donate_argnums: rise)
    program = programs(small=True)["loss and gradients, auto"]
    row = accelerator.one(program, predicted=3)
    out = jax.eval_shape(program.fn, *program.shapes)
    assert row["predicted"] >= bytes_of(program.shapes) + bytes_of(out) and row["elsewhere"] == 3
    assert row["measured"] == bytes_of(program.shapes) + 7 * 2**20
    assert (row["counted_by"], row["exact"]) == ("beads", False)
    assert row["flops"] == 6.0 * 512 * 64 * 32_000 and row["seconds"] > 0


def test_the_table_says_what_was_measured():
    GiB = 2**30
    ran = {"program": "a step", "predicted": 2 * GiB, "elsewhere": 3 * GiB, "measured": 4 * GiB}
    ran |= {"counted_by": "beads", "seconds": 0.02, "flops": 1e12, "tokens": 500}
    rows = [ran, {"program": "large", "predicted": 9 * GiB, "error": "does not fit"}, {"program": "odd", "error": "no"}]
    lines = accelerator.peaks_table(rows, peak_flops=1e14).splitlines()[2:]
    assert lines[0] == "| a step | 2.000 | 3.000 | 4.000 | 0.500, 0.750 | 20.0 | 25,000 | 0.50 |"
    assert lines[1].startswith("| large | 9.000 |  | does not fit |") and lines[2].startswith("| odd |  |  | no |")
    assert len({line.count("|") for line in accelerator.peaks_table(rows, None).splitlines()}) == 1
    said = accelerator.peaks_text(rows, "abacus")[1]
    assert "1 of 3 programs: 0.500 to 0.500" in said and said.endswith("Counted by: beads.")


@pytest.mark.weekly
@pytest.mark.slow
def test_a_small_run_writes_its_table_and_figure(tmp_path):
    command = [sys.executable, SCRIPT, "--parts", "peaks", "--only", "three products", "--out", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "accelerator_cpu.md").read_text()
    for words in ("# Tried on cpu", f"jax {jax.__version__}", "small ones", "1 of 1 programs"):
        assert words in text
    assert (tmp_path / "accelerator_cpu.png").stat().st_size > 5000
    row = next(line for line in text.splitlines() if line.startswith("| the loss's three products alone"))
    program = programs(small=True)["the loss's three products alone"]
    report = jaxmem.compile_report(program.fn, *program.shapes)
    assert f"| {report.peak_bytes / 2**30:.3f} |" in row and re.search(r"\| \d+\.\d \| [\d,]+ \|", row)


def test_a_program_that_fails_is_a_row(monkeypatch):
    def fails(what, predicted):
        raise RuntimeError(f"{what}: out of memory")

    monkeypatch.setattr(accelerator, "child", fails)
    assert accelerator.peaks_part(["a step"], None) == [{"program": "a step", "error": "a step: out of memory"}]
