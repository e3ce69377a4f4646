"""Holds timelines against the compilers' own figures: 20 programs on five chips, and what one of Llama 3.2 1B costs.

`python benchmarks/timeline_peaks.py` writes timeline_peaks.md beside itself, in half an hour on two cores;
`--chips v5e-1 --programs "loss, plain" ...` a part, and the other lines stay as they were. Exits with 1 where a
timeline's books do not close.
"""

import argparse
import datetime
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
from compilers_used import compilers_used
from timeline_programs import PROGRAMS

import jaxmem
import llamem
from jaxmem import compiling
from jaxmem.common.printing import size_text
from jaxmem.reading import dump
from jaxmem.reading.timeline import Timeline
from jaxmem.report import Report
from llamem_course import plots
from llamem_course.timeline_html import Page

TABLE = Path(__file__).with_suffix(".md")
CHIPS = ("local", "v5e-1", "v6e-1", "a100-40", "h100")
MiB = 2**20
HEAD = """\
# Timelines against the compilers' own figures

{date}, {versions}, by `benchmarks/timeline_peaks.py`. In MiB: what the compiler set aside (arguments + outputs -
aliases + temporaries + constants); the timeline's highest point, what is in use at once, room of results included; the
difference: gaps between arrays. What is set aside is the report's peak, to the byte: the exit status says so.

| program | chip | set aside | in use | difference in % |
|---|---|---|---|---|
"""
STEP = """\
One AdamW step of Llama 3.2 1B on 8,192 tokens, both features. Share of the bytes at the peak whose category is known;
seconds for the compiler's answer, and of them for reading the schedule; then, from the cache too, for the timeline and
its peak, and for the page; the page's size, and when Chromium first shows it.

| chip | steps | buffers | MiB in use | known, % | answer s | reading s | timeline s | page s | page | paint s |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def compared(name: str, chip: str) -> tuple[str, bool]:
    """A line of the table, and whether the books close: in use <= set aside = the report's peak."""
    program = PROGRAMS[name]()
    report = jaxmem.compile_report(program.fn, *program.args, donate_argnums=program.donate_argnums, chip=chip)
    one = timeline_of(report)
    closes = one.peak_bytes <= one.assigned_bytes == report.peak_bytes
    cells = [f"{size / MiB:.1f}" for size in (one.assigned_bytes, one.peak_bytes)]
    cells.append(f"{100 * one.gap_bytes / one.assigned_bytes:.2f}")
    return f"| {name} | {chip} | {' | '.join(cells)} |", closes


def timeline_of(report: Report) -> Timeline:
    assert report.timeline is not None, report.no_timeline
    return report.timeline


def one_step(chip: str) -> str:
    """What a timeline of Llama 3.2 1B's AdamW step costs and tells, as a line of the second table."""
    config = llamem.LlamaConfig.from_name("llama3.2-1b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    step, state, batch = llamem.abstract_step(config, llamem.TrainSettings(batch_size=1, seq_len=8192), llamem.Plan())
    seconds: dict[str, float] = {}

    def timed(name: str, fn: Any) -> Any:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            answer = fn(*args)
            seconds[name] = time.perf_counter() - start
            return answer

        return run

    reading = mock.patch.object(dump, "read_schedule", timed("read", dump.read_schedule))
    making = mock.patch.object(compiling.Timeline, "from_schedule", timed("make", Timeline.from_schedule))
    with reading, making:
        report = jaxmem.compile_report(step, state, batch, donate_argnums=(0,), chip=chip, cache=False)
    one = timeline_of(report)
    start = time.perf_counter()
    at_peak = one.at_peak()
    seconds["make"] += time.perf_counter() - start
    named = sum(buffer.bytes for buffer in at_peak if buffer.category != "other") / one.peak_bytes
    start = time.perf_counter()
    page = plots.timeline_page({"1B": report})
    seconds["page"] = time.perf_counter() - start
    return (
        f"| {chip} | {one.steps:,} | {len(one.buffers):,} | {one.peak_bytes / MiB:,.1f} | {100 * named:.2f} | "
        f"{report.compile_seconds:.1f} | {seconds['read']:.2f} | {seconds['make']:.2f} | {seconds['page']:.2f} | "
        f"{size_text(len(page.html))} | {first_paint(page)} |"
    )


def first_paint(page: Page) -> str:
    """Seconds until Chromium first shows the page, by its own clock; "" where there is no Chromium."""
    if (chromium := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        return ""
    entries = "entries => entries.getEntries().forEach(one => console.log(one.name, one.startTime))"
    tell = f"<head><script>new PerformanceObserver({entries}).observe({{type: 'paint', buffered: true}})</script>"
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page.html.replace("<head>", tell))
        picture = f"--screenshot={folder}/page.png"  # without one nothing is painted
        command = [chromium, *flags, picture, file.as_uri()]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr
    painted = re.search(r"first-contentful-paint ([\d.]+)", told)
    return f"{float(painted[1]) / 1000:.2f}" if painted else ""


def write(line: str) -> None:
    """Puts a line into its table, in place of the one of the same program and chip, and keeps the others."""
    peaks: dict[tuple[str, str], str] = {}
    steps: dict[str, str] = {}
    for one in (*(TABLE.read_text().splitlines() if TABLE.exists() else ()), line):
        cells = [cell.strip() for cell in one.strip("|").split("|")]
        if cells[0] in PROGRAMS:
            peaks[cells[0], cells[1]] = one
        elif cells[0] in CHIPS:
            steps[cells[0]] = one
    lines = [peaks[name, chip] for chip in CHIPS for name in PROGRAMS if (name, chip) in peaks]
    head = HEAD.format(date=datetime.date.today(), versions=compilers_used("tpu", "cuda"))
    text = head + "\n".join(lines) + "\n\n" + STEP
    TABLE.write_text(text + "\n".join(steps[chip] for chip in CHIPS if chip in steps) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="*", default=CHIPS, choices=CHIPS)
    parser.add_argument("--programs", nargs="+", default=tuple(PROGRAMS), choices=tuple(PROGRAMS))
    parser.add_argument("--steps", nargs="*", default=("v5e-1", "a100-40"), choices=CHIPS)
    chosen = parser.parse_args()
    open_books = []
    for chip in chosen.chips:
        for name in chosen.programs:
            line, closes = compared(name, chip)
            print(line, flush=True)
            open_books += [] if closes else [f"{name} on {chip}"]
            write(line)
    for chip in chosen.steps:
        line = one_step(chip)
        print(line, flush=True)
        write(line)
    raise SystemExit(f"books that do not close: {open_books}" if open_books else 0)


if __name__ == "__main__":
    main()
