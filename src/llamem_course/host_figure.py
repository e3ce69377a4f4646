"""The figure of notebook 11: what each of eight chips computes with, for three meshes."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

_CHIPS = 8
_WAYS = {
    "fsdp": "whole matrices,\na sequence each",
    "tensor": "an eighth of a matrix,\nall the same sequence",
    "context": "whole matrices,\nan eighth of one sequence",
}
MESHES_ALT = (
    "What each of eight chips computes with, in three rows. fsdp: a whole matrix and a sequence of its own. tensor: an "
    "eighth of the matrix's columns and all tokens of the one sequence. context: a whole matrix and an eighth of the "
    "tokens of the one sequence."
)


def meshes_drawn() -> Figure:
    """Return a figure: which part of a matrix and which tokens each of eight chips computes with, for three meshes."""
    fig, axes = plt.subplots(len(_WAYS), 1, figsize=(10, 4.9), layout="constrained")
    colours = plt.get_cmap("viridis")(np.linspace(0.05, 0.95, _CHIPS))
    for ax, (axis, words) in zip(axes, _WAYS.items(), strict=True):
        for chip in range(_CHIPS):
            left = chip * 1.4
            for part in range(_CHIPS):
                has = axis != "tensor" or part == chip
                ax.add_patch(Rectangle((left + part / 8, 0.5), 1 / 8, 1, **_style("0.55", has)))
                colour, has = colours[chip if axis == "fsdp" else part], axis != "context" or part == chip
                ax.add_patch(Rectangle((left + part / 8, 0), 1 / 8, 0.28, **_style(colour, has)))
            if ax is axes[0]:
                ax.text(left + 0.5, 1.58, f"chip {chip}", ha="center", fontsize=10)
        ax.text(-0.2, 1.0, "matrix", ha="right", va="center", fontsize=9.5)
        ax.text(-0.2, 0.14, "tokens", ha="right", va="center", fontsize=9.5)
        ax.text(-1.0, 0.75, axis, ha="right", va="bottom", fontweight="bold")
        ax.text(-1.0, 0.65, words, ha="right", va="top", fontsize=9)
        ax.set(xlim=(-3.5, 10.9), ylim=(-0.1, 1.6), aspect="equal")
        ax.axis("off")
    fig.supxlabel("filled: this chip computes with it    empty: others do", fontsize=10)
    return fig


def _style(colour: object, has: bool) -> dict[str, Any]:
    """Return how a part is drawn that a chip has, or has not."""
    return {"facecolor": colour if has else "none", "edgecolor": "white" if has else "0.7", "linewidth": 0.5}
