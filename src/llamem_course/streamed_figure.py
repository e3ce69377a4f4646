"""The figure of notebook 12: when layers cross the link and when the chip computes, on the way back."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

# What happens to a layer, in this order: its lane and its colour.
STAGES = ((0, "#ffa90e"), (1, "#c9d1d3"), (0, "#3f90da"))
Starts = list[tuple[float, float, float]]


def starts(fetch: float, compute: float, put_back: float, n_layers: int) -> Starts:
    """Return when each layer is fetched, computed and put back, in seconds, on a link that takes turns.

    Copies run beside matmuls, and the chip has room for two layers: one goes home before the next but one comes.
    """
    fetched, link, chip, found = [0.0, fetch], 2 * fetch, 0.0, []
    for i in range(n_layers):
        begins = max(chip, fetched[i] + fetch)
        chip = begins + compute
        home = max(chip, link)
        found.append((fetched[i], begins, home))
        fetched.append(home + put_back)
        link = home + put_back + fetch
    return found


def backward_drawn(rows: Sequence[tuple[str, float, float, float]], n_layers: int) -> tuple[Figure, str]:
    """Return a figure of the first turns of the backward loop against time, a panel for each row, and its words.

    A row is its title and a layer's seconds of fetching, computing and putting back. The last of the model's `n_layers`
    comes first.
    """
    fig, axes = plt.subplots(len(rows), figsize=(9, 1.5 * len(rows) + 0.4), sharex=True, layout="constrained")
    shown, said, end = min(4, n_layers), [], 0.0
    for ax, (title, fetch, compute, put_back) in zip(axes, rows, strict=True):
        turns = starts(fetch, compute, put_back, n_layers)
        for i, turn in enumerate(turns):
            for start, long, (lane, colour) in zip(turn, (fetch, compute, put_back), STAGES, strict=True):
                ax.barh(lane, long, left=start, height=0.8, color=colour, edgecolor="black", linewidth=0.6)
                ax.text(start + long / 2, lane, str(n_layers - i), ha="center", va="center", fontsize=10, clip_on=True)
        (_, first, _), (_, last, _) = turns[0], turns[shown - 1]
        end = max(end, last + compute)
        waits = last - first - (shown - 1) * compute
        said.append(f"{title}: until it computes layer {n_layers - shown + 1}, the chip waits for {waits:.2f} s")
        ax.set_title(title, loc="left", fontsize=11)
        ax.set_yticks(range(2), ["link", "chip"], fontsize=11)
        ax.set_ylim(1.55, -0.55)
        ax.tick_params(axis="y", length=0)
    for stage, (_, colour) in zip(("fetch a layer", "compute it", "put it back"), STAGES, strict=True):
        axes[0].barh(0, 0, color=colour, edgecolor="black", linewidth=0.6, label=stage)
    axes[0].legend(ncols=3, frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, fontsize=10)
    axes[-1].set_xlim(0, end)
    axes[-1].set_xlabel("seconds from the start of the backward loop; the number is the layer's")
    return fig, f"When layers cross the link and when the chip computes them. {'; '.join(said)}."
