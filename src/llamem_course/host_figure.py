"""The figures of notebook 11: an array over hosts that each hold their rows of it; a layer's work over eight chips."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

_COLOURS = "#3f90da", "#ffa90e", "#bd1f01", "#92dadd"
_CHIPS = 8
_WAYS = {
    "fsdp": "a layer's matrix is gathered;\neach chip has a sequence",
    "tensor": "a chip uses its part alone;\nall have the same sequence",
    "context": "a layer's matrix is gathered;\none sequence, its tokens split",
}
MESHES_ALT = (
    "Eight chips, three rows. fsdp: of a layer's matrix each chip holds an eighth of the rows and gathers the others; "
    "its tokens are a sequence of its own. tensor: each holds and uses an eighth of the columns alone; all have "
    "all tokens of one sequence. context: the matrix as with fsdp; each has an eighth of the tokens of one sequence."
)


def hosts_drawn(hosts: int, rows: int = 8) -> tuple[Figure, str]:
    """Return a figure, and its words: an array of `rows` numbers 0, 1, 2 ... split evenly among `hosts` processes."""
    share, width = rows // hosts, rows + 2.0
    fig, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
    middle = hosts * width / 2 - 0.5
    _cells(ax, middle - rows / 2, 4.3, {row: _COLOURS[row // share] for row in range(rows)}, rows)
    ax.text(middle, 5.65, f"one array x of {rows} rows, over all devices", ha="center", va="bottom")
    for host in range(hosts):
        left = host * width
        edge = {"boxstyle": "round,pad=0.1", "facecolor": "#f6f6f6", "edgecolor": "0.5"}
        ax.add_patch(FancyBboxPatch((left, 0), rows + 1.0, 3.1, **edge))
        own = range(host * share, (host + 1) * share)
        ax.text(left + 0.3, 2.85, f"host {host}, device {host}", va="top", fontweight="bold")
        _cells(ax, left + 0.5, 1.05, {row: _COLOURS[host] for row in own}, rows)
        ax.text(left + 0.5, 0.15, f"knows x.sum() = {sum(range(rows))}", va="bottom", fontsize=9.5)
    for host in range(hosts - 1):
        ends = (host * width + rows + 1.15, 1.55), ((host + 1) * width - 0.15, 1.55)
        ax.annotate("", ends[1], ends[0], arrowprops={"arrowstyle": "<->", "color": "0.2", "linewidth": 1.5})
    ax.text(middle, -0.25, "between the devices travel sums of rows, not the rows", ha="center", va="top", fontsize=9.5)
    ax.set(xlim=(-0.4, hosts * width - 0.6), ylim=(-1.0, 6.4))
    ax.axis("off")
    own_rows = "; ".join(f"host {host} rows {host * share} to {(host + 1) * share - 1}" for host in range(hosts))
    return fig, f"One array of {rows} rows above; below a box for each host that holds its own alone: {own_rows}."


def meshes_drawn() -> Figure:
    """Return a figure: which part of a layer's matrix and which tokens each of eight chips has, for three meshes."""
    fig, axes = plt.subplots(len(_WAYS), 1, figsize=(10, 4.9), layout="constrained")
    colours = plt.get_cmap("viridis")(np.linspace(0.05, 0.95, _CHIPS))
    for ax, (axis, words) in zip(axes, _WAYS.items(), strict=True):
        for chip in range(_CHIPS):
            left = chip * 1.4
            _matrix(ax, left, chip, colours, axis)
            for token in range(_CHIPS):
                colour = colours[chip if axis == "fsdp" else token]
                has = axis != "context" or token == chip
                style = {"facecolor": colour if has else "none", "edgecolor": "white" if has else "0.6"}
                ax.add_patch(Rectangle((left + token / 8, 0), 1 / 8, 0.28, linewidth=0.5, **style))
            if ax is axes[0]:
                ax.text(left + 0.5, 1.58, f"chip {chip}", ha="center", fontsize=10)
        ax.text(-0.2, 1.0, "matrix", ha="right", va="center", fontsize=9.5)
        ax.text(-0.2, 0.14, "tokens", ha="right", va="center", fontsize=9.5)
        ax.text(-1.0, 0.75, axis, ha="right", va="bottom", fontweight="bold")
        ax.text(-1.0, 0.65, words, ha="right", va="top", fontsize=9)
        ax.set(xlim=(-3.5, 10.9), ylim=(-0.1, 1.6), aspect="equal")
        ax.axis("off")
    words = "full colour: lies on this chip    pale: gathered while the layer runs    empty: not on this chip"
    fig.supxlabel(words, fontsize=10)
    return fig


def _matrix(ax: Axes, left: float, chip: int, colours: np.ndarray, axis: str) -> None:
    """One chip's matrix: its own eighth in full colour, the others pale where they are gathered, else empty."""
    for part in range(_CHIPS):
        own, split = part == chip, axis == "tensor"
        corner = (left + part / 8, 0.5) if split else (left, 1.5 - (part + 1) / 8)
        size = (1 / 8, 1) if split else (1, 1 / 8)
        face = "none" if split and not own else colours[part]
        alpha = 1.0 if own or split else 0.3
        edge = "0.6" if split and not own else "white"
        ax.add_patch(Rectangle(corner, *size, facecolor=face, edgecolor=edge, alpha=alpha, linewidth=0.5))


def _cells(ax: Axes, left: float, bottom: float, filled: dict[int, str], count: int) -> None:
    for cell in range(count):
        colour = filled.get(cell, "none")
        edge, style = ("white", "-") if cell in filled else ("0.6", ":")
        ax.add_patch(Rectangle((left + cell, bottom), 1, 1.1, facecolor=colour, edgecolor=edge, linestyle=style))
        if cell in filled:
            dark = colour in ("#3f90da", "#bd1f01")
            ax.text(
                left + cell + 0.5,
                bottom + 0.55,
                str(cell),
                ha="center",
                va="center",
                color="white" if dark else "black",
            )
