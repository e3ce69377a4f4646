"""Which arrays of notebook 01's small layer wait for the backward pass, plain and under `jax.checkpoint`."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from jaxmem.tracing.residuals import Residuals
from llamem_course.timeline_figure import COLOURS

MiB = 2**20
# The arrays in the order in which they are made: the operation by which a residual is known, and its size in inputs.
_MADE = {
    "x": ("", 1),
    "x @ up": ("dot_general", 4),
    "tanh": ("tanh", 4),
    "1 - tanh": ("sub", 4),
    "sin": ("sin", 4),
    "cos": ("cos", 4),
    "sin * tanh": ("mul", 4),
    "for the loss": ("mul", 1),
}


def kept(programs: Mapping[str, Residuals], input_bytes: int) -> tuple[Figure, str]:
    """Draw the layer's arrays as columns, filled where they are kept, a row for each program; return its words, too.

    The first program has no checkpoint: what it drops, nobody makes again.
    """
    fig, axes = plt.subplots(
        len(programs), 1, figsize=(8, 1.7 * len(programs) + 0.3), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    told = []
    for ax, (name, residuals) in zip(axes.flat, programs.items(), strict=True):
        rows = {("" if row.argument else row.operation, row.bytes) for row in residuals.rows}
        waits = {label: (made, size * input_bytes) in rows for label, (made, size) in _MADE.items()}
        for place, (label, held) in enumerate(waits.items()):
            height = _MADE[label][1] * input_bytes / MiB
            face, line = (COLOURS["residuals"],) * 2 if held else ("none", "0.6")
            ax.bar(place, height, 0.8, color=face, edgecolor=line, linestyle="-" if held else "--")
            gone = "made again" if ax is not axes[0, 0] else "dropped"
            word, colour = ("kept", "black") if held else (gone, "0.45")
            ax.annotate(
                word, (place, height), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=9, color=colour
            )
        total = sum(_MADE[label][1] * input_bytes for label, held in waits.items() if held) / MiB
        ax.set_title(f"{name}: {total:,.0f} MiB", loc="left", fontweight="bold", fontsize=10.5)
        ax.set_ylim(0, 5 * input_bytes / MiB)
        ax.set_ylabel("MiB")
        ax.spines[["top", "right"]].set_visible(False)
        told.append(f"{name} keeps {', '.join(label for label, held in waits.items() if held)}: {total:,.0f} MiB")
    axes[-1, 0].set_xticks(range(len(_MADE)), list(_MADE))
    return fig, "Arrays of a small layer, kept for the backward pass or not. " + "; ".join(told) + "."
