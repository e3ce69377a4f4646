"""The figures of notebook 08: what fills the chip during a step, and what each tool costs at each length."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxmem.reading.timeline import Timeline
from jaxmem.report import GiB
from llamem_course.plots import MARKERS
from llamem_course.timeline_figure import COLOURS, passes_drawn

LINES = {"weights": "weights", "optimizer": "moments", "gradients": "gradients", "residuals": "inputs"}
AT_WORK = "at work"


def _by_line(timeline: Timeline) -> dict[str, np.ndarray]:
    """Return GiB in use at each step of a program, by the line of the notebook's ledger."""
    lines = {name: np.zeros(timeline.steps) for name in (*LINES.values(), AT_WORK)}
    for category, sizes in timeline.by_category().items():
        lines[LINES.get(category, AT_WORK)] += sizes / GiB
    return lines


def _named(ax: Axes, lines: Mapping[str, np.ndarray], top: float) -> None:
    """Write each line's name into its area, at the middle of where it is thickest; not where there is no room."""
    below = np.zeros_like(next(iter(lines.values())))
    for name, size in lines.items():
        where = np.flatnonzero(size >= 0.8 * size.max())
        middle = where[len(where) // 2]
        if name == AT_WORK:  # a peak is too thin for its name
            peak = int(np.argmax(below + size))
            at, beside = (peak, 0.95 * (below + size)[peak]), (0.66 * peak, 0.85 * (below + size)[peak])
            style = {"fontsize": 10, "fontweight": "bold", "bbox": {"fc": "white", "ec": "none", "pad": 1}}
            ax.annotate(name, at, beside, ha="center", va="center", arrowprops={"arrowstyle": "->"}, **style)
        elif size[middle] > 0.045 * top and len(where) > 0.1 * len(size):
            ax.text(middle, below[middle] + size[middle] / 2, name, ha="center", va="center", fontsize=9)
        below = below + size


def steps_drawn(reports: Mapping[str, Any]) -> Figure:
    """Draw what is in use on the chip, and waits on the host, a panel for each report with a timeline."""
    fig, axes = plt.subplots(1, len(reports), figsize=(9.5, 4), sharey=True, squeeze=False, layout="constrained")
    colours = [COLOURS[name] for name in (*LINES, "rematerialised")]
    top = max(report.peak_bytes for report in reports.values()) / GiB
    for ax, (name, report) in zip(axes.flat, reports.items(), strict=True):
        timeline = report.timeline
        lines, host = _by_line(timeline), timeline.curve("host") / GiB
        steps = np.arange(timeline.steps)
        ax.stackplot(steps, *lines.values(), labels=list(lines), colors=colours, step="post")
        _named(ax, lines, top)
        if host.max() > 0.02 * top:
            ax.step(steps, host, "k:", where="post", linewidth=1.6)
            where = np.flatnonzero(host > 0.95 * host.max())
            ax.text(where[-1], host.max(), " waits on the host", va="center", fontsize=9)
        if report.capacity_bytes:
            offers = report.capacity_bytes / GiB
            ax.axhline(offers, color="black", linestyle="--", linewidth=1.2)
            ax.text(
                0.01, offers + 0.01 * top, "the chip offers this" if ax is axes[0, -1] else "", va="bottom", fontsize=9,
                transform=ax.get_yaxis_transform(),
            )  # fmt: skip
        for part, first, end in passes_drawn(timeline):
            ax.axvline(first, color="black", linewidth=0.7, alpha=0.6)
            ax.text(
                (first + end) / 2, 1.0, part, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=9
            )
        ax.set_xlim(0, timeline.steps)
        ax.set_xlabel("operations of the compiled program, in their order")
        ax.set_title(
            f"{name}: peak {report.peak_bytes / GiB:.2f} GiB", loc="left", fontweight="bold", fontsize=10.5, pad=20
        )
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("GiB in use")
    return fig


def steps_drawn_alt(reports: Mapping[str, Any]) -> str:
    """Return what `steps_drawn` shows, in words."""
    told = ["Memory in use on the chip during a step, by the ledger's lines, in GiB."]
    for name, report in reports.items():
        timeline = report.timeline
        parts = ", ".join(f"{line} {row[timeline.peak_step]:.1f}" for line, row in _by_line(timeline).items())
        told.append(f"{name}: {report.peak_bytes / GiB:.2f}. At the highest point {parts}.")
    return " ".join(told)


def tool_prices(tools: Sequence[str], cost: Mapping[int, Sequence[float]]) -> Figure:
    """Draw the share of a step's time that each tool adds, against the length of the sequence."""
    fig, ax = plt.subplots(figsize=(8.5, 3.8), layout="constrained")
    lengths, least = [*cost], 1e-4
    for n, (tool, marker) in enumerate(zip(tools, MARKERS, strict=False)):
        shares = [max(cost[length][n], least) for length in lengths]
        ax.plot(lengths, [100 * share for share in shares], marker=marker)
        for end, side, apart in ((0, "right", -8), (-1, "left", 8)):
            share = cost[lengths[end]][n]
            text = f"{tool}: {share:.0%}" if end == 0 else f"{share:.1%}" if share > 5e-4 else "under 0.1%"
            at = lengths[end], 100 * shares[end]
            ax.annotate(text, at, (apart, 0), textcoords="offset points", ha=side, va="center", fontsize=10)
    ax.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="% more time (estimated)")
    ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlim(lengths[0] / 2.6, lengths[-1] * 1.8)
    return fig


def tool_prices_alt(tools: Sequence[str], cost: Mapping[int, Sequence[float]]) -> str:
    """Return what `tool_prices` shows, in words."""
    more = [
        f"{tool} at {length:,} tokens: {cost[length][n]:.1%}."
        for n, tool in enumerate(tools)
        for length in (min(cost), max(cost))
    ]
    return "Lines: more time for a step with each tool, against the tokens of the sequence. " + " ".join(more)
