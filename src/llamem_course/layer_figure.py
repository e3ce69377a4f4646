"""What a stack of layers holds, in several ways of running it and on several chips."""

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


def eight_layers_drawn(points: Mapping[int, Mapping[tuple[str, str], float]]) -> Figure:
    """Return a figure: a mark at what eight layers hold in each way, on each chip, and a panel for each length.

    `points` maps tokens, and then (chip, way), to the temporaries, counted in inputs of a layer. The ways stand in the
    order of the first chip in the first panel.
    """
    first = next(iter(points.values()))
    chips = list(dict.fromkeys(chip for chip, _ in first))
    ways = sorted({way for _, way in first}, key=lambda way: first[chips[0], way])
    fig, panels = plt.subplots(
        1, len(points), figsize=(9.6, 4.2), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    height = 0.6 / len(chips)
    for panel, (tokens, sizes) in zip(panels[0], points.items(), strict=True):
        for i, chip in enumerate(chips):
            shown = [(sizes[chip, way], y) for y, way in enumerate(ways) if (chip, way) in sizes]
            rows = [(x, y + (i - (len(chips) - 1) / 2) * height) for x, y in shown]
            panel.plot(*zip(*rows, strict=True), MARKERS[i], color=f"C{i}", markersize=8, label=chip)
            for x, y in rows:
                panel.annotate(f"{x:.0f}", (x, y), (8, 0), textcoords="offset points", va="center", fontsize=9)
        panel.set_title(f"{tokens:,} tokens", fontsize=11)
        panel.set(xscale="log", xlabel="eight layers hold, in inputs of a layer (log)")
        panel.set_xticks([20, 50, 100, 200, 500], ["20", "50", "100", "200", "500"])
        panel.minorticks_off()
    held = [size for sizes in points.values() for size in sizes.values()]
    panels[0, 0].set_xlim(0.7 * min(held), 2 * max(held))
    panels[0, 0].set_yticks(range(len(ways)), ways, fontsize=10)
    panels[0, 0].invert_yaxis()
    panels[0, 0].legend(frameon=False, loc="upper right", fontsize=10)
    return fig


def eight_layers_alt(points: Mapping[int, Mapping[tuple[str, str], float]]) -> str:
    """Return the words for `eight_layers_drawn`."""
    words = []
    for tokens, sizes in points.items():
        told = ", ".join(f"{way} on {chip} {size:.0f}" for (chip, way), size in sizes.items())
        words.append(f"{tokens:,} tokens: {told}.")
    return f"Marks at what eight layers hold, in inputs of a layer. {' '.join(words)}"
