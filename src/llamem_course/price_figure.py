"""The figures of notebook 08: what fills the chip during a step, and what each tool buys and costs."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from jaxmem.reading.timeline import Timeline
from jaxmem.report import GiB
from llamem_course.plots import HATCHES
from llamem_course.timeline_figure import COLOURS, passes_drawn

LINES = {"weights": "weights", "optimizer": "moments", "gradients": "gradients", "residuals": "inputs"}
AT_WORK = "at work"


def _by_line(timeline: Timeline) -> dict[str, np.ndarray]:
    """Return GiB in use at each step of a program, by the line of the notebook's ledger."""
    lines = {name: np.zeros(timeline.steps) for name in (*LINES.values(), AT_WORK)}
    for category, sizes in timeline.by_category().items():
        lines[LINES.get(category, AT_WORK)] += sizes / GiB
    return lines


def steps_drawn(reports: Mapping[str, Any]) -> Figure:
    """Draw what is in use on the chip, and waits on the host, a panel for each report with a timeline."""
    fig, axes = plt.subplots(1, len(reports), figsize=(9.5, 3.9), sharey=True, squeeze=False, layout="constrained")
    colours = [COLOURS[name] for name in (*LINES, "rematerialised")]
    for ax, (name, report) in zip(axes.flat, reports.items(), strict=True):
        timeline = report.timeline
        lines = _by_line(timeline)
        steps = np.arange(timeline.steps)
        ax.stackplot(steps, *lines.values(), labels=list(lines), colors=colours, step="post")
        ax.step(steps, timeline.curve("host") / GiB, "k:", where="post", linewidth=1.6, label="on the host")
        if report.capacity_bytes:
            ax.axhline(
                report.capacity_bytes / GiB, color="black", linestyle="--", linewidth=1.2, label="the chip offers"
            )
        for part, first, end in passes_drawn(timeline):
            ax.axvline(first, color="black", linewidth=0.7, alpha=0.6)
            ax.text(
                (first + end) / 2, 1.0, part, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=9
            )
        ax.set_xlim(0, timeline.steps)
        ax.set_xlabel("operations of the compiled program, in their order")
        ax.set_title(f"{name}: {report.peak_bytes / GiB:.2f} GiB", loc="left", fontweight="bold", fontsize=10.5, pad=20)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("GiB in use")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return fig


def steps_drawn_alt(reports: Mapping[str, Any]) -> str:
    """Return what `steps_drawn` shows, in words."""
    told = ["Memory in use on the chip during a step, by the ledger's lines, in GiB."]
    for name, report in reports.items():
        timeline = report.timeline
        parts = ", ".join(f"{line} {row[timeline.peak_step]:.1f}" for line, row in _by_line(timeline).items())
        told.append(f"{name}: {report.peak_bytes / GiB:.2f}. At the highest point {parts}.")
    return " ".join(told)


def tool_prices(
    tools: Sequence[str], tokens: int, saved: Sequence[float], cost: Mapping[int, Sequence[float]]
) -> Figure:
    """Draw GiB that each tool takes off the peak at `tokens`, and its share of more time at each length: two panels."""
    fig, (buys, costs) = plt.subplots(1, 2, figsize=(9.5, 3.4), sharey=True, layout="constrained")
    colours = [f"C{n}" for n in range(len(cost))]
    rows, height = np.arange(len(tools)), 0.8 / len(cost)
    for n, (length, shares) in enumerate(cost.items()):
        style = {"color": colours[n], "hatch": HATCHES[n], "edgecolor": "white", "label": f"{length:,} tokens"}
        bars = costs.barh(rows + height * (n - (len(cost) - 1) / 2), [100 * share for share in shares], height, **style)
        costs.bar_label(bars, fmt="%.1f %%", padding=3, fontsize=9)
        if length == tokens:
            buys.bar_label(buys.barh(rows, saved, height, **style), fmt="%.2f", padding=3, fontsize=9)
    for ax in (buys, costs):
        ax.margins(x=0.15)
        ax.spines[["top", "right"]].set_visible(False)
    buys.set_yticks(rows, tools)
    buys.invert_yaxis()
    buys.set_title("what it buys: GiB less at the peak", loc="left", fontsize=10.5)
    costs.set_title("what it costs: more time for the step", loc="left", fontsize=10.5)
    buys.set_xlabel("GiB (compiled)")
    costs.set_xlabel("% of the step without tools (estimated)")
    fig.legend(*costs.get_legend_handles_labels(), loc="outside lower center", ncols=len(cost), frameon=False)
    return fig


def tool_prices_alt(
    tools: Sequence[str], tokens: int, saved: Sequence[float], cost: Mapping[int, Sequence[float]]
) -> str:
    """Return what `tool_prices` shows, in words."""
    told = [f"{tool}: {less:.2f} GiB less." for tool, less in zip(tools, saved, strict=True)]
    more = [
        f"{tool} at {length:,} tokens: {share:.1%} more time."
        for length, shares in cost.items()
        for tool, share in zip(tools, shares, strict=True)
    ]
    return f"What each tool buys in memory at {tokens:,} tokens and costs in time, as bars. " + " ".join(told + more)
