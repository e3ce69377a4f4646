"""What fills a chip while layers stream through it, and from how many tokens on the link to the host is hidden."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxmem.reading.provenance import Category
from jaxmem.reading.timeline import Loop, Span, Timeline
from jaxmem.report import GiB
from llamem.llama.config import LlamaConfig
from llamem.planner.roofline import Seconds

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


def bytes_of_layers(timeline: Timeline, config: LlamaConfig) -> np.ndarray:
    """Return the bytes of layers' weights, moments and gradients on the chip, at each step of a streamed program."""
    by_role = visiting(timeline, config).by_category()
    return by_role.get("optimizer", np.zeros(timeline.steps))


def loops_over_layers(timeline: Timeline, config: LlamaConfig) -> list[Loop]:
    """Return the outermost loops with a turn for each layer in which a layer is there: tiles may be as many."""
    of_layers = bytes_of_layers(timeline, config)
    outermost = [
        loop
        for loop in timeline.loops
        if not any(other.first < loop.first and loop.end <= other.end for other in timeline.loops)
    ]
    return [loop for loop in outermost if loop.trips == config.n_layers and of_layers[loop.first : loop.end].any()]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of a loop of a program: its steps, when each copy of a layer's matrix begins and is waited for, and
    at which steps products begin.
    """

    steps: range
    copies: tuple[tuple[int, int], ...]
    products: tuple[int, ...]

    @classmethod
    def of(cls, timeline: Timeline, loop: int = 0) -> "Turn":
        """Return a turn of one of the loops, in a program that fetches layers by `jax.lax.dynamic_index_in_dim`."""
        steps = range(timeline.loops[loop].first, timeline.loops[loop].end)
        products = (step for step in steps if "dot_general" in timeline.operations[step])
        # A copy on its way is written down as (from, to, ...), the latter one layer's slice.
        copies = (
            (one.first, one.last)
            for one in timeline.buffers
            if one.first in steps
            and re.search(r", \w+\[1,", one.shape)
            and re.search("dynamic_(index_in_dim|slice)", one.operation)
        )
        return cls(steps, tuple(sorted(copies)), tuple(products))

    @property
    def pairs(self) -> int:
        """How many pairs of a copy and a product there are."""
        return len(self.copies) * len(self.products)

    @property
    def beside(self) -> int:
        """How many pairs of a copy and a product there are in which the copy is on its way when the product begins."""
        return sum(begins < step < awaited for begins, awaited in self.copies for step in self.products)


def turns_drawn(turns: Mapping[tuple[str, str], Turn]) -> tuple[Figure, str]:
    """Return a figure, and its words: by chip and program the products of a turn, and under them a bar for each copy.

    A line goes down from each product: it meets the bars of the copies that are under way when the product begins.
    """
    chips = list(dict.fromkeys(chip for chip, _ in turns))
    size = max(9, 3.4 * len(chips)), 3.4
    fig, axes = plt.subplots(1, len(chips), figsize=size, squeeze=False, layout="constrained")
    for ax, chip in zip(axes[0], chips, strict=True):
        own = {program: turn for (one, program), turn in turns.items() if one == chip}
        for row, (program, turn) in enumerate(own.items()):
            top, first = 4.0 * row, turn.steps[0]
            ax.text(0, top - 0.75, program, va="bottom", fontsize=10, fontweight="bold")
            for lane, (begins, awaited) in enumerate(turn.copies, 1):
                ax.barh(top + 0.8 * lane, awaited - begins, 0.6, begins - first, color="C1")
            for step in turn.products:
                ax.barh(top, 1.6, 0.6, step - first, color="C0")
                ax.plot([step - first + 0.8] * 2, [top, top + 0.8 * len(turn.copies) + 0.4], color="C0", linewidth=1)
        ax.set(title=chip, yticks=[], ylim=(4.0 * len(own) - 1.2, -1.6), xlabel="step of a turn")
        ax.set_xlim(0, max(len(turn.steps) for turn in own.values()))
        ax.spines["left"].set_visible(False)
    handles = [Patch(color="C0", label="a product"), Patch(color="C1", label="a copy, until it is waited for")]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    told = "; ".join(f"{chip}, {program}: {turn.beside} of {turn.pairs}" for (chip, program), turn in turns.items())
    return fig, f"Products, and under them bars for copies, over a turn's steps. Pairs side by side: {told}."


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


def hidden_at(lengths: Sequence[int], seconds: Sequence[Seconds]) -> float:
    """Return the tokens at which products and attention take as long as the link, between the lengths given."""
    ratio = [(one.products + one.attention) / one.host_link for one in seconds]
    return float(np.exp(np.interp(0, np.log(ratio), np.log(lengths))))


def crossings_drawn(lengths: Sequence[int], steps: Mapping[str, Sequence[Seconds]]) -> tuple[Figure, str]:
    """Return a figure, and its words: seconds of a step's link and of its arithmetic against tokens, a panel a chip."""
    fig, panels = plt.subplots(1, len(steps), figsize=(9, 3.8), sharey=True, squeeze=False, layout="constrained")
    words = []
    for ax, (chip, seconds) in zip(panels[0], steps.items(), strict=True):
        link = np.array([one.host_link for one in seconds])
        products = np.array([one.products for one in seconds])
        arithmetic = products + [one.attention for one in seconds]
        at = hidden_at(lengths, seconds)
        ax.loglog(lengths, link, "s-", color="C2", label="link to the host")
        ax.loglog(lengths, products, "--", color="C0", label="products")
        ax.loglog(lengths, arithmetic, "o-", color="C0", label="products and attention")
        ax.fill_between(lengths, arithmetic, link, where=list(link > arithmetic), color="C2", alpha=0.15)
        level = float(np.interp(at, lengths, link))
        ax.plot(at, level, "k*", markersize=13, zorder=5)
        note = {"textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 10}
        ax.annotate(f"{at / 1000:.0f} thousand tokens", (at, level), xytext=(-4, 8), **note)
        ax.text(1.05 * lengths[0], 0.75 * link[0], "the chip waits", va="top", fontsize=10)
        ax.set(title=chip, xlabel="tokens of a step", xticks=lengths[::2])
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        words.append(f"on {chip} they meet at {at / 1000:.0f} thousand")
    panels[0, 0].set_ylabel("seconds of a step, estimated")
    panels[0, 0].legend(frameon=False, loc="upper left", fontsize=10)
    return fig, f"Seconds against tokens: the link's stay, those of products and attention rise; {', '.join(words)}."
