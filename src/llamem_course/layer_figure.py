"""What a stack of layers holds, in several ways of running it and on several chips."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from jaxmem.reading.provenance import Category
from llamem_course.plots import MARKERS

# What the larger arrays in the gradient of a stack of layers are, by the operation that makes them; the first fits.
PARTS: dict[str, Category] = {
    "splash": "workspace",
    "rematted_computation": "rematerialised",
    "w[": "weights",
    # Slices of the stacked weights.
    "squeeze": "weights",
    "jvp()/slice": "weights",
    # Gradients of slices: of a layer, and of a group in two loops.
    "transpose(jvp(jvp()))/checkpoint/dot_general": "gradients",
    "transpose(jvp())/while/body": "gradients",
    "checkpoint/broadcast_in_dim": "gradients",
}


def one_more_drawn(points: Mapping[int, Mapping[tuple[str, str], float]], weights: Mapping[int, float]) -> Figure:
    """Return a figure: a mark at what one more layer costs in each way, on each chip, and a panel for each length.

    `points` maps tokens, and then (chip, way), to bytes counted in inputs of a layer. `weights` maps tokens to those of
    a layer's weights, drawn as a dashed line. The ways stand in the order of the first chip in the first panel.
    """
    first = next(iter(points.values()))
    chips = list(dict.fromkeys(chip for chip, _ in first))
    ways = sorted({way for _, way in first}, key=lambda way: first[chips[0], way])
    fig, panels = plt.subplots(
        1, len(points), figsize=(9.6, 3.6), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    height = 0.6 / len(chips)
    for panel, (tokens, costs) in zip(panels[0], points.items(), strict=True):
        panel.axvline(weights[tokens], linestyle="--", color="0.6", label="a layer's weights")
        for i, chip in enumerate(chips):
            rows = [(costs[chip, way], y + (i - (len(chips) - 1) / 2) * height) for y, way in enumerate(ways)]
            panel.plot(*zip(*rows, strict=True), MARKERS[i], color=f"C{i}", markersize=8, label=chip)
            for x, y in rows:
                label = panel.annotate(f"{x:.2f}", (x, y), (8, 0), textcoords="offset points", va="center", fontsize=9)
                label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        panel.set_title(f"{tokens:,} tokens", fontsize=11)
        panel.set(xscale="log", xlabel="one more layer costs, in inputs (log)")
        panel.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        panel.minorticks_off()
    most = max(cost for costs in points.values() for cost in costs.values())
    panels[0, 0].set_xlim(0.7, 2.5 * most)
    panels[0, 0].set_yticks(range(len(ways)), ways, fontsize=10)
    panels[0, 0].invert_yaxis()
    panels[0, 0].legend(frameon=False, loc="upper right", fontsize=10)
    return fig


def one_more_alt(points: Mapping[int, Mapping[tuple[str, str], float]], weights: Mapping[int, float]) -> str:
    """Return the words for `one_more_drawn`."""
    words = []
    for tokens, costs in points.items():
        told = ", ".join(f"{way} on {chip} {cost:.2f}" for (chip, way), cost in costs.items())
        words.append(f"{tokens:,} tokens, where a layer's weights are {weights[tokens]:.2f} inputs: {told}.")
    return f"Marks at what one more layer costs, in inputs. {' '.join(words)}"
