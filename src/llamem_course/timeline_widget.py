"""A slider over a program's schedule: what fills the chip at each step, and who, largest first."""

import html
from itertools import pairwise
from typing import Any

import ipywidgets as widgets
import numpy as np

from jaxmem.common.printing import size_text
from jaxmem.reading.timeline import Span, Timeline
from jaxmem.report import Report
from llamem_course.timeline_figure import COLOURS, drawn_capacity, pass_drawn_at, timelines

_WIDTH, _HEIGHT, _COLUMNS = 640, 120, 320  # of the picture, in pixels; and into how many columns it puts the steps
_HEAD = ("", "in use", "what", "shape", "steps", "operation", "line")


def timeline_slider(report: Report | Timeline, largest: int = 10) -> widgets.VBox:
    """Return a slider over a program's steps, a button that plays them, and what lies in memory at that step.

    The hill is the memory in use over the whole schedule, the bar in it that of the step by category, and the table
    holds the `largest` buffers. As a cell's last line it is shown; it answers as long as the kernel runs, and what is
    stored of it shows nothing: draw `plots.timeline` first. Raises ValueError for a report without a timeline.
    """
    one = timelines({"this program": report})["this program"]
    hill = _hill(one)
    slider = widgets.IntSlider(
        value=one.peak_step,
        max=one.steps - 1,
        description="step",
        layout=widgets.Layout(width=f"{_WIDTH}px"),
    )
    play = widgets.Play(max=one.steps - 1, step=max(one.steps // 100, 1), interval=150)
    widgets.jslink((play, "value"), (slider, "value"))
    shown = widgets.HTML(_step(one, hill, one.peak_step, largest))

    def follow(change: dict[str, Any]) -> None:
        shown.value = _step(one, hill, change["new"], largest)

    slider.observe(follow, names="value")
    return widgets.VBox([widgets.HBox([slider, play]), shown])


def _hill(one: Timeline) -> str:
    """Return the memory in use at each step, the highest of each column, as a path of SVG."""
    curve = one.curve() / _top(one)
    edges = np.linspace(0, one.steps, min(one.steps, _COLUMNS) + 1).astype(int)
    heights = [_HEIGHT * (1 - curve[first:end].max()) for first, end in pairwise(edges)]
    points = " ".join(
        f"L{_WIDTH * x / one.steps:.1f} {y:.1f}" for ends, y in zip(pairwise(edges), heights, strict=True) for x in ends
    )
    return f'<path d="M0 {_HEIGHT} {points} L{_WIDTH} {_HEIGHT} Z" fill="#c9ccd1"/>'


def _top(one: Timeline) -> float:
    return 1.05 * (max(one.peak_bytes, drawn_capacity(one)) or 1)


def _step(one: Timeline, hill: str, step: int, largest: int) -> str:
    in_use = int(one.curve()[step])
    name_of_pass = pass_drawn_at(one, step)
    where = f", {name_of_pass} pass" if name_of_pass else ""
    turns = [loop.trips for loop in one.loops if loop.first <= step < loop.end]
    where += "".join(f", in a loop of {trips or 'an unknown number of'} turns" for trips in turns)
    operation = one.operations[step] if step < len(one.operations) else "the end: what the program puts out"
    capacity = f" of {size_text(one.capacity_bytes)}" if one.capacity_bytes else ""
    title = f"Step {step} of {one.steps}{where}: {size_text(in_use)}{capacity} in use"
    alive = one.alive(step)
    head = "".join(f"<th>{cell}</th>" for cell in _HEAD)
    table = f"<table><tr>{head}</tr>{''.join(map(_row, alive[:largest]))}</table>"
    rest = sum(buffer.bytes for buffer in alive[largest:])
    smaller = f"<p>{len(alive) - largest} smaller ones hold {size_text(rest)}.</p>" if rest else ""
    return f"{_picture(one, hill, step)}<p><b>{title}</b><br>{html.escape(operation)}</p>{table}{smaller}"


def _row(buffer: Span) -> str:
    life = f"{buffer.first} to {buffer.last}"
    cells = (size_text(buffer.bytes), buffer.category, buffer.shape, life, buffer.operation, buffer.source)
    square = f'<td style="color:{COLOURS[buffer.category]}">&#9632;</td>'
    return f"<tr>{square}{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _picture(one: Timeline, hill: str, step: int) -> str:
    scale, x = _HEIGHT / _top(one), _WIDTH * (step + 0.5) / one.steps
    bars, base = [], 0.0
    for category, sizes in one.by_category().items():
        height = sizes[step] * scale
        place = f'x="{x - 4:.1f}" width="8" y="{_HEIGHT - base - height:.1f}" height="{height:.1f}"'
        bars.append(f'<rect {place} fill="{COLOURS[category]}"><title>{category}</title></rect>')
        base += height
    if capacity := drawn_capacity(one):
        y = _HEIGHT - capacity * scale
        bars.append(f'<path d="M0 {y:.1f} H{_WIDTH}" stroke="currentColor" stroke-dasharray="6 4"/>')
    label = f"Memory in use over {one.steps} steps; at step {step} {size_text(int(one.curve()[step]))}"
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f"{hill}{''.join(bars)}</svg>"
    )
