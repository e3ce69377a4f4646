"""What fills a chip while layers stream through it."""

import dataclasses
import math
import re
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxmem.reading.provenance import Category
from jaxmem.reading.timeline import Span, Timeline
from jaxmem.report import GiB
from llamem.llama.config import LlamaConfig

# What is told apart, in the order of the stack: the category that stands for it, its words, its colour.
ROLES: dict[Category, tuple[str, str]] = {
    "weights": ("head and embedding, and their gradients", "#3f90da"),
    "optimizer": ("one layer: weights, moments, gradients", "#ffa90e"),
    "workspace": ("activations", "#c9d1d3"),
}


def visiting(timeline: Timeline, config: LlamaConfig) -> Timeline:
    """Return the timeline of a streamed step with the categories of `ROLES`, told by the buffers' shapes."""
    matrices = {
        config.d_model * width
        for width in (config.d_ff, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim)
    }

    def role(span: Span) -> Category:
        sizes = [int(size) for size in re.findall(r"\d+", span.shape.partition("[")[2].partition("]")[0])]
        # The update cuts the vocabulary's tables into pieces of rows.
        if any(size > 1000 and config.vocab_size % size == 0 for size in sizes):
            return "weights"
        return "optimizer" if math.prod(sizes) in matrices or span.name == "argument" else "workspace"

    buffers = tuple(dataclasses.replace(span, category=role(span)) for span in timeline.buffers)
    return dataclasses.replace(timeline, buffers=buffers)


def visitors_drawn(timeline: Timeline, config: LlamaConfig) -> tuple[Figure, str]:
    """Return a figure of what lies on the chip at each step of a streamed program, by `ROLES`, and its words."""
    shown = visiting(timeline, config)
    fig, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
    capacity, base = (shown.capacity_bytes or shown.peak_bytes) / GiB, np.zeros(shown.steps)
    parts = {category: row[shown.peak_step] / GiB for category, row in shown.by_category().items()}
    for category, sizes in shown.by_category().items():
        words, colour = f"{parts[category]:.1f}: {ROLES[category][0]}", ROLES[category][1]
        upper = base + sizes / GiB
        ax.fill_between(np.arange(shown.steps), base, upper, step="post", color=colour, linewidth=0, label=words)
        base = upper
    ax.step(np.arange(shown.steps), base, where="post", color="black", linewidth=0.7)
    ax.plot(shown.peak_step, base.max(), marker="v", color="black", markersize=6)
    peak, words = (shown.peak_step, base.max()), f"highest: {base.max():.1f} GiB"
    ax.annotate(words, peak, xytext=(-9, -2), textcoords="offset points", ha="right")
    ax.axhline(capacity, color="black", linestyle="--", linewidth=1.2)
    ax.text(0.995 * shown.steps, 1.01 * capacity, f"the chip offers {capacity:.2f} GiB", ha="right", va="bottom")
    _loops(ax, shown, config.n_layers)
    ax.set(xlim=(0, shown.steps), ylim=(0, 1.16 * capacity), ylabel="GiB on the chip")
    ax.set_xlabel("step of the compiled program; one turn of each loop is written down")
    handles, labels = ax.get_legend_handles_labels()
    legend: dict[str, Any] = {"loc": "upper right", "bbox_to_anchor": (1, 0.86), "frameon": False, "fontsize": 9.5}
    ax.legend(handles[::-1], labels[::-1], title="GiB where it is highest", title_fontsize=9.5, **legend)
    told = "; ".join(f"{size:.1f} {ROLES[category][0]}" for category, size in parts.items())
    alt = f"GiB on the chip over a streamed step. Highest in the backward loop, {base.max():.1f}: {told}."
    return fig, alt


def _loops(ax: Axes, one: Timeline, n_layers: int) -> None:
    """Mark the outermost loops above the axes, and say what each is for by its place among those over layers."""
    above, drawn_to, over_layers = ax.get_xaxis_transform(), -1, 0
    for loop in one.loops:
        if loop.first < drawn_to or loop.end - loop.first < 0.02 * one.steps:
            continue
        drawn_to = loop.end
        over_layers += loop.trips == n_layers
        names = {0: "", 1: "forward", 2: "backward and update"} if loop.trips == n_layers else {1: "loss", 2: "table"}
        name = names.get(over_layers, "")
        ax.plot([loop.first, loop.end], [1.02, 1.02], transform=above, color="0.35", linewidth=2.5, clip_on=False)
        middle = (loop.first + loop.end) / 2
        ax.text(middle, 1.03, f"{name}\nx {loop.trips}", transform=above, ha="center", va="bottom", fontsize=8.5)
