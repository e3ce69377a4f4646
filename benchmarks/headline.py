"""Draws the README's picture from the TPU compiler: `python benchmarks/headline.py`, into notebooks/headline.png."""

from pathlib import Path
from typing import Any

import llamem
from llamem.course import plots
from llamem.course.baseline import lean_loss, step_peak

MODEL, TOKENS, CHIP = "llama3.2-1b", 32_768, "v5e-1"
# All three rematerialise their layers in a scan. The second is the best loss without tiles that we know: logits and
# their gradient in 16 bits, nothing computed twice.
PROGRAMS: dict[str, dict[str, Any]] = {
    "f32 logits": dict(plan=llamem.Plan(loss_tiles=None)),
    "bf16 logits": dict(loss=lean_loss),
    "tiled loss": {},
}
ALONE = {"neither": llamem.Plan(remat=None, loss_tiles=None), "tiled loss, no remat": llamem.Plan(remat=None)}


def main() -> None:
    reports = {name: step_peak(MODEL, TOKENS, CHIP, **how) for name, how in PROGRAMS.items()}
    alone = {name: step_peak(MODEL, TOKENS, CHIP, plan=plan) for name, plan in ALONE.items()}
    short = {f"{name}, 8,192 tokens": step_peak(MODEL, 8192, CHIP, **how) for name, how in PROGRAMS.items()}
    for name, report in (reports | alone | short).items():
        if report is None:
            raise SystemExit(f"No compiler for {CHIP} here: pip install libtpu, on Linux x86-64.")
        print(f"{name:28}{report.peak_bytes / 2**30:6.1f} GiB")
    drawn = {name: report for name, report in reports.items() if report}
    figure = plots.timeline(drawn)
    title = f"One training step of Llama 3.2 1B, {TOKENS:,} tokens, rematerialised, on one 16 GB TPU v5e"
    figure.suptitle(title, fontweight="bold")
    figure.savefig(Path(__file__).parent.parent / "notebooks" / "headline.png", bbox_inches="tight")
    print(plots.timeline_alt(drawn))


if __name__ == "__main__":
    main()
