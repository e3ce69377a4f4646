"""Which arrays of sixteen layers are there at once in the backward pass, by a scan and by a nested scan."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

ALIVE_ALT = (
    "Sixteen layers when the backward pass begins. A scan holds 16 inputs. Nested in four groups, 4 inputs of groups "
    "and, of the last group alone, 4 inputs of layers, and once more the weights of 4 layers and their gradients."
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


def alive() -> Figure:
    """Draw what is there when the backward pass begins, layer by layer; `ALIVE_ALT` says it in words."""
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
    ax.set(title="layer 1 to 16, when the backward pass begins", xlim=(-6, 20.5), ylim=(1 - len(_ROWS) - 0.6, 1))
    ax.axis("off")
    return fig
