"""The figure of notebook 11: how much of the chips' speed is left as a batch is shared out among more of them."""

import re
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from jaxmem.chips.chip import CHIPS
from llamem.planner import CHIP_LINK, INSIDE, NETWORK, Pace
from llamem_course.plots import MARKERS


def mfu_curves(paces: Mapping[str, Sequence[Pace]], late: Mapping[str, Pace]) -> Figure:
    """Draw MFU against the chips of a step, by kind of chip, with the links of each beside its line.

    `paces` has steps of the same tokens on more and more chips; a ring marks that of `late`, where messages begin to
    take longer than products.
    """
    fig, ax = plt.subplots(figsize=(9.5, 4.6))
    for (chip, steps), marker in zip(paces.items(), MARKERS, strict=False):
        (line,) = ax.plot([step.chips for step in steps], [step.mfu for step in steps], marker=marker)
        ring = {"markersize": 15, "markeredgewidth": 1.8, "fillstyle": "none", "color": line.get_color()}
        ax.plot(late[chip].chips, late[chip].mfu, "o", **ring)
        flops = max(one.bf16_flops or 0 for name, one in CHIPS.items() if re.split("[-:]", name)[0] == chip)
        links = f"{CHIP_LINK[chip] / 1e9:.0f} GB/s among {INSIDE[chip]:,}, then {NETWORK[chip] / 1e9:.0f}"
        ax.annotate(
            f"{chip}, {flops / 1e12:.0f} TFLOP/s:\n{links}",
            (steps[-1].chips, steps[-1].mfu),
            xytext=(14, 0),
            textcoords="offset points",
            fontsize=8.5,
            va="center",
        )
    ax.text(0.02, 0.06, "ring: from here on messages take longer than products", transform=ax.transAxes, fontsize=10)
    ax.set(xscale="log", xlabel="chips, and tokens on each of them", ylabel="MFU (estimate)", ylim=(0, 0.5))
    steps = max(paces.values(), key=len)
    labels = [f"{step.chips:,}\n{step.tokens // step.chips:,}" for step in steps]
    ax.set_xticks([step.chips for step in steps], labels)
    ax.minorticks_off()
    return fig
