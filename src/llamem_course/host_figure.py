"""The figure of notebook 11: for each mesh, what a chip holds at the peak and what arrives for a sequence."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

HOLDS = ("weights and moments", "inputs of all layers", "the rest")
RECEIVES = ("all-gathered, reduce-scattered", "all-reduced")


def meshes_compared(
    holds: Mapping[str, Sequence[float]], receives: Mapping[str, Sequence[float]], capacity: float
) -> tuple[Figure, str]:
    """Draw a bar a mesh, to scale, and return the figure and its words.

    `holds` are GiB of a chip by mesh, in the order of `HOLDS`; `receives` GiB that arrive on a chip for each sequence,
    in that of `RECEIVES`. A line marks the chip's `capacity`.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9), sharey=True, layout="constrained")
    for ax, rows, names, first in ((left, holds, HOLDS, 0), (right, receives, RECEIVES, 4)):
        starts = [0.0] * len(rows)
        for part, name in enumerate(names):
            sizes = [row[part] for row in rows.values()]
            ax.barh([*rows], sizes, left=starts, height=0.65, color=f"C{first + part}", label=name)
            starts = [start + size for start, size in zip(starts, sizes, strict=True)]
        for place, end in enumerate(starts):
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the dashed line
            ax.text(end + 0.012 * max(starts), place, f"{end:.1f}", va="center", fontsize=10, bbox=box)
        ax.set_xlim(0, 1.15 * max(starts))
        ax.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(names))
    left.axvline(capacity, color="black", linestyle="--", linewidth=1)
    left.set_xlabel(f"GiB that a chip holds at the peak; dashed: its {capacity:.2f}")
    right.set_xlabel("GiB that arrive on a chip for each sequence")
    left.invert_yaxis()
    told = (f"{name}: holds {sum(holds[name]):.1f}, receives {sum(receives[name]):.1f}" for name in holds)
    return fig, f"Bars for each mesh, in GiB of a chip. {'; '.join(told)}."
