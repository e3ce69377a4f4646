"""What one more layer costs, in several ways of running a stack and on several chips."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from jaxmem.provenance import Category
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


def layer_costs_drawn(points: Mapping[tuple[str, str], Mapping[int, float]]) -> Figure:
    """Return a figure: a mark at what one more layer adds in each way, on each chip, and the cheapest ways as lines.

    `points` maps (chip, way) to the bytes at each depth, counted in inputs of a layer. The lines are of the two ways
    with the least slopes, and go through the depths that were compiled.
    """
    chips, ways = (list(dict.fromkeys(names)) for names in zip(*points, strict=True))
    slopes = {case: _slope(sizes) for case, sizes in points.items()}
    ways.sort(key=lambda way: slopes[chips[0], way])
    fig, (marks, lines) = plt.subplots(1, 2, figsize=(9.6, 4.2), width_ratios=(3, 2), layout="constrained")
    height = 0.6 / len(chips)
    for i, chip in enumerate(chips):
        rows = [y + (i - (len(chips) - 1) / 2) * height for y in range(len(ways))]
        marks.plot([slopes[chip, way] for way in ways], rows, MARKERS[i], color=f"C{i}", markersize=8, label=chip)
        for y, way in zip(rows, ways, strict=True):
            label = f"{slopes[chip, way]:.1f}"
            marks.annotate(label, (slopes[chip, way], y), (8, 0), textcoords="offset points", va="center", fontsize=9)
        for way in ways[:2]:
            depths, sizes = zip(*sorted(points[chip, way].items()), strict=True)
            style = "-" if way == ways[0] else "--"
            lines.plot(depths, sizes, style, color=f"C{i}", marker=MARKERS[ways.index(way)], label=f"{way}, {chip}")
    marks.axvline(1, color="black", linewidth=0.8)
    marks.set(
        xscale="log", xlim=(0.5, 2 * max(slopes.values())), xlabel="one more layer adds, in inputs of a layer (log)"
    )
    marks.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    marks.minorticks_off()
    marks.set_yticks(range(len(ways)), ways, fontsize=10)
    marks.invert_yaxis()
    marks.legend(frameon=False, loc="upper right", fontsize=10)
    lines.set(xlabel="layers", ylabel="temporaries, in inputs of a layer", xticks=range(0, 25, 8), xlim=(0, None))
    lines.set_ylim(0, None)
    lines.legend(frameon=False, loc="lower right", fontsize=9)
    return fig


def layer_costs_alt(points: Mapping[tuple[str, str], Mapping[int, float]]) -> str:
    """Return the words for `layer_costs_drawn`."""
    words = []
    for (chip, way), sizes in points.items():
        words.append(f"{way} on {chip} {_slope(sizes):.1f}")
    opening = (
        "Marks at what one more layer adds, in inputs of a layer, and lines of the two cheapest ways over the depth"
    )
    return f"{opening}: {'; '.join(words)}."


def _slope(sizes: Mapping[int, float]) -> float:
    """Return what one more layer adds, between the two deepest."""
    (shallow, less), (deep, more) = sorted(sizes.items())[-2:]
    return (more - less) / (deep - shallow)
