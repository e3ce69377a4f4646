"""Memory against time as a figure: what fills a chip at each step of a program, several programs on equal axes."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxmem.reading.timeline import CATEGORIES, Span, Timeline
from jaxmem.report import Report

# Of petroff10, so that neighbours in the stack stay distinct for colour-blind readers; the output is hatched as well.
COLOURS: dict[str, str] = dict(
    zip(
        CATEGORIES,
        (
            "#3f90da", "#92dadd", "#b9ac70", "#a96b59", "#ffa90e",
            "#bd1f01", "#832db6", "#94a4a2", "#dadada", "#717581",
        ),
        strict=True,
    )
)  # fmt: skip
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_HOST = "on the host"
Over = Literal["operations", "seconds"]
_DARK = {"optimizer", "batch", "residuals", "workspace", "output"}  # light colours, which take dark letters
_HATCHED: dict[str, Any] = {"hatch": "////", "edgecolor": "0.45"}  # what is set aside for the output


def timelines(reports: Mapping[str, Report | Timeline]) -> dict[str, Timeline]:
    """Return the timelines of reports, by name. Raise ValueError where there is none, or no report at all."""
    if not reports:
        raise ValueError("timeline({}): give at least one report, as {'name': compile_report(...)}.")
    found: dict[str, Timeline] = {}
    for name, report in reports.items():
        if isinstance(report, Timeline):
            found[name] = report
        elif report.timeline is not None:
            found[name] = report.timeline
        else:
            raise ValueError(
                f"the report {name!r} has no timeline: {report.no_timeline} `plots.report_bars` draws its peak."
            )
    return found


def unit_of(found: Mapping[str, Timeline]) -> tuple[str, int]:
    """Return the unit that suits the highest of several peaks, and its bytes."""
    highest = max(timeline.peak_bytes for timeline in found.values())
    return next((unit for unit in UNITS if highest >= unit[1]), UNITS[-1])


def drawn_steps(found: Mapping[str, Timeline]) -> dict[str, int]:
    """Return steps of each program's axis: those of the longest, or its own where one has under a third of them."""
    steps = {name: one.steps for name, one in found.items()}
    most = max(steps.values())
    return dict.fromkeys(steps, most) if most <= 3 * min(steps.values()) else steps


def edges_drawn(one: Timeline, over: Over) -> np.ndarray:
    """Return where each step begins on the axis, and where the last one ends: numbers of operations, or milliseconds.

    An operation of a loop has the milliseconds of all its turns. Raise ValueError where the compiler was not asked.
    """
    if over == "operations":
        return np.arange(one.steps + 1)
    if not one.seconds:
        raise ValueError(
            f"no operation of this program for {one.chip} has an estimate of its seconds: a TPU's compiler has them, "
            'and says so if it is asked to the end, compile_report(..., chip="v5e-1", depth="code").'
        )
    seconds = np.zeros(one.steps)
    seconds[: len(one.seconds)] = one.seconds
    return np.append(0, 1000 * np.cumsum(seconds))


def passes_drawn(one: Timeline) -> list[tuple[str, int, int]]:
    """Return the passes as they are told to a reader: a border inside a loop is moved to where that loop begins.

    From a loop's last tenth it is moved to the end: compilers pull a little of what follows into a loop. A loop that
    updates what it differentiates is one part of the program, "backward and optimizer". A loop that
    begins with the program, over parts of a batch, holds all passes, and their borders stay.
    """
    inner = [loop for loop in one.loops if loop.first > 0.1 * one.steps]
    starts: dict[int, list[str]] = {}
    for name, first, _ in one.passes:
        around = [loop for loop in inner if loop.first < first < loop.end]
        if around:
            outer = min(around, key=lambda loop: loop.first)
            late = first > outer.end - 0.1 * (outer.end - outer.first)
            first = outer.end if late else outer.first
        starts.setdefault(first, []).append(name)
    ends = [*starts, one.steps][1:]
    return [(" and ".join(names), first, end) for (first, names), end in zip(starts.items(), ends, strict=True)]


def pass_drawn_at(one: Timeline, step: int) -> str:
    """Return the part of the program that a step belongs to, as `passes_drawn` names it; "" where nothing is known."""
    return next((name for name, first, end in passes_drawn(one) if first <= step < end), "")


def largest_made(timeline: Timeline, count: int = 3) -> list[Span]:
    """Return the largest buffers at the peak that the program makes itself, beside what the caller holds."""
    return [buffer for buffer in timeline.at_peak() if buffer.name not in ("argument", "constant")][:count]


def timeline(
    reports: Mapping[str, Report | Timeline], over: Over = "operations", notes: Mapping[str, str] | None = None
) -> Figure:
    """Device memory over the schedule of each program, by category, on equal axes; `timeline_alt` says it in words.

    `over="seconds"`: each operation is as wide as it takes long, by the estimate of a TPU's compiler, loops in all
    their turns.

    Where one schedule has over three times the steps of another, each stands on steps of its own; bytes stay equal.
    The title has the highest point, what the compiler set aside where gaps make it more, and who fits where not all
    do. Passes are marked, and loops with how often they run; the dashed line is what the chip offers. At the peak stand
    the three largest buffers that the program makes, or its sentence of `notes`. Memory on the host, where there is
    any, is a line of its own, or a number where it lies far above the axis.
    Raises ValueError for a report without a timeline, and for one without seconds where these are to be drawn.
    """
    found = timelines(reports)
    edges = {name: edges_drawn(one, over) for name, one in found.items()}
    unit, n_bytes = unit_of(found)
    columns = 2 if len(found) in (2, 4) else min(len(found), 3)
    rows = math.ceil(len(found) / columns)
    drawn = drawn_steps(found) if over == "operations" else dict.fromkeys(found, max(e[-1] for e in edges.values()))
    same_steps = len(set(drawn.values())) == 1
    fig, axes = plt.subplots(
        rows,
        columns,
        figsize=((0, 8, 8.8, 10)[columns], 3.3 * rows + 0.6),  # at a page's width its letters are to be read
        sharex=same_steps,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    top = max(max(one.peak_bytes, drawn_capacity(one)) for one in found.values()) / n_bytes
    all_fit = all(one.fits for one in found.values())
    for ax, (name, one) in zip(axes.flat, found.items(), strict=False):
        ax.set_xlim(0, drawn[name])
        ax.set_ylim(0, (1.22 if notes else 1.38 if columns < 3 else 1.45) * top)  # room for what `_peak` writes
        _areas(ax, one, n_bytes, edges[name])
        _passes(ax, one, edges[name])
        _capacity(ax, one, n_bytes, unit, edges[name], noted=bool(notes))
        _peak(ax, one, n_bytes, edges[name], notes[name] if notes else "")
        verdict = "" if all_fit else ", fits" if one.fits else ", does not fit"
        title = f"{name}: {told_size(one, unit, n_bytes)}{verdict}"
        ax.set_title(title, loc="left", fontweight="bold", fontsize=9.5 if columns > 2 else 10.5, pad=27)
    for ax in axes.flat[len(found) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"{unit} in use")
    for ax in axes[-1] if same_steps else axes.flat:
        ax.set_xlabel("operation of the compiled program" if over == "operations" else "ms, the compiler's estimate")
    shown = {}
    for ax in axes.flat[: len(found)]:
        handles, labels = ax.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    order = [label for label in (*CATEGORIES, _HOST) if label in shown]
    across = len(order) if columns < 3 or len(order) < 8 else math.ceil(len(order) / 2)
    fig.legend([shown[label] for label in order], order, loc="outside lower center", ncols=across, frameon=False)
    return fig


def timeline_alt(reports: Mapping[str, Report | Timeline]) -> str:
    """Return what `timeline` shows, in words, for those who cannot see it."""
    found = timelines(reports)
    unit, n_bytes = unit_of(found)
    words = [f"Memory in use over the compiled schedule, by category, in {unit}."]
    for name, one in found.items():
        parts = {category: row[one.peak_step] for category, row in one.by_category().items()}
        told = sorted(((size, category) for category, size in parts.items()), reverse=True)[:4]
        shares = ", ".join(f"{category} {size / n_bytes:.1f}" for size, category in told)
        name_of_pass = pass_drawn_at(one, one.peak_step)
        where = f" in the {name_of_pass} pass" if name_of_pass else ""
        sentence = f"{name}: highest at {one.peak_bytes / n_bytes:.1f}{where}, of it {shares}"
        if one.gap_bytes > 0.01 * one.peak_bytes:
            sentence += f"; set aside {one.assigned_bytes / n_bytes:.1f}"
        if one.capacity_bytes:
            verdict = "within" if one.fits else "more than"
            sentence += f"; {verdict} the {one.capacity_bytes / n_bytes:.2f} that {one.chip} offers"
        words.append(sentence + ".")
    return " ".join(words)


def told_size(one: Timeline, unit: str, n_bytes: int) -> str:
    """Return the highest point, and what is set aside where gaps make a difference that is seen: "2.1 GiB, 3.0 ..."."""
    peak, aside = (f"{size / n_bytes:.1f}" for size in (one.peak_bytes, one.assigned_bytes))
    seen = aside != peak and one.gap_bytes > 0.01 * one.peak_bytes
    return f"{peak} {unit}" + (f", {aside} set aside" if seen else "")


def drawn_capacity(one: Timeline) -> int:
    """Return the capacity, where it lies near enough to the curve to be drawn."""
    capacity = one.capacity_bytes or 0
    return capacity if capacity <= 2 * one.peak_bytes else 0


def _areas(ax: Axes, one: Timeline, n_bytes: int, edges: np.ndarray) -> None:
    base = np.zeros(one.steps)
    even = np.ptp(np.diff(edges)) == 0  # else the legend alone says what an area is
    height = ax.get_ylim()[1]
    host = one.curve("host")
    for category, sizes in one.by_category().items():
        upper = base + sizes / n_bytes
        if sizes.any():
            lower_edge, upper_edge = np.append(base, base[-1]), np.append(upper, upper[-1])
            seen = sizes @ np.diff(edges) / n_bytes > 0.0004 * height * ax.get_xlim()[1]
            named = seen and sizes.max() / n_bytes > 0.004 * height  # else too thin, or too short, for the legend
            ax.fill_between(
                edges,
                lower_edge,
                upper_edge,
                step="post",
                facecolor=COLOURS[category],
                linewidth=0,
                label=category if named else None,
                **(_HATCHED if category == "output" else {}),
            )
            if even:
                _name_area(ax, category, base, upper, host / n_bytes)
        base = upper
    ax.step(edges, np.append(base, base[-1]), where="post", color="black", linewidth=0.7)
    if host.max(initial=0) / n_bytes > 2 * ax.get_ylim()[1]:
        least, most = (f"{size / n_bytes:.0f}" for size in (host.min(), host.max()))
        ax.text(0.98, 0.7, f"on the host: {least} to {most}", transform=ax.transAxes, ha="right", fontsize=_small(ax))
    elif host.any():
        edge = np.append(host, host[-1]) / n_bytes
        ax.step(edges, edge, where="post", color="black", linestyle=":", linewidth=1.6, label=_HOST)


def _small(ax: Axes) -> float:
    return 8 if len(ax.figure.axes) > 2 else 9


def _name_area(ax: Axes, category: str, lower: np.ndarray, upper: np.ndarray, host: np.ndarray) -> None:
    """Write the category's name inside its area, where a label of its width fits best, off the host's line."""
    width = math.ceil(0.02 * ax.get_xlim()[1] * len(category))
    if len(lower) <= width:
        return
    windows = np.lib.stride_tricks.sliding_window_view
    floor, ceiling = windows(lower, width).max(axis=1), windows(upper, width).min(axis=1)
    over = np.maximum(floor, windows(host, width).max(axis=1))
    under = np.minimum(ceiling, windows(host, width).min(axis=1))
    best = int(np.argmax(np.maximum(ceiling - over, under - floor)))
    low, high = max((over[best], ceiling[best]), (floor[best], under[best]), key=lambda part: part[1] - part[0])
    if high - low < 0.055 * ax.get_ylim()[1]:
        return
    style = {"color": "black" if category in _DARK else "white", "fontsize": _small(ax), "ha": "center", "va": "center"}
    frame = {"facecolor": COLOURS[category], "edgecolor": "none", "pad": 0.8}  # over the borders of passes
    ax.text(best + width / 2, (low + high) / 2, category, bbox=frame, **style)


def _passes(ax: Axes, one: Timeline, edges: np.ndarray) -> None:
    above = ax.get_xaxis_transform()
    for name, first, end in [(name, edges[first], edges[end]) for name, first, end in passes_drawn(one)]:
        if first:
            ax.axvline(first, color="black", linewidth=0.7, alpha=0.6)
        if end - first > 0.1 * ax.get_xlim()[1]:
            ax.text((first + end) / 2, 1.075, name, transform=above, ha="center", va="bottom", fontsize=9)
    drawn_to, named = -1, 0.03 if len(ax.figure.axes) == 1 else 0.06  # wide enough for a number
    for loop in one.loops:
        first, end = edges[loop.first], edges[loop.end]
        if first < drawn_to or end - first < 0.03 * ax.get_xlim()[1]:
            continue  # inside of one that is marked, or too short to be seen
        drawn_to = end
        ax.plot([first, end], [1.02, 1.02], transform=above, color="0.35", linewidth=2.2, clip_on=False)
        if loop.trips and end - first > named * ax.get_xlim()[1]:
            middle, trips = (first + end) / 2, f"x {loop.trips}"
            ax.text(middle, 1.025, trips, transform=above, ha="center", va="bottom", fontsize=_small(ax), color="0.35")


def _capacity(ax: Axes, one: Timeline, n_bytes: int, unit: str, edges: np.ndarray, noted: bool) -> None:
    capacity = (one.capacity_bytes or 0) / n_bytes
    if 0 < capacity <= ax.get_ylim()[1]:
        ax.axhline(capacity, color="black", linestyle="--", linewidth=1.2)
        steps = ax.get_xlim()[1]
        high = capacity > 0.7 * ax.get_ylim()[1] and not noted
        # Just under what `_peak` lists; else on the side away from the peak.
        left = (edges[one.peak_step] < 0.5 * steps) == high
        place = {"ha": "left" if left else "right", "va": "bottom", "fontsize": _small(ax)}
        frame = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.8}
        label = f"{one.chip}: {capacity:.2f} {unit}"
        ax.text((0.005 if left else 0.995) * steps, 1.015 * capacity, label, bbox=frame, **place)


def _peak(ax: Axes, one: Timeline, n_bytes: int, edges: np.ndarray, note: str) -> None:
    step, height = edges[one.peak_step], one.peak_bytes / n_bytes
    right = step < 0.5 * ax.get_xlim()[1]
    ax.plot(step, height, marker="v", color="black", markersize=6, clip_on=False)
    if note:
        ax.annotate(
            note,
            (step, height),
            xytext=(7 if right else -7, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="bottom",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},  # over borders of passes
        )
        return
    lines = ["largest at the peak:"]
    lines += [f"{buffer.bytes / n_bytes:.2f} {buffer.category}  {buffer.shape}" for buffer in largest_made(one)]
    ax.annotate(
        "\n".join(lines),
        (step, height),
        xytext=(0.98 if right else 0.02, 0.985),
        textcoords="axes fraction",
        ha="right" if right else "left",
        va="top",
        fontsize=_small(ax),
        linespacing=1.25,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
    )
