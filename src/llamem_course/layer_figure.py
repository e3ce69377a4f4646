"""Which slices of a stack of weights a program holds, and for how long; what nested scans hold at their fullest."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxmem.reading.timeline import Span, Timeline
from jaxmem.report import GiB

ALIVE_ALT = (
    "Sixteen layers when the backward pass enters the last of four groups. A scan holds 16 inputs. Nested, it holds 4 "
    "inputs of groups and, of the last group alone, 4 inputs of layers, and once more the weights of 4 layers and "
    "their gradients."
)
_LAYERS, _GROUPS = 16, 4
# A row's name, its layers, what it holds, its colour and hatch.
_LAST = range(_LAYERS - _LAYERS // _GROUPS, _LAYERS)
_ROWS = (
    ("scan: inputs of layers", range(_LAYERS), "16 inputs", "C0", ""),
    ("nested: inputs of groups", range(0, _LAYERS, _LAYERS // _GROUPS), "4 inputs", "C0", ""),
    ("inputs of layers", _LAST, "4 inputs", "C0", ""),
    ("weights, once more", _LAST, "4 layers' weights", "C1", ".."),
    ("gradients, once more", _LAST, "4 layers' weights", "C2", "//"),
)


def slices(timeline: Timeline, size: int) -> list[Span]:
    """Return the copies of slices of stacked arrays, of `size` bytes or more each, in the order made."""
    cut = ("/slice", "/squeeze", "/dynamic_slice")
    found = [one for one in timeline.buffers if one.operation.endswith(cut) and one.bytes >= size]
    return sorted(found, key=lambda one: (one.first, one.last))


def waiting(timeline: Timeline, size: int) -> list[Span]:
    """Return those of the `slices` that lie in memory at the peak."""
    held = timeline.at_peak()
    return [one for one in slices(timeline, size) if one in held]


def waiting_slices(timelines: Mapping[str, Timeline], size: int) -> Figure:
    """Draw for each program its copies of slices as bars, from the step that makes one to the last that reads it."""
    fig, axes = plt.subplots(1, len(timelines), figsize=(8, 3.0), sharey=True, layout="constrained")
    for ax, (name, one) in zip(axes, timelines.items(), strict=True):
        held, peak = waiting(one, size), one.peak_step
        for row, bar in enumerate(slices(one, size)):
            ax.barh(
                row, bar.last - bar.first + 1, left=bar.first, height=0.8, color="C1" if bar in held else "lightgray"
            )
        ax.axvline(peak, color="black", linewidth=1, linestyle=":")
        n_bytes = sum(bar.bytes for bar in held)
        ax.annotate(
            f"{len(held)} copies\nat the peak,\n{n_bytes / GiB:.2f} GiB",
            (peak, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4 if peak < one.steps / 2 else -4, -4),
            textcoords="offset points",
            ha="left" if peak < one.steps / 2 else "right",
            va="top",
        )
        for passed, first, stop in one.passes:
            if stop - first > one.steps / 8:
                ax.text((first + stop) / 2, -1.2, passed, ha="center", va="top", fontsize=9)
        ax.set(title=name, xlim=(0, one.steps), xticks=[], xlabel="the program's steps, in order")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="copies, in the order made", ylim=(-5, 70), yticks=[0, 16, 32, 48])
    return fig


def waiting_slices_alt(timelines: Mapping[str, Timeline], size: int) -> str:
    """Say in words what `waiting_slices` draws."""
    told = []
    for name, one in timelines.items():
        held = waiting(one, size)
        n_bytes = sum(bar.bytes for bar in held)
        told.append(f"{name}: {len(slices(one, size))} copies, {len(held)} at the peak, {n_bytes / GiB:.2f} GiB")
    return f"Copies of slices as bars over the steps of the program. {'; '.join(told)}."


def alive() -> Figure:
    """Draw what is there when the backward pass enters the last group, layer by layer; `ALIVE_ALT` says it in words."""
    fig, ax = plt.subplots(figsize=(8, 2.6))
    for row, (name, layers, held, colour, hatch) in enumerate(_ROWS):
        bottom = -row - 0.4 * (row > 0)  # the scan stands apart
        ax.text(-0.4, bottom + 0.4, name, ha="right", va="center")
        ax.text(_LAYERS + 0.4, bottom + 0.4, held, va="center")
        for i in range(_LAYERS):
            kept: dict[str, Any] = (
                {"facecolor": colour, "alpha": 0.6, "hatch": hatch} if i in layers else {"fill": False}
            )
            ax.add_patch(Rectangle((i, bottom), 0.9, 0.8, edgecolor="white" if i in layers else "lightgray", **kept))
    ax.set(
        title="layers 1 to 16, when the backward pass enters the last group",
        xlim=(-6, 20.5),
        ylim=(1 - len(_ROWS) - 0.6, 1),
    )
    ax.axis("off")
    return fig
