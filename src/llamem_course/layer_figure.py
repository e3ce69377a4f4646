"""What one more layer costs, and which arrays of sixteen layers are there at once in the backward pass."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

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

_MIB = 2**20


def one_more(costs: Mapping[str, float], parts: Mapping[str, float], chip: str) -> Figure:
    """Draw what one more layer adds to the peak on a chip, in bytes, as a bar for each way to run the layers.

    `parts` are the bytes that every layer brings, one after another; what a bar has beyond them stands out.
    """
    fig, ax = plt.subplots(figsize=(8, 0.4 * len(costs) + 0.9), layout="constrained")
    labels = list(costs)
    left = 0.0
    for (name, size), colour in zip(parts.items(), ("C1", "C2", "C0"), strict=True):
        ax.barh(labels, size / _MIB, left=left, color=colour, alpha=0.6, height=0.7, label=name)
        left += size / _MIB
    rest = [max(cost / _MIB - left, 0.0) for cost in costs.values()]
    ax.barh(labels, rest, left=left, color="C3", alpha=0.6, height=0.7, label="what else?")
    ax.set(xlabel=f"MiB for one more layer, {chip}")
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower right", frameon=False)
    return fig


def one_more_alt(costs: Mapping[str, float], parts: Mapping[str, float], chip: str) -> str:
    """Say in words what `one_more` draws."""
    known = sum(parts.values())
    beyond = "; ".join(f"{way}: {(cost - known) / _MIB:,.0f} MiB" for way, cost in costs.items())
    known_parts = f"{', '.join(parts)}, {known / _MIB:,.0f} MiB"
    return f"Bars of what one more layer costs on a {chip}: {known_parts}, and beyond them {beyond}."


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
