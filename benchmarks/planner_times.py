"""Seconds that the planner takes: a plan found with nothing kept, found again, and the explorer's redraw.

`python benchmarks/planner_times.py` writes planner_times.md beside itself, a line as soon as it is there; `--cases 0 2`
takes a part, and the other lines stay. Every line is three new processes: the first with an empty folder for what
compilers said, the second with what the first left there, which asks twice, the third moves a control of the explorer.
Times are those of the call, after imports, which are told apart.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compilers_used import compilers_used

TABLE = Path(__file__).with_suffix(".md")
CASES = (("llama3.2-1b", "v5e-1", 131_072), ("llama3.1-8b", "v5p-1", 8192), ("llama3.2-1b", "h100", 32_768))


def find(model: str, chip: str, seq_len: int) -> dict[str, float | int]:
    """Seconds of the imports, of a search and of the same one again, and how often the compiler was asked."""
    start = time.perf_counter()
    import jax.numpy as jnp

    import llamem

    imported = time.perf_counter()
    config = llamem.LlamaConfig.from_name(model, param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    found = llamem.find_plan(config, chip, seq_len=seq_len, progress=None)
    ended = time.perf_counter()
    llamem.find_plan(config, chip, seq_len=seq_len, progress=None)
    again = time.perf_counter() - ended
    return {"imports": imported - start, "seconds": ended - imported, "again": again, "asked": found.asked}


def redraw(model: str, chip: str, seq_len: int) -> dict[str, float]:
    """Seconds of a redraw of the explorer after a control was moved: the median and the longest of twenty."""
    from llamem_course.explorer import Explorer

    page, seconds = Explorer(model=model, chip=chip, seq_len=seq_len), []
    for turn in range(20):
        start = time.perf_counter()
        page.controls["mlp_tiles"].value = (1, 16)[turn % 2 == 0]
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds), "longest": max(seconds)}


def in_a_process(what: str, number: int, cache: str) -> dict[str, float]:
    """The answer of `find` or `redraw` from a new process."""
    command = [sys.executable, __file__, "--inside", what, "--cases", str(number)]
    done = subprocess.run(
        command, env={**os.environ, "LLAMEM_CACHE": cache}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measured(number: int) -> str:
    """A line of the table."""
    model, chip, seq_len = CASES[number]
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as cache:
        cold, kept = (in_a_process("find", number, cache) for _ in range(2))
        drawn = in_a_process("redraw", number, cache)
    again = f"{kept['seconds']:.1f} | {kept['again']:.1f}"
    seconds = f"{cold['seconds']:.1f} | {cold['asked']} | {again} | {kept['imports']:.1f}"
    redraws = f"{1000 * drawn['seconds']:.1f} | {1000 * drawn['longest']:.1f}"
    return f"| {model} | {chip} | {seq_len:,} | {seconds} | {redraws} | {busy:.1f} |"


def page(lines: dict[int, str]) -> str:
    versions = compilers_used()
    return "\n".join(
        [
            "# Seconds of the planner",
            "",
            f"{datetime.date.today()}, {versions}, {os.cpu_count()} CPU cores, by `benchmarks/planner_times.py`:",
            "`find_plan` in a new process with nothing kept of any compiler, and how often the compiler was asked;",
            "then in another one with what the first left, where the program is traced anew, and once more in that",
            "process; the imports before it, apart. Then the explorer: milliseconds from a moved control to the new",
            "bars, the median and the longest of twenty. Last, how many processes wanted a core when it was begun.",
            "",
            "| model | chip | tokens | cold, s | asked | kept, s | again, s | imports, s "
            "| redraw, ms | longest, ms | load |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *(lines[number] for number in sorted(lines)),
            "",
        ]
    )


def earlier_lines() -> dict[int, str]:
    lines = {}
    for line in TABLE.read_text().splitlines() if TABLE.exists() else ():
        cells = [cell.strip() for cell in line.split("|")]
        for number, (model, chip, seq_len) in enumerate(CASES):
            if cells[1:4] == [model, chip, f"{seq_len:,}"]:
                lines[number] = line
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(CASES)), choices=range(len(CASES)))
    parser.add_argument("--inside", choices=("find", "redraw"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps({"find": find, "redraw": redraw}[given.inside](*CASES[given.cases[0]])))
        return
    lines = earlier_lines()
    for number in given.cases:
        lines[number] = measured(number)
        print(lines[number], flush=True)
        TABLE.write_text(page(lines))


if __name__ == "__main__":
    main()
