"""The figures of notebook 11: a bar for each mesh, divided into parts."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def mesh_bars(
    rows: Mapping[str, Mapping[str, float]], what: str, *, capacity: float | None = None, first_color: int = 0
) -> tuple[Figure, str]:
    """Draw a bar a mesh, to scale and with the sizes of its parts, and return the figure and its words.

    `rows` are GiB by mesh, and then by part; `what` says of what. A dashed line marks the chip's `capacity`.
    """
    fig, ax = plt.subplots(figsize=(9, 0.5 * len(rows) + 1.3), layout="constrained")
    totals = {name: sum(parts.values()) for name, parts in rows.items()}
    widest, starts = max(totals.values()), [0.0] * len(rows)
    for number, part in enumerate(next(iter(rows.values()))):
        sizes = [parts[part] for parts in rows.values()]
        bars = ax.barh([*rows], sizes, left=starts, height=0.65, color=f"C{first_color + number}", label=part)
        for bar, size in zip(bars, sizes, strict=True):
            if size > 0.05 * widest:  # there is room for the number
                place = bar.get_x() + size / 2, bar.get_y() + bar.get_height() / 2
                light = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}
                ax.text(*place, f"{size:.1f}", ha="center", va="center", fontsize=10, bbox=light)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for place, total in enumerate(totals.values()):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the dashed line
        ax.text(total + 0.012 * widest, place, f"{total:.1f}", va="center", fontsize=10, weight="bold", bbox=box)
    ax.set_xlim(0, 1.12 * widest)
    if capacity is not None:
        ax.axvline(capacity, color="black", linestyle="--", linewidth=1, label=f"a chip has {capacity:.2f}")
    ax.legend(frameon=False, fontsize=10, loc="lower center", bbox_to_anchor=(0.45, 1), ncols=4)
    ax.set_xlabel(what)
    ax.invert_yaxis()
    told = "; ".join(
        f"{name}: {total:.1f}, of it " + ", ".join(f"{part} {size:.1f}" for part, size in rows[name].items())
        for name, total in totals.items()
    )
    return fig, f"Bars for each mesh, {what}. {told}."
