"""Which device of a mesh holds which part of a loss's arrays, has the logits of which tile, and sends what."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

LAYOUTS_ALT = (
    "Three panels. data and fsdp: logits in eight bands of rows, the head grey or in slices of D. "
    "tensor: hidden states grey, head and logits in eight bands of columns."
)
TILES_ALT = (
    "One tile of the logits in four pictures, coloured by device. data: a tile of consecutive tokens lies on device 3 "
    "alone, one of dealt tokens an eighth on each device. tensor: the same of consecutive and of dealt words."
)
COLLECTIVES_ALT = (
    "Three panels of four devices, before and after. all-gather: one part each becomes all parts on each. "
    "reduce-scatter: a whole array each becomes one part of the sum on each. all-reduce: the whole sum on each. "
    "At each device 3, 3 and 6 parts arrive."
)
_DEVICES = 8


def _colours() -> Any:
    return plt.get_cmap("viridis")(np.linspace(0.05, 0.95, _DEVICES))


def _number(ax: Axes, x: float, y: float, text: str, owner: int) -> None:
    ax.text(x, y, text, ha="center", va="center", fontsize=9, color="black" if owner > 4 else "white")


def layouts_drawn(layouts: Mapping[str, tuple[P, P, P]], meshes: Mapping[str, Mesh]) -> Figure:
    """Return a figure: for each axis, which of eight devices holds which slice of hidden states, head and logits.

    `layouts` maps an axis to the specs of hidden states `[N, D]`, head `[V, D]` and targets. Grey is held by all.
    """
    fig, axes = plt.subplots(1, len(layouts), figsize=(10, 2.8))
    for ax, (axis, (x_spec, head_spec, _)) in zip(axes, layouts.items(), strict=True):
        rows, columns = (*x_spec, None)[0], "tensor" if axis == "tensor" else None
        _array(ax, meshes[axis], P(*(*x_spec, None)[:2]), (-1.7, 0, 1.2, 4), "x_ND")
        _array(ax, meshes[axis], P(*reversed((*head_spec, None, None)[:2])), (0, 4.6, 4, 0.9), "head_VD.T")
        _array(ax, meshes[axis], P(rows, columns), (0, 0, 4, 4), "logits_NV")
        ax.text(-1.8, 2, "eight sequences", rotation=90, ha="right", va="center", fontsize=9)
        ax.set_title(axis, x=2 / 3)
        ax.set(xlim=(-2.4, 4.2), ylim=(-0.1, 6.0), aspect="equal")
        ax.axis("off")
    return fig


def _array(ax: Axes, mesh: Mesh, spec: P, box: tuple[float, float, float, float], name: str) -> None:
    """One array as a rectangle, each device's slice of it, as JAX says, in that device's colour."""
    x, y, width, height = box
    size = _DEVICES
    for device, (rows, columns) in NamedSharding(mesh, spec).devices_indices_map((size, size)).items():
        top, bottom = (rows.start or 0) / size, (rows.stop or size) / size
        left, right = (columns.start or 0) / size, (columns.stop or size) / size
        whole = (top, bottom, left, right) == (0, 1, 0, 1)
        corner, wide, high = (
            (x + left * width, y + (1 - bottom) * height),
            (right - left) * width,
            (bottom - top) * height,
        )
        colour = "lightgray" if whole else _colours()[device.id]
        ax.add_patch(Rectangle(corner, wide, high, facecolor=colour, edgecolor="white"))
        if whole and device.id == 0:
            upright = 90 if high > wide else 0
            ax.text(x + width / 2, y + height / 2, "on all", ha="center", va="center", fontsize=9, rotation=upright)
        elif not whole and high > 0.2:  # else the number would not fit
            _number(ax, corner[0] + wide / 2, corner[1] + high / 2, str(device.id), device.id)
    ax.text(x + width / 2, y + height + 0.1, name, ha="center", fontsize=9)


def tiles_drawn() -> Figure:
    """Return a figure: on which devices the logits of one tile lie, for each way to cut and each way to divide."""
    fig, axes = plt.subplots(1, 4, figsize=(10, 2.9), layout="constrained")
    tokens = [(0, 3, 8, 1)], [(0, row + 3 / 8, 8, 1 / 8) for row in range(_DEVICES)]
    words = [[(y, x, height, width) for x, y, width, height in boxes] for boxes in tokens]
    for place, (ax, boxes) in enumerate(zip(axes, (*tokens, *words), strict=True)):
        by_tokens, wrong = place < 2, place % 2 == 0
        for device, colour in enumerate(_colours()):
            corner, wide, high = ((0, device), 8, 1) if by_tokens else ((device, 0), 1, 8)
            ax.add_patch(Rectangle(corner, wide, high, facecolor=colour, alpha=0.22))
            for x, y, width, height in boxes:
                tile = Rectangle((x, y), width, height, facecolor=colour)
                ax.add_patch(tile)
                tile.set_clip_path(Rectangle(corner, wide, high, transform=ax.transData))
            middle = (-0.5, device + 0.5) if by_tokens else (device + 0.5, 8.5)
            ax.text(*middle, str(device), ha="center", va="center", fontsize=8)
        for x, y, width, height in boxes:
            thick = 0.8 if wrong else 0
            ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="black", linewidth=thick))
        told = "all on device 3:\nall eight do its work" if wrong else "an eighth on each:\neach does its own"
        ax.text(4, 9.3, told, ha="center", va="top", fontsize=9.5, color="C2" if wrong else "black")
        title = f"{'consecutive' if wrong else 'dealt'} {'tokens' if by_tokens else 'words'}"
        ax.set_title(f"{'data' if by_tokens else 'tensor'}:\na tile of {title}", fontsize=10.5, x=0.59)
        ax.set(xlim=(-2, 8.2), ylim=(11.4, -0.2), aspect="equal")
        ax.axis("off")
        if place == 0:
            ax.text(-1.6, 4, "tokens", rotation=90, ha="center", va="center", fontsize=9)
            ax.text(4, 8.5, "words", ha="center", va="center", fontsize=9)
    return fig


def collectives_drawn() -> Figure:
    """Return a figure: what each of four devices has before and after three collectives."""
    fig, axes = plt.subplots(1, 3, figsize=(10, 1.95), layout="constrained")
    arriving = {"all-gather": 3, "reduce-scatter": 3, "all-reduce": 6}
    for ax, (title, parts) in zip(axes, arriving.items(), strict=True):
        for device in range(4):
            for part in range(4):
                before = title != "all-gather" or part == device
                _part(ax, (part, device), str(device) if before else "", device)
                if title == "all-gather":
                    _part(ax, (part + 6, device), str(part), part)
                else:
                    _part(ax, (part + 6, device), "Σ" if title == "all-reduce" or part == device else "", None)
        ax.annotate("", (5.8, 2), (4.2, 2), arrowprops={"arrowstyle": "->"})
        ax.text(5, 4.5, f"{parts} parts arrive at each", ha="center", va="center", fontsize=9.5)
        ax.set(title=title, xlim=(-1.4, 10), ylim=(5, 0), aspect="equal")
        ax.text(-0.3, 2, "four devices", rotation=90, ha="right", va="center", fontsize=9)
        ax.axis("off")
    return fig


def _part(ax: Axes, corner: tuple[float, float], text: str, owner: int | None) -> None:
    """One part of an array on one device: whose number it holds, a sum of all in grey, or nothing."""
    colour = "none" if not text else "lightgray" if owner is None else _colours()[2 * owner]
    ax.add_patch(Rectangle(corner, 0.94, 0.9, facecolor=colour, edgecolor="lightgray"))
    _number(ax, corner[0] + 0.47, corner[1] + 0.45, text, 8 if owner is None else 2 * owner)
