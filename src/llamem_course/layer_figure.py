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


def layer_costs_drawn(points: Mapping[tuple[str, str, int], float]) -> Figure:
    """Return a figure: a mark at what one more layer adds in each way, on each chip, and the cheapest ways as lines.

    `points` maps (chip, way, depth) to bytes, counted in inputs of a layer. The lines are of the two ways with the
    least slopes, and go through the depths that were compiled.
    """
    chips, ways = (list(dict.fromkeys(names)) for names in list(zip(*points, strict=True))[:2])
    slopes = {(chip, way): _slope(*_of(points, chip, way)) for chip in chips for way in ways}
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
            depths, sizes = _of(points, chip, way)
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


def layer_costs_alt(points: Mapping[tuple[str, str, int], float]) -> str:
    """Return the words for `layer_costs_drawn`."""
    words = []
    for chip, way in dict.fromkeys(key[:2] for key in points):
        words.append(f"{way} on {chip} {_slope(*_of(points, chip, way)):.1f}")
    opening = (
        "Marks at what one more layer adds, in inputs of a layer, and lines of the two cheapest ways over the depth"
    )
    return f"{opening}: {'; '.join(words)}."


def _slope(depths: list[int], sizes: list[float]) -> float:
    """Return what one more layer adds, between the two deepest."""
    return (sizes[-1] - sizes[-2]) / (depths[-1] - depths[-2])


def _of(points: Mapping[tuple[str, str, int], float], chip: str, way: str) -> tuple[list[int], list[float]]:
    """Return the depths and sizes of a way on a chip."""
    found = sorted((depth, size) for (one, name, depth), size in points.items() if (one, name) == (chip, way))
    return [depth for depth, _ in found], [size for _, size in found]
