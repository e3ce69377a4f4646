"""Figures of tiled losses: where in a step tiles help, what one tile reads and adds to, and which tiles need less."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxmem.reading.timeline import Category
from jaxmem.report import GiB, Report
from llamem_course.timeline_figure import COLOURS

Box = tuple[float, float, float, float]  # left, bottom, width, height
Cases = Mapping[str, tuple[Report, Report]]  # reports on a step with all logits, and with tiles

# From below: what a step always holds, what only its backward pass holds, and what tiles take away.
_PARTS: dict[str, tuple[Category, tuple[Category, ...]]] = {
    "weights and moments": ("optimizer", ("weights", "optimizer", "batch", "output", "other")),
    "gradients": ("gradients", ("gradients",)),
    "inputs of layers,\nlayer at work": ("residuals", ("residuals", "rematerialised", "workspace")),
    "logits": ("logits", ("logits",)),
}

# Where the arrays lie: tokens go down, words go right, the width of the model is the short side.
_X, _W, _DX, _DW, _LOGITS = (-1.5, 0, 1, 4), (0, 4.5, 6, 1), (6.5, 0, 1, 4), (0, -1.5, 6, 1), (0, 0, 6, 4)
_READ, _MADE, _FINISHED, _ADDED = ("C0", ""), ("C1", ".."), ("C2", "//"), ("C3", "xx")
TWO_CUTS_ALT = (
    "The logits cut twice. A tile of tokens reads its rows of x and all of W, finishes its rows of dx, and adds to all "
    "of dW, a float32 sum of 4VD bytes; the next tile lies below. A tile of the vocabulary reads all of x and its "
    "words of W, finishes its words of dW, and adds to all of dx, a float32 sum of 4ND bytes; the next is right."
)


def two_moments(cases: Cases) -> Figure:
    """Memory over steps that hold all logits, and the peak with tiles; `two_moments_alt` says it in words."""
    fig, axes = plt.subplots(1, len(cases), figsize=(10, 3.9), sharey=True, layout="constrained")
    top = 1.25 * max(untiled.peak_bytes for untiled, _ in cases.values()) / GiB
    for ax, (name, (untiled, tiled)) in zip(axes, cases.items(), strict=True):
        total, moments = _moments(untiled)
        _fill(ax, untiled, named=ax is axes[-1])
        for moment, step in moments.items():
            ax.plot(step, total[step] + 0.02 * top, marker="v", color="black", markersize=5)
            side = "right" if moment == "loss" else "left"
            place = step + (0.02 if side == "left" else -0.02) * len(total), total[step] + 0.03 * top
            ax.text(*place, f"{moment}\n{total[step]:.1f}", ha=side, va="bottom", fontsize=9)
        peak, saved = tiled.peak_bytes / GiB, (untiled.peak_bytes - tiled.peak_bytes) / GiB
        ax.axhline(peak, color="black", linestyle="--", linewidth=1)
        ax.text(0.99 * len(total), peak + 0.01 * top, "with tiles", ha="right", va="bottom", fontsize=9)
        told = f"tiles save {saved:.1f} GiB" if saved > 0.05 else "tiles save nothing"
        ax.set_title(f"{name}:\n{told}", fontsize=10.5)
        ax.set(xticks=[], xlim=(0, len(total)), ylim=(0, top), xlabel="operations of the step, in order")
    axes[0].set_ylabel("GiB in use, all logits held")
    return fig


def two_moments_alt(cases: Cases) -> str:
    """Return what `two_moments` shows, in words."""
    words = ["Memory in use over the operations of a step that holds all logits, in GiB."]
    for name, (untiled, tiled) in cases.items():
        total, moments = _moments(untiled)
        told = " and ".join(f"{total[step]:.1f} in the {moment}" for moment, step in moments.items())
        words.append(f"{name}: high twice, {told}; the peak with tiles is {tiled.peak_bytes / GiB:.1f}.")
    return " ".join(words)


def _moments(untiled: Report) -> tuple[np.ndarray, dict[str, int]]:
    """Return a step's memory in GiB, and where it is highest while all logits are held, and after that."""
    assert untiled.timeline is not None
    parts = untiled.timeline.by_category()
    total = np.sum(list(parts.values()), axis=0) / GiB
    held = np.flatnonzero(parts["logits"] > parts["logits"].max() / 2)
    after = int(held[-1]) + 1
    return total, {"loss": int(held[np.argmax(total[held])]), "backward pass": after + int(np.argmax(total[after:]))}


def _fill(ax: Axes, untiled: Report, *, named: bool) -> None:
    assert untiled.timeline is not None
    sizes = untiled.timeline.by_category()
    lower = np.zeros(untiled.timeline.steps)
    for name, (colour, categories) in _PARTS.items():
        upper = lower + np.sum([sizes[category] for category in categories], axis=0) / GiB
        ax.fill_between(np.arange(len(lower)), lower, upper, step="post", facecolor=COLOURS[colour], linewidth=0)
        thick = np.flatnonzero(upper - lower > 0.75 * (upper - lower).max())
        place: dict[str, Any] = {
            "x": thick.mean(),
            "y": (lower + upper)[thick].mean() / 2,
            "fontsize": 9,
            "va": "center",
        }
        if name == "logits":
            ax.text(**place | {"x": thick[0]}, s=f"{name} ", color=COLOURS[colour], ha="right")
        elif named:
            ax.text(**place, s=name, color="white" if colour == "gradients" else "black", ha="center")
        lower = upper


def two_cuts() -> Figure:
    """Tiles of tokens and tiles of the vocabulary, one of each at work; `TWO_CUTS_ALT` says it in words."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.1), layout="constrained")
    _arrays(left, "tiles of tokens", {"x [N, D]": _X, "dx [N, D]": _DX, "": _W, " ": _DW})
    _box(left, (-1.5, 2.5, 1, 1), _READ, "reads")
    _box(left, _W, _READ, "reads all of W [V, D]")
    _box(left, (0, 2.5, 6, 1), _MADE, "a tile of logits: made, then forgotten")
    _box(left, (6.5, 2.5, 1, 1), _FINISHED, "finishes")
    _box(left, _DW, _ADDED, "adds to all of dW [V, D]:\n4VD bytes in float32")
    left.annotate("next tile", (3, 1), (3, 2.2), ha="center", va="center", arrowprops={"arrowstyle": "->"})
    _arrays(right, "tiles of the vocabulary", {"W [V, D]": _W, "dW [V, D]": _DW, "": _X, " ": _DX})
    _box(right, _X, _READ, "reads all of x [N, D]")
    _box(right, (1, 4.5, 1.5, 1), _READ, "reads")
    _box(right, (1, 0, 1.5, 4), _MADE, "a tile\nof logits:\nmade,\nthen\nforgotten")
    _box(right, (1, -1.5, 1.5, 1), _FINISHED, "finishes")
    _box(right, _DX, _ADDED, "adds to all of dx [N, D]:\n4ND bytes in float32")
    right.annotate("next tile", (4.9, 2.7), (3.3, 2.7), ha="center", va="center", arrowprops={"arrowstyle": "->"})
    return fig


def crossing(needs: Mapping[str, Mapping[int, float]], words: int) -> Figure:
    """`needs[loss][tokens]`, in GiB above the floor, over the tokens; `crossing_alt` says it in words."""
    fig, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
    tiled = {name: sizes for name, sizes in needs.items() if name != "untiled_loss"}
    top = 1.1 * max(max(sizes.values()) for sizes in tiled.values())
    for (name, sizes), marker in zip(needs.items(), "^os", strict=True):
        (line,) = ax.plot(list(sizes), list(sizes.values()), marker=marker)
        beside = max(tokens for tokens, size in sizes.items() if size < top)
        side: dict[str, Any] = {"ha": "left", "xytext": (9, 0)} if name in tiled else {"ha": "right", "xytext": (-9, 0)}
        place = {"xy": (beside, sizes[beside]), "textcoords": "offset points", "va": "center"}
        ax.annotate(name, **place, **side, color=line.get_color())
    ax.axvline(words, color="black", linestyle=":")
    ax.text(words, 0.98 * top, f"  as many tokens\n  as words: {words:,}", va="top", fontsize=9)
    ticks = sorted({tokens for sizes in needs.values() for tokens in sizes})
    ax.set_xscale("log")
    ax.minorticks_off()
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.set(xlabel="tokens", ylabel="GiB above the floor", ylim=(0, top), xlim=(0.9 * ticks[0], 2.6 * ticks[-1]))
    return fig


def crossing_alt(needs: Mapping[str, Mapping[int, float]]) -> str:
    """Return what `crossing` shows, in words."""
    words = [f"What losses need above the floor, in GiB, with {min(min(s) for s in needs.values()):,} tokens and more."]
    for name, sizes in needs.items():
        first, last = min(sizes), max(sizes)
        words.append(f"{name}: from {sizes[first]:.2f} to {sizes[last]:.2f}, with {last:,} tokens.")
    return " ".join(words)


def _arrays(ax: Axes, title: str, arrays: Mapping[str, Box]) -> None:
    for name, (x, y, width, height) in {**arrays, "logits [N, V]": _LOGITS}.items():
        ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="gray"))
        upright = height > width  # names stand beside the tile
        place = (x + width / 2, y + 0.28 * height) if upright else (x + 0.72 * width, y + height / 2)
        ax.text(*(place if width * height < 20 else (4.9, 0.35)), name, ha="center", va="center", rotation=90 * upright)
    ax.text(3, 5.8, title, ha="center", fontsize=11)
    ax.set(xlim=(-1.8, 7.8), ylim=(-1.7, 6.2), aspect="equal")
    ax.axis("off")


def _box(ax: Axes, box: Box, style: tuple[str, str], text: str) -> None:
    """Draw what a tile does to a part of an array, or to all of it."""
    x, y, width, height = box
    hatched: dict[str, Any] = {"facecolor": style[0], "alpha": 0.6, "hatch": style[1], "edgecolor": "white"}
    ax.add_patch(Rectangle(box[:2], *box[2:], **hatched))
    frame = {"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 1} if style[1] else None
    upright = height > 3 * width
    middle = {"x": x + width / 2, "y": y + height / 2, "ha": "center", "va": "center"}
    ax.text(**middle, s=text, rotation=90 * upright, fontsize=9, bbox=frame)
