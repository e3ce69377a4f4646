"""Where the logits lie while a loss is computed: each array in its place in memory, from the operation that makes it
to the last that reads it.
"""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxmem.reading.timeline import Span, Timeline
from jaxmem.report import GiB, Report
from llamem_course.timeline_figure import COLOURS, timelines

LOGITS, GRADIENT = COLOURS["logits"], "#e76300"


def logits_of(one: Timeline) -> list[Span]:
    """Return the arrays of logits that count at the peak, and of their gradients, first to last."""
    large = [span for span in one.buffers if span.category == "logits" and span.bytes > 0.05 * one.peak_bytes]
    return sorted(large, key=lambda span: span.first)


def fullest_step(one: Timeline) -> int:
    """Return the step of the loss at which most memory is in use; of the program where there are no such arrays."""
    arrays = logits_of(one)
    if not arrays:
        return one.peak_step
    begin, end = arrays[0].first, max(span.last for span in arrays) + 1
    return begin + int(one.curve()[begin:end].argmax())


def tower(reports: Mapping[str, Report | Timeline]) -> Figure:
    """Draw the operations around the loss: arrays of logits in their places, on top of all else; `tower_alt` tells it.

    Raises ValueError where a report has no timeline.
    """
    found = timelines(reports)
    fig, axes = plt.subplots(1, len(found), figsize=(8, 3.4), sharey=True, squeeze=False, layout="constrained")
    steps = {name: fullest_step(one) for name, one in found.items()}
    heights = {name: one.curve()[steps[name]] / GiB for name, one in found.items()}
    for ax, (name, one) in zip(axes.flat, found.items(), strict=True):
        height = heights[name]
        ax.set_title(f"{name}: {height:.1f} GiB", loc="left", fontweight="bold", fontsize=10.5)
        ax.set_xlabel("operation of the compiled program")
        ax.set_ylim(0, 1.2 * max(heights.values()))
        _draw(ax, one, steps[name], height)
    axes[0, 0].set_ylabel("place in memory, GiB")
    return fig


def tower_alt(reports: Mapping[str, Report | Timeline]) -> str:
    """Return what `tower` shows, in words."""
    words = ["Arrays of logits in memory around the loss, from operation to operation."]
    for name, one in timelines(reports).items():
        step, arrays = fullest_step(one), logits_of(one)
        lives = {"forward": "", "backward": ""}
        for made_in in lives:
            lives[made_in] = ", ".join(f"{a.first} to {a.last}" for a in arrays if a.made_in == made_in) or "never"
        words.append(
            f"{name}: logits {lives['forward']}; their gradient {lives['backward']}; "
            f"highest at operation {step}, {one.curve()[step] / GiB:.1f} GiB."
        )
    return " ".join(words)


def _draw(ax: Axes, one: Timeline, step: int, height: float) -> None:
    arrays = logits_of(one)
    begin, end = (arrays[0].first, max(a.last for a in arrays) + 1) if arrays else (0, one.steps)
    margin = max(2, (end - begin) // 7)
    left, right = max(0, begin - margin), min(one.steps, end + margin)
    alive = [span for span in arrays if span.first <= step <= span.last]
    floor = height - sum(span.bytes for span in alive) / GiB
    ax.set_xlim(left, right)
    ax.fill_between([left, right], 0, floor, color="#dadada", linewidth=0)
    ax.text((left + right) / 2, floor / 2, "weights, moments, layers' inputs", ha="center", va="center", fontsize=9)
    lowest = min((span.offset for span in arrays), default=0)
    logits = [span for span in arrays if span.made_in == "forward"]
    gradient = [span for span in arrays if span.made_in != "forward"]
    for spans, colour in ((logits, LOGITS), (gradient, GRADIENT)):
        for span in spans:
            low, width = floor + (span.offset - lowest) / GiB, span.last + 1 - span.first
            ax.bar(span.first, span.bytes / GiB, width, low, align="edge", color=colour, linewidth=0)
    for number, span in enumerate(logits):
        _name(ax, "logits again" if number else "logits", span, span.last, floor + (span.offset - lowest) / GiB)
    if gradient:  # a second operation may write into the same array
        first, last = gradient[0], gradient[-1].last
        _name(ax, "their gradient", first, last, floor + (first.offset - lowest) / GiB)
    note = "" if gradient else "no array of the gradient"
    if len(alive) > 1 and alive[-1] in gradient:
        note = "this operation reads the logits\nand writes their gradient"
    top = (step + 0.5, height)
    ax.plot(*top, marker="v", color="black", markersize=6, clip_on=False)
    ax.annotate(note, top, xytext=(-7, 2), textcoords="offset points", ha="right", fontsize=9)


def _name(ax: Axes, word: str, span: Span, last: int, low: float) -> None:
    """Write a word into an array's rectangle, upwards, where it has room."""
    size = span.bytes / GiB
    if size > 0.25 * ax.get_ylim()[1]:
        place = {"ha": "center", "va": "center", "rotation": 90, "fontsize": 8.5, "color": "white"}
        ax.text((span.first + last + 1) / 2, low + size / 2, word, **place)
