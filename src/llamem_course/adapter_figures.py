"""Figures of notebook 09: an adapter, and what a chip must hold to fine-tune a model."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxmem import GiB
from llamem_course.plots import HATCHES


def adapter_drawn(D: int, F: int, R: int) -> Figure:
    """Draw a frozen matrix `[D, F]` and the two thin ones of an adapter of rank `R` beside it, all to one scale."""
    T, gap = D // 4, D // 2  # as many tokens as look well
    high, low = 0.75 * D, -0.75 * D  # the middles of both branches
    at_down = D + gap
    at_z = at_down + R + gap
    at_up = at_z + R + gap
    at_y = at_up + F + 1.6 * gap
    arrays = (  # name, its left side, its middle, width, height, colour
        ("x  [T, D]", 0, 0, D, T, "C0"),
        ("W  [D, F], frozen", (at_down + at_up) / 2, high, F, D, "0.82"),
        ("down\n[D, R]", at_down, low, R, D, "C1"),
        ("x down\n[T, R]", at_z, low, R, T, "C0"),
        ("up  [R, F]", at_up, low, F, R, "C1"),
        ("y  [T, F]", at_y, 0, F, T, "C0"),
    )
    fig, ax = plt.subplots(figsize=(9, 3.9), layout="constrained")
    for name, left, middle, width, height, colour in arrays:
        hatch = "//" if colour == "C1" else ""
        box = Rectangle((left, middle - height / 2), width, height, fc=colour, ec="black", hatch=hatch)
        ax.add_patch(box)
        ax.text(left + width / 2, middle - height / 2 - 10, name, ha="center", va="top", fontsize=11)
    fork, plus = D + gap / 3, at_y - gap / 2
    arrows = (  # from, to
        ((fork, high), ((at_down + at_up) / 2, high)),
        (((at_down + at_up) / 2 + F, high), (plus, 14)),
        ((fork, low), (at_down, low)),
        ((at_down + R, low), (at_z, low)),
        ((at_z + R, low), (at_up, low)),
        ((at_up + F, low), (plus, -14)),
        ((plus + 14, 0), (at_y, 0)),
    )
    ax.plot([D, fork], [0, 0], color="black", linewidth=1.2)
    ax.plot([fork, fork], [low, high], color="black", linewidth=1.2)
    for start, end in arrows:
        ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "shrinkA": 0, "shrinkB": 0, "linewidth": 1.2})
    ax.text(plus, 0, "+", ha="center", va="center", fontsize=15)
    ax.text((at_up + F + plus) / 2 + 12, low / 2 - 14, "times scale", va="top", fontsize=11)
    ax.set(xlim=(-10, at_y + F + 10), ylim=(low - D / 2 - 90, high + D / 2 + 10), aspect="equal")
    ax.axis("off")
    return fig


def ledger_bars(
    ledgers: Mapping[str, Mapping[str, float]], peaks: Mapping[tuple[str, str], float], rooms: Mapping[str, float]
) -> Figure:
    """Draw a bar for each chip and ledger: the ledger's parts, what the compiler's peak adds, and a line for the room.

    `ledgers` are bytes by name; `rooms` is what each chip has, and `peaks` are by chip and ledger, where known. Without
    peaks a ledger has one bar for all chips, which is only what is needed at least.
    """
    fig, ax = plt.subplots(figsize=(9, 3.6))
    rows: list[tuple[str, tuple[str, ...]]] = []  # a ledger, and the chips whose bar it is
    for bits in reversed([*ledgers]):
        known = [(bits, (chip,)) for chip in reversed([*rooms]) if (chip, bits) in peaks]
        rows += known or [(bits, tuple(rooms))]
    left, labels = np.zeros(len(rows)), [*next(iter(ledgers.values())), "at work, by the compiler"]
    for name, hatch in zip(labels, HATCHES, strict=False):
        wanted = [
            ledgers[bits].get(name, peaks.get((chips[0], bits), 0) - sum(ledgers[bits].values()))
            for bits, chips in rows
        ]
        sizes = np.maximum(wanted, 0) / GiB
        ax.barh(range(len(rows)), sizes, 0.6, left, hatch=hatch, edgecolor="white", label=name)
        left += sizes
    for y, (bits, chips) in enumerate(rows):
        room, more = [rooms[chip] / GiB for chip in chips], "" if (chips[0], bits) in peaks else "more than "
        ax.vlines(room, y - 0.45, y + 0.45, color="black", linewidth=3, label="" if y else "what the chip has")
        verdict = "fits" if left[y] <= min(room) else "too large"
        ax.text(left[y] + 0.25, y, f"{more}{left[y]:.1f}: {verdict}", va="center", fontsize=10)
    ax.set_yticks(range(len(rows)), [f"{bits}, {' or '.join(chips)}" for bits, chips in rows])
    ax.set(xlabel="GiB", xlim=(0, 1.35 * left.max()))
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, fontsize=9)
    return fig
