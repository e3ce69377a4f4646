"""What one more layer costs, in several ways of running a stack and on several chips, as lines over the depth."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from llamem.course.plots import MARKERS
from llamem.memory.provenance import Category

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
    """Return a figure: of each chip a panel, memory against depth, a line for each way of running the layers.

    `points` maps (chip, way, depth) to bytes of `x`. A way whose name ends in "+ remat" has the colour of the same way
    without, which is dashed. Lines go through the two deepest points and end where they leave the picture.
    """
    chips, ways = (list(dict.fromkeys(names)) for names in list(zip(*points, strict=True))[:2])
    kinds = list(dict.fromkeys(way.removesuffix(" + remat") for way in ways))
    fig, panels = plt.subplots(1, len(chips), figsize=(8.8, 4.2), sharey=True, squeeze=False)
    for ax, chip in zip(panels[0], chips, strict=True):
        for way in ways:
            depths, sizes = _of(points, chip, way)
            i = kinds.index(way.removesuffix(" + remat"))
            line, fill = ("-", "full") if way.endswith(" + remat") else ("--", "none")
            marked: dict = {"color": f"C{i}", "marker": MARKERS[i], "fillstyle": fill}
            ends = np.array([0, max(depth for *_, depth in points)])
            ax.plot(ends, sizes[-1] + _slope(depths, sizes) * (ends - depths[-1]), line, color=f"C{i}")
            ax.plot(depths, sizes, linestyle="none", **marked)
            ax.plot([], [], line, label=way, **marked)
        rematerialised = max(size for (_, way, _), size in points.items() if way.endswith("+ remat"))
        ax.set(
            title=chip,
            xlabel="layers",
            xticks=range(0, ends[-1] + 1, 8),
            xlim=(0, None),
            ylim=(0, 1.1 * rematerialised),
        )
    panels[0, 0].set_ylabel("temporaries, in bytes of x")
    fig.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds), frameon=False)
    fig.set_layout_engine("constrained")
    return fig


def layer_costs_alt(points: Mapping[tuple[str, str, int], float]) -> str:
    """Return the words for `layer_costs_drawn`."""
    words = []
    for chip, way in dict.fromkeys(key[:2] for key in points):
        words.append(f"{way} on {chip} {_slope(*_of(points, chip, way)):.1f}")
    return f"Memory against depth, a line for each way. What one more layer adds, in bytes of x: {'; '.join(words)}."


def _slope(depths: list[int], sizes: list[float]) -> float:
    """Return what one more layer adds, between the two deepest."""
    return (sizes[-1] - sizes[-2]) / (depths[-1] - depths[-2])


def _of(points: Mapping[tuple[str, str, int], float], chip: str, way: str) -> tuple[list[int], list[float]]:
    """Return the depths and sizes of a way on a chip."""
    found = sorted((depth, size) for (one, name, depth), size in points.items() if (one, name) == (chip, way))
    return [depth for depth, _ in found], [size for _, size in found]
