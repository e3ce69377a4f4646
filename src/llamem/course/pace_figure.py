"""The figure of notebook 11: how much of the chips' speed is left as a batch is shared out among more of them."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from llamem.course.plots import MARKERS
from llamem.planner import Pace


def mfu_curves(paces: Mapping[str, Sequence[Pace]], late: Mapping[str, Pace]) -> Figure:
    """Draw MFU against the tokens on each chip, by kind of chip; a ring marks where messages begin to take longer."""
    fig, ax = plt.subplots()
    for (chip, steps), marker in zip(paces.items(), MARKERS, strict=False):
        on_each = [step.tokens / step.chips for step in steps]
        (line,) = ax.plot(on_each, [step.mfu for step in steps], marker=marker, label=chip)
        ring = {"markersize": 14, "fillstyle": "none", "color": line.get_color()}
        ax.plot(late[chip].tokens / late[chip].chips, late[chip].mfu, "o", **ring)
    ax.set(xscale="log", xlabel="tokens on each chip (more chips to the right)", ylabel="MFU (estimate)", ylim=(0, 0.5))
    ax.set_xticks([256, 4096, 65_536, 262_144], ["256", "4,096", "65,536", "262,144"])
    ax.invert_xaxis()
    ax.minorticks_off()
    ax.legend(frameon=False, title="ring: messages take longer")
    return fig
