"""Draws the README's picture from the TPU compiler: `python benchmarks/headline.py`, into notebooks/headline.png."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import llamem
from llamem_course import plots
from llamem_course.baseline import lean_loss, step_peak
from llamem_course.timeline_figure import COLOURS

MODEL, TOKENS, CHIP = "llama3.2-1b", 32_768, "v5e-1"
# All three rematerialise their layers in a scan. The second is the best loss without tiles that we know: logits and
# their gradient in 16 bits, each computed once.
PROGRAMS: dict[str, dict[str, Any]] = {
    "f32 logits": dict(plan=llamem.Plan(loss_tiles=None)),
    "bf16 logits": dict(loss=lean_loss),
    "tiled loss": {},
}
# What is written beside the logits of each: where the arrow points, and where the words stand.
NOTES = (
    ("logits and their\ngradient, 15.7 GiB each", 285, 28, (390, 33)),
    ("logits, 7.8 GiB", 255, 16.5, (350, 24)),
    ("logits a tile\nat a time", 405, 9.8, (480, 24)),
)
ALONE = {"neither": llamem.Plan(remat=None, loss_tiles=None), "tiled loss, no remat": llamem.Plan(remat=None)}


def simplify(figure: Figure) -> None:
    """Makes of the notebooks' timeline a picture for a column of GitHub's: fewer words, larger ones, higher hills."""
    figure.set_size_inches(10, 4.2)
    for ax, (note, step, height, beside) in zip(figure.axes, NOTES, strict=True):
        ax.set_ylim(0, 43)
        ax.set_yticks(range(0, 50, 10))
        ax.set_xticks(range(0, 900, 200))  # none at the edge, where it runs into the next panel's 0
        ax.set_xlabel("operations, first to last")
        for text in ax.texts:
            if text.get_text() == "optimizer" and text.get_position()[1] > 2:  # the area, not the pass
                text.set(text="AdamW's moments", position=(500, 4.5), bbox=None)
            elif text.get_text().startswith("largest"):
                text.set_visible(False)
            elif text.get_text().startswith("x "):
                text.set_text(f"{text.get_text()[2:]} layers")
            elif text.get_text().startswith(CHIP):
                text.set(text="one v5e: 15.75", position=(0.99 * ax.get_xlim()[1], 16), ha="right")
            text.set_fontsize(9)
        arrow = dict(arrowstyle="->", color=COLOURS["logits"])
        where = dict(xytext=beside, fontsize=9, color=COLOURS["logits"], va="center")
        ax.annotate(note, (step, height), arrowprops=arrow, **where)


def main() -> None:
    reports = {name: step_peak(MODEL, TOKENS, CHIP, **how) for name, how in PROGRAMS.items()}
    alone = {name: step_peak(MODEL, TOKENS, CHIP, plan=plan) for name, plan in ALONE.items()}
    short = {f"{name}, 8,192 tokens": step_peak(MODEL, 8192, CHIP, **how) for name, how in PROGRAMS.items()}
    for name, report in (reports | alone | short).items():
        if report is None:
            raise SystemExit(f"No compiler for {CHIP} here: python -m jaxmem compilers")
        print(f"{name:28}{report.peak_bytes / 2**30:6.1f} GiB")
    drawn = {name: report for name, report in reports.items() if report}
    figure = plots.timeline(drawn)
    simplify(figure)
    figure.savefig(Path(__file__).parent.parent / "notebooks" / "headline.png", dpi=160)
    print(plots.timeline_alt(drawn))


if __name__ == "__main__":
    main()
