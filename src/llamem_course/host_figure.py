"""The figures of notebook 11: a bar for each mesh, divided into parts."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def mesh_bars(
    rows: Mapping[str, Mapping[str, float]], what: str, *, line: tuple[float, str] | None = None, first_color: int = 0
) -> tuple[Figure, str]:
    """Draw a bar a mesh, to scale and with the sizes of its parts, and return the figure and its words.

    `rows` are sizes by mesh, and then by part; `what` says of what. Each part is named over the bar in which it is
    longest, one a bar. `line` is where a dashed line stands, and what it says.
    """
    fig, ax = plt.subplots(figsize=(9, 0.62 * len(rows) + 1.1), layout="constrained")
    totals = {name: sum(parts.values()) for name, parts in rows.items()}
    widest, starts = max(*totals.values(), line[0] if line else 0), [0.0] * len(rows)
    digits, named = 0 if widest > 50 else 1, set[int]()
    for number, part in enumerate(next(iter(rows.values()))):
        sizes, color = [parts[part] for parts in rows.values()], f"C{first_color + number}"
        bars = ax.barh([*rows], sizes, left=starts, height=0.5, color=color)
        for bar, size in zip(bars, sizes, strict=True):
            if size > 0.05 * widest:  # there is room for the number
                place = bar.get_x() + size / 2, bar.get_y() + bar.get_height() / 2
                light = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1}
                ax.text(*place, f"{size:.{digits}f}", ha="center", va="center", fontsize=10, bbox=light)
        longest = max(set(range(len(sizes))) - named, key=lambda row: (sizes[row], -row))
        named.add(longest)
        ax.text(starts[longest], longest - 0.28, part, color="0.15", fontsize=9.5, va="bottom")
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for place, total in enumerate(totals.values()):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the dashed line
        words = f"{total:.{digits}f}"
        ax.text(total + 0.012 * widest, place, words, va="center", fontsize=10, weight="bold", bbox=box)
    ax.set_xlim(0, 1.12 * widest)
    if line is not None:
        ax.axvline(line[0], color="black", linestyle="--", linewidth=1)
        ax.text(line[0], 1.0, line[1], transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=10)
    ax.set_xlabel(what)
    ax.invert_yaxis()
    told = "; ".join(
        f"{name}: {total:.{digits}f}, of it "
        + ", ".join(f"{part} {size:.{digits}f}" for part, size in rows[name].items())
        for name, total in totals.items()
    )
    ending = f" A line: {line[1]}." if line else ""
    return fig, f"Bars for each mesh, {what}. {told}.{ending}"
