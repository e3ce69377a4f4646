"""The logits cut both ways: what one tile reads, makes and forgets, finishes and adds to."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

Box = tuple[float, float, float, float]  # left, bottom, width, height

# Where the arrays lie: tokens go down, words go right, the width of the model is the short side.
_X, _W, _DX, _DW, _LOGITS = (-1.5, 0, 1, 4), (0, 4.5, 6, 1), (6.5, 0, 1, 4), (0, -1.5, 6, 1), (0, 0, 6, 4)
_KINDS = {
    "reads": ("C0", ""),
    "makes, then forgets": ("C1", ".."),
    "finishes": ("C2", "//"),
    "adds to, in float32": ("C3", "xx"),
}
TWO_CUTS_ALT = (
    "The logits cut twice. A tile of tokens reads its tokens and all of W, finishes its rows of dx, adds to all of dW. "
    "A tile of the vocabulary reads all of x and its words, finishes its part of dW, adds to dx."
)


def two_cuts() -> Figure:
    """Tiles of tokens and tiles of the vocabulary, one of each at work; `TWO_CUTS_ALT` says it in words."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4.6))
    rows, words = (0, 2, 6, 1), (2, 0, 1.5, 4)
    _cut(left, "tiles of tokens", [[(-1.5, 2, 1, 1), _W], [rows], [(6.5, 2, 1, 1)], [_DW]])
    _cut(right, "tiles of the vocabulary", [[_X, (2, 4.5, 1.5, 1)], [words], [(2, -1.5, 1.5, 1)], [_DX]])
    handles = [_patch((0, 0, 1, 1), *style, label=kind) for kind, style in _KINDS.items()]
    fig.legend(handles=handles, loc="lower center", ncols=4, frameon=False, bbox_to_anchor=(0.5, 0.05))
    return fig


def _patch(box: Box, colour: str, hatch: str, label: str = "") -> Rectangle:
    style: dict[str, Any] = {"facecolor": colour, "alpha": 0.6, "hatch": hatch, "edgecolor": "white", "label": label}
    return Rectangle(box[:2], *box[2:], **style)


def _cut(ax: Axes, title: str, boxes: list[list[Box]]) -> None:
    arrays = {"x [N, D]": _X, "Wᵀ [D, V]": _W, "dx [N, D]": _DX, "dWᵀ [D, V]": _DW, "": _LOGITS}
    for (x, y, width, height), name in zip(arrays.values(), arrays, strict=True):
        ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="gray"))
        upright = height > width  # names stand beside the tile, not under it
        place = (x + width / 2, y + height / 4) if upright else (x + 0.8 * width, y + height / 2)
        ax.text(*place, name, ha="center", va="center", rotation=90 if upright else 0)
    for same_kind, style in zip(boxes, _KINDS.values(), strict=True):
        for box in same_kind:
            ax.add_patch(_patch(box, *style))
    x, y, width, height = boxes[1][0]
    ax.text(x + width / 2, y + height / 2, "a tile", ha="center", va="center")
    ax.text(0.1, 0.1, "logits [N, V]")
    ax.set(title=title, xlim=(-1.7, 7.7), ylim=(-1.7, 5.7), aspect="equal")
    ax.axis("off")
