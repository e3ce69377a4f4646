"""The figure of notebook 12: when layers cross the link and when the chip computes, on the way back."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

# What happens to a layer, in this order, and its colour.
STAGES = (("fetch", "#ffa90e"), ("compute", "#c9d1d3"), ("put back", "#3f90da"))
Starts = list[tuple[float, float, float]]


def starts(fetch: float, compute: float, n_layers: int, beside: bool) -> Starts:
    """Return when each layer's three stages begin, in seconds; putting back takes as long as fetching.

    `beside`: copies run beside matmuls and both ways at once, and a layer is fetched as soon as the one before it
    begins to compute. Otherwise one stage follows the other.
    """
    found: Starts = []
    for i in range(n_layers):
        if not beside:
            first = i * (2 * fetch + compute)
            found.append((first, first + fetch, first + fetch + compute))
            continue
        link = found[-1][1] if found else 0.0
        matmuls = max(link + fetch, found[-1][1] + compute if found else 0.0)
        home = max(matmuls + compute, found[-1][2] + fetch if found else 0.0)
        found.append((link, matmuls, home))
    return found


def backward_drawn(fetch: float, rows: Sequence[tuple[str, float, bool]], n_layers: int) -> tuple[Figure, str]:
    """Return a figure of the first turns of the backward loop against time, a panel for each row, and its words.

    `fetch`: seconds in which a layer crosses the link. A row is its title, seconds in which the chip computes a layer,
    and whether stages run beside each other, as in `starts`. The last of the model's `n_layers` comes first.
    """
    fig, axes = plt.subplots(len(rows), figsize=(9, 1.45 * len(rows) + 0.5), sharex=True, layout="constrained")
    shown, said = min(4, n_layers), []
    for ax, (title, compute, beside) in zip(axes, rows, strict=True):
        turns = starts(fetch, compute, shown, beside)
        for i, turn in enumerate(turns):
            for lane, (start, long, (_, colour)) in enumerate(zip(turn, (fetch, compute, fetch), STAGES, strict=True)):
                ax.barh(lane, long, left=start, height=0.8, color=colour, edgecolor="black", linewidth=0.6)
                ax.text(start + long / 2, lane, str(n_layers - i), ha="center", va="center", fontsize=9)
        end = turns[-1][2] + fetch
        said.append(f"{title}: {shown} layers in {end:.2f} s, {shown * compute:.2f} of them matmuls")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_yticks(range(len(STAGES)), [stage for stage, _ in STAGES])
        ax.set_ylim(len(STAGES) - 0.45, -0.55)
        ax.tick_params(axis="y", length=0)
    axes[-1].set_xlabel("seconds from the start of the backward loop; the number is the layer's")
    return fig, f"Fetch, compute and put back of each layer against time. {'; '.join(said)}."
