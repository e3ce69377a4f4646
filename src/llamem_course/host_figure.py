"""The figure of notebook 11: one array over hosts that each hold their rows of it, and what each of them knows."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

_COLOURS = "#3f90da", "#ffa90e", "#bd1f01", "#92dadd"


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
