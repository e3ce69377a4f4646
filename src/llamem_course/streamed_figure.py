"""What fills a chip while layers stream through it, and which copies run beside matmuls."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxmem.reading.provenance import Category
from jaxmem.reading.timeline import Span, Timeline
from jaxmem.report import GiB
from llamem.llama.config import LlamaConfig

# What is told apart, in the order of the stack: the category that stands for it, its words, its colour.
ROLES: dict[Category, tuple[str, str]] = {
    "weights": ("head and embedding, and their gradients", "#3f90da"),
    "optimizer": ("one layer: weights, moments, gradients", "#ffa90e"),
    "workspace": ("one layer: activations, and the rest", "#c9d1d3"),
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


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of a loop of a program: its steps, when each copy of a layer's matrix begins and is waited for, and
    at which steps matmuls begin.
    """

    steps: range
    copies: tuple[tuple[int, int], ...]
    matmuls: tuple[int, ...]

    @classmethod
    def of(cls, timeline: Timeline, loop: int = 0) -> "Turn":
        """Return a turn of one of the loops, in a program that fetches layers by `jax.lax.dynamic_index_in_dim`."""
        steps = range(timeline.loops[loop].first, timeline.loops[loop].end)
        matmuls = (step for step in steps if "dot_general" in timeline.operations[step])
        # A copy on its way is written down as (from, to, ...), the latter one layer's slice.
        copies = (
            (one.first, one.last)
            for one in timeline.buffers
            if one.first in steps
            and re.search(r", \w+\[1,", one.shape)
            and re.search("dynamic_(index_in_dim|slice)", one.operation)
        )
        return cls(steps, tuple(sorted(copies)), tuple(matmuls))

    @property
    def pairs(self) -> int:
        """How many pairs of a copy and a matmul there are."""
        return len(self.copies) * len(self.matmuls)

    @property
    def beside(self) -> int:
        """How many pairs of a copy and a matmul there are in which the copy is on its way when the matmul begins."""
        return sum(begins < step < awaited for begins, awaited in self.copies for step in self.matmuls)


def turns_drawn(turns: Mapping[str, Turn]) -> tuple[Figure, str]:
    """Return a figure, and its words: by chip the matmuls of a turn, and under them a bar for each copy.

    A line goes down from each matmul: it meets the bars of the copies that are under way when the matmul begins.
    """
    lanes = max(len(turn.copies) for turn in turns.values())
    fig, axes = plt.subplots(1, len(turns), figsize=(9, 3.6), sharey=True, squeeze=False, layout="constrained")
    for ax, (chip, turn) in zip(axes[0], turns.items(), strict=True):
        first = turn.steps[0]
        for lane, (begins, awaited) in enumerate(turn.copies, 1):
            ax.barh(lane, awaited - begins, 0.6, begins - first, color="C1")
        for step in turn.matmuls:
            ax.plot([step - first] * 2, [-0.3, lanes + 0.5], color="C0", linewidth=1)
            ax.plot(step - first, -0.3, "v", color="C0", markersize=7, clip_on=False)
        ax.set(title=chip, yticks=[], ylim=(lanes + 0.6, -0.8), xlabel="step of a turn", xlim=(0, len(turn.steps)))
        ax.spines["left"].set_visible(False)
    marks = [
        plt.Line2D([], [], color="C0", marker="v", label="a matmul"),
        Patch(color="C1", label="a copy, until awaited"),
    ]
    fig.legend(marks, ("a matmul", "a copy, until awaited"), loc="outside lower center", ncols=2, frameon=False)
    told = "; ".join(f"{chip}: {turn.beside} of {turn.pairs}" for chip, turn in turns.items())
    return fig, f"Matmuls, and under them bars for copies, over a turn's steps. Pairs side by side: {told}."


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
