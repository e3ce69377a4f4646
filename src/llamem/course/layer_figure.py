"""What one more layer costs, in several ways of running a stack and on several chips, as bars."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from llamem.course.plots import HATCHES


def layer_costs_drawn(costs: Mapping[tuple[str, str], float], weights: float) -> Figure:
    """Return a figure: bars by way, one for each chip, and a layer's weights as a dashed line, in bytes of `x`.

    `costs` maps (chip, way) to what one more layer costs.
    """
    fig, ax = plt.subplots(figsize=(8, 4.3))
    chips, ways = (list(dict.fromkeys(names)) for names in zip(*costs, strict=True))
    for i, (chip, hatch) in enumerate(zip(chips, HATCHES, strict=False)):
        sizes = [costs[chip, way] for way in ways]
        bars = ax.barh(np.arange(len(ways)) + 0.38 * i, sizes, 0.36, hatch=hatch, edgecolor="white", label=chip)
        ax.bar_label(bars, fmt="%.1f", padding=3)
    ax.axvline(weights, color="black", linestyle="--", label="one layer's weights")
    ax.set(xlabel="one more layer costs, in bytes of x", yticks=np.arange(len(ways)) + 0.19, yticklabels=ways)
    ax.set_xlim(0, 1.08 * max(costs.values()))
    ax.invert_yaxis()
    ax.legend(frameon=False, loc="lower right")
    return fig


def layer_costs_alt(costs: Mapping[tuple[str, str], float]) -> str:
    """Return the words for `layer_costs_drawn`."""
    words = "; ".join(f"{way} on {chip} {cost:.1f}" for (chip, way), cost in costs.items())
    return f"Bars: what one more layer costs in bytes of x. {words}. A layer's weights are a dashed line."
