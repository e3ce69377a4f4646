"""Memory against time to touch: one HTML page of its own, without a network, that a notebook shows in a frame."""

import dataclasses
import html
import json
from collections import defaultdict
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jaxmem.common.files import write_whole
from jaxmem.reading.timeline import CATEGORIES, Timeline
from jaxmem.report import Report
from llamem_course.timeline_figure import (
    COLOURS,
    UNITS,
    drawn_capacity,
    drawn_steps,
    passes_drawn,
    timeline_alt,
    timelines,
    unit_of,
)

# What is smaller than this share of the peak is drawn together with others of its category, and so is what comes after
# the most: a thousandth of the figure's height is less than a pixel.
_SMALLEST, _MOST = 1 / 1000, 400


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of HTML; as a notebook cell's last line it is shown. `html` is the whole of it."""

    html: str = dataclasses.field(repr=False)  # a notebook stores the words beside the page
    height: int

    def write(self, path: str | Path) -> None:
        """Write the page into a file that any browser opens."""
        write_whole(Path(path), self.html)

    def _repr_html_(self) -> str:
        frame = (
            f'style="width:100%;height:{self.height}px;border:0" title="Memory against time" sandbox="allow-scripts"'
        )
        return f'<iframe srcdoc="{html.escape(self.html)}" {frame}></iframe>'


def timeline_page(reports: Mapping[str, Report | Timeline]) -> Page:
    """Return the figure of `plots.timeline` to hover over, zoom and click: a buffer tells its life, bytes and line.

    Works by keyboard too, and in light and dark. GitHub shows no such page: draw `plots.timeline` first. Raises
    ValueError for a report without a timeline.
    """
    found = timelines(reports)
    unit, drawn = unit_of(found), drawn_steps(found)
    top = 1.06 * max(max(one.peak_bytes, drawn_capacity(one)) for one in found.values())
    data = {
        "units": UNITS,
        "unit": unit,
        "top": top,
        "tick": _tick(top / unit[1]) * unit[1],
        "colours": COLOURS,
        "programs": [_program(name, one) | {"drawnSteps": drawn[name]} for name, one in found.items()],
    }
    text = resources.files("llamem_course").joinpath("timeline_page.html").read_text(encoding="utf-8")
    page = text.replace("/*DATA*/", json.dumps(data, separators=(",", ":")).replace("</", "<\\/"))
    return Page(page, height=300 * ((len(found) + 1) // 2) + 300)


def _tick(top: float) -> float:
    """Return a round distance between lines, of which about five fit below the top."""
    power = 10.0 ** len(str(int(top / 5))) / 10 if top >= 5 else 0.1
    return next(step * power for step in (1, 2, 5, 10, 20) if top / (step * power) <= 7)


def _program(name: str, one: Timeline) -> dict[str, Any]:
    texts: dict[str, int] = {}
    fits = ("; fits" if one.fits else "; does not fit") if one.capacity_bytes else ""
    unit, n_bytes = unit_of({name: one})
    return {
        "name": name,
        "verdict": f"{one.peak_bytes / n_bytes:.2f} {unit} at the peak{fits}",
        "alt": timeline_alt({name: one}),
        "chip": one.chip,
        "capacity": one.capacity_bytes,
        "steps": one.steps,
        "peakStep": one.peak_step,
        "passes": passes_drawn(one),
        "loops": [[loop.first, loop.end, loop.trips] for loop in one.loops],
        "steps_of": [texts.setdefault(operation, len(texts)) for operation in one.operations],
        "operations": list(texts),
        "bands": _bands(one),
        "host": _run_lengths(one.curve("host")) if one.curve("host").any() else [],
    }


def _bands(one: Timeline) -> list[dict[str, Any]]:
    runs = one.runs()
    rank = sorted(runs, key=lambda i: -max(size for _, _, size in runs[i]))
    alone = {i for i in rank[:_MOST] if max(size for _, _, size in runs[i]) > _SMALLEST * one.peak_bytes}
    rest: dict[str, Any] = defaultdict(lambda: [0] * one.steps)
    for i in set(runs) - alone:
        for first, last, size in runs[i]:
            for step in range(first, last + 1):
                rest[one.buffers[i].category][step] += size
    bands = []
    for category in CATEGORIES:
        of_category = [i for i in alone if one.buffers[i].category == category]
        for i in sorted(of_category, key=lambda i: (one.buffers[i].first, -one.buffers[i].last)):
            bands.append(_band(one, i, runs[i]))
        if category in rest:
            size = max(rest[category])
            bands.append(
                {"name": "smaller ones, together", "category": category, "size": size, "first": 0}
                | {"last": one.steps - 1, "shape": "", "pass": "", "operation": "", "source": ""}
                | {"runs": _run_lengths(rest[category])}
            )
    return bands


def _band(one: Timeline, number: int, runs: list[tuple[int, int, int]]) -> dict[str, Any]:
    buffer = one.buffers[number]
    names = ("name", "category", "first", "last", "shape", "operation", "source")
    return {name: getattr(buffer, name) for name in names} | {
        "size": buffer.bytes,
        "pass": buffer.made_in,
        "runs": runs,
    }


def _run_lengths(values: Any) -> list[tuple[int, int, int]]:
    """(first, last, value) of each stretch of equal values that are not 0."""
    rows: list[tuple[int, int, int]] = []
    for step, value in enumerate(map(int, values)):
        if rows and rows[-1][1] == step - 1 and rows[-1][2] == value:
            rows[-1] = (rows[-1][0], step, value)
        elif value:
            rows.append((step, step, value))
    return rows
