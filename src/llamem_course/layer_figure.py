"""How many copied slices of a stack of weights lie in memory, step by step; what nested scans hold at their fullest."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxmem.reading.timeline import Timeline
from jaxmem.report import GiB


def held_slices(timeline: Timeline, size: int) -> np.ndarray:
    """Return the bytes of copied slices of stacks in the device's memory at each step; `size` is that of one slice."""
    held = np.zeros(timeline.steps)
    cut = ("/slice", "/squeeze", "/dynamic_slice")
    for one in timeline.buffers:
        if one.operation.endswith(cut) and one.bytes == size and one.space == "device":
            held[one.first : one.last + 1] += one.bytes
    return held


def waiting_slices(timelines: Mapping[str, Timeline], size: int, weights: int) -> tuple[Figure, str]:
    """Draw for each program the GiB of copied slices at each step, and return the figure and its words.

    `size` is the bytes of one slice, and `weights` those of all layers' weights, a dashed line.
    """
    fig, axes = plt.subplots(1, len(timelines), figsize=(8, 3.0), sharey=True, layout="constrained", squeeze=False)
    told = []
    for ax, (name, one) in zip(axes[0], timelines.items(), strict=True):
        held = held_slices(one, size) / GiB
        ax.fill_between(range(one.steps), held, step="post", color="C1")
        ax.axhline(weights / GiB, color="black", linestyle="--", linewidth=1)
        ax.text(one.steps, 1.02 * weights / GiB, "the weights of all layers", ha="right", va="bottom", fontsize=9)
        wide = [(n, first, stop) for n, first, stop in one.passes if stop - first > one.steps / 8]
        ax.set_xticks([(first + stop) / 2 for _, first, stop in wide], [n for n, *_ in wide])
        ax.tick_params(axis="x", length=0)
        for _, first, _ in wide[1:]:
            ax.axvline(first, color="gray", linewidth=1, linestyle=":")
        ax.set(
            title=f"{name}: at most {held.max():.2f} GiB",
            xlim=(0, one.steps),
            xlabel="operations of the compiled program",
        )
        told.append(f"{name}: at most {held.max():.2f}")
    axes[0, 0].set(ylabel="copied slices in memory, GiB", ylim=(0, 1.2 * weights / GiB))
    words = f"GiB of copied slices in memory at each step. {'; '.join(told)}; the weights: {weights / GiB:.2f}."
    return fig, words


def alive(n_layers: int, groups: int) -> tuple[Figure, str]:
    """Draw what is there when the backward pass enters the last group, layer by layer; return the figure, its words."""
    size = n_layers // groups
    last = range(n_layers - size, n_layers)
    rows = (  # a name, its layers, what is held, a colour and a hatch
        ("scan: inputs of layers", range(n_layers), f"{n_layers} inputs", "C0", ""),
        ("nested: inputs of groups", range(0, n_layers, size), f"{groups} inputs", "C0", ""),
        ("inputs of layers", last, f"{size} inputs", "C0", ""),
        ("weights, once more", last, f"{size} layers' weights", "C1", ".."),
        ("gradients, once more", last, f"{size} layers' weights", "C2", "//"),
    )
    fig, ax = plt.subplots(figsize=(8, 2.6))
    for row, (name, layers, held, colour, hatch) in enumerate(rows):
        bottom = -row - 0.4 * (row > 0)  # the scan stands apart
        ax.text(-0.4, bottom + 0.4, name, ha="right", va="center")
        ax.text(n_layers + 0.4, bottom + 0.4, held, va="center")
        for i in range(n_layers):
            kept: dict[str, Any] = {"facecolor": colour, "alpha": 0.6, "hatch": hatch}
            kept = kept if i in layers else {"fill": False}
            ax.add_patch(Rectangle((i, bottom), 0.9, 0.8, edgecolor="white" if i in layers else "lightgray", **kept))
    ax.set(
        title=f"layers 1 to {n_layers}, when the backward pass enters the last group",
        xlim=(-0.375 * n_layers, 1.28 * n_layers),
        ylim=(1 - len(rows) - 0.6, 1),
    )
    ax.axis("off")
    words = (
        f"{n_layers} layers when the backward pass enters the last of {groups} groups. A scan holds {n_layers} inputs. "
        f"Nested, it holds {groups} inputs of groups and, of the last group alone, {size} inputs of layers, and once "
        f"more the weights of {size} layers and their gradients."
    )
    return fig, words
