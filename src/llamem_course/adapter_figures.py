"""Figures of notebook 09: what freezing saves, a block of four bits, and what a chip must hold."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jaxmem import GiB


def freezing_drawn(D: int, F: int, R: int) -> Figure:
    """Draw to scale what a matrix `[D, F]` brings into memory: trained itself, and with an adapter of rank `R`."""
    T, step, low, aside = D // 4, 1.45 * F, -1.6 * D, D // 10
    fig, ax = plt.subplots(figsize=(9.5, 3.5), layout="constrained")
    dashed: dict[str, Any] = {"fc": "white", "ec": "0.5", "ls": "--"}
    trained: dict[str, Any] = {"fc": "C1", "ec": "black", "hatch": "//"}

    def box(left: float, bottom: float, width: float, height: float, **style: Any) -> None:
        outlined: dict[str, Any] = {"ec": "black", **style}
        ax.add_patch(Rectangle((left, bottom), width, height, **outlined))

    def thin_pair(left: float, many: int = 1) -> None:
        for n in range(many):
            box(left + F + (many + n) * aside, low, R, D, **trained)
            box(left, low - (1 + n) * aside - R, F, R, **trained)

    box(0, 0, F, D, **trained)
    box(0, low, F, D, fc="0.82")
    thin_pair(0)
    for row in (0, low):
        box(step, row + D - T, D, T, fc="C0")
    box(step + D + aside, low + D - T, R, T, fc="C0")
    for place, many in ((1.75, 1), (2.75, 2)):
        for n in reversed(range(many)):
            shift = n * aside
            box(place * step + shift, shift, F, D, **trained)
            box(place * step + shift, low + shift, F, D, **dashed)
        thin_pair(place * step, many)
    texts = (  # left, top, text
        (0, 1.25 * D, "weights"),
        (step, 1.25 * D, "kept for backward"),
        (1.75 * step, 1.25 * D, "gradients"),
        (2.75 * step, 1.25 * D, "two moments of each"),
    )
    for left, top, text in texts:
        ax.text(left, top, text, fontweight="bold", fontsize=10)
    notes = (
        (F / 2, D / 2, "W"),
        (F / 2, low - aside - R - 32, "up"),
        (F + aside + R + 62, low + D / 2, "down"),
        (F / 2, low + D / 2, "W stays: it carries the\ngradient back to x"),
        (step + D / 2, D - T / 2, "x"),
        (step + D / 2, low + D - T / 2, "x"),
        (step + D / 2 + aside / 2, low + D / 2 - 45, "x stays: down's\ngradient is made\nof it"),
        (1.75 * step + F / 2, low + D / 2, "W's gradient\nis not made"),
        (2.75 * step + F / 2, low + D / 2, "so there are\nno moments"),
    )
    for middle, height, text in notes:
        frame = {"fc": "white", "ec": "none", "pad": 2} if text == "W" else None  # on its hatching
        ax.text(middle, height, text, ha="center", va="center", fontsize=9.5, bbox=frame)
    for row, text in ((0, "W is\ntrained"), (low, "down and\nup are\ntrained")):
        ax.text(-40, row + D / 2, text, ha="right", va="center", fontsize=10)
    ax.set(xlim=(-210, 2.75 * step + F + 4 * aside), ylim=(low - 100, 1.4 * D), aspect="equal")
    ax.axis("off")
    return fig


def block_drawn() -> Figure:
    """Draw the bytes of 32 weights: in 16 bits, as a block of four bits, and the block at work."""
    fig, ax = plt.subplots(figsize=(9.5, 2.9), layout="constrained")
    rows = (  # height, bytes, bytes of a cell, colour, what they are
        (4, 64, 2, "C0", "bfloat16, the whole step: 64 bytes"),
        (2, 16, 1, "C1", "four bits, the whole step: 18 bytes"),
        (0, 64, 2, "C0", "unpacked to block_scale * q while its layer computes: 64 bytes more, then dropped"),
    )
    for y, total, cell, colour, text in rows:
        style: dict[str, Any] = {"fc": colour, "ec": "black", "lw": 0.8, "alpha": 0.55 if y == 0 else 1}
        for left in range(0, total, cell):
            ax.add_patch(Rectangle((left, y), cell, 0.9, ls="--" if y == 0 else "-", **style))
        ax.text(0 if y else 9, y + 1.05, text, fontsize=10, va="bottom")
    ax.plot([0, 16], [2.45, 2.45], color="black", linewidth=0.8)  # each byte holds two
    ax.add_patch(Rectangle((16, 2), 2, 0.9, fc="C2", ec="black", hatch="..", lw=0.8))
    arrow = {"arrowstyle": "->", "linewidth": 1.2}
    ax.annotate(
        "block_scale, 2 bytes; each byte left of it holds two q",
        (18.1, 2.45),
        (21, 2.45),
        va="center",
        fontsize=9.5,
        arrowprops=arrow,
    )
    ax.annotate("", (8, 0.95), (8, 1.95), arrowprops=arrow)
    ax.set(xlim=(-0.5, 64.5), ylim=(-0.1, 5.6))
    ax.axis("off")
    return fig


def ledger_bars(
    ledgers: Mapping[str, Mapping[str, float]], peaks: Mapping[tuple[str, str], float], rooms: Mapping[str, float]
) -> Figure:
    """Draw a bar for each chip and ledger: the ledger's parts, what the compiler's peak adds, and a line for the room.

    `ledgers` are bytes by name; `rooms` is what each chip has, and `peaks` are by chip and ledger, where known. Without
    peaks a ledger has one bar for all chips, which is only what is needed at least.
    """
    fig, ax = plt.subplots(figsize=(9.5, 3.7), layout="constrained")
    rows: list[tuple[str, tuple[str, ...]]] = []  # a ledger, and the chips whose bar it is
    for bits in reversed([*ledgers]):
        known = [(bits, (chip,)) for chip in reversed([*rooms]) if (chip, bits) in peaks]
        rows += known or [(bits, tuple(rooms))]
    left, labels = np.zeros(len(rows)), [*next(iter(ledgers.values())), "at work"]
    for name, colour in zip(labels, ("C0", "C1", "C2", "C3", "C6"), strict=False):
        wanted = [
            ledgers[bits].get(name, peaks.get((chips[0], bits), 0) - sum(ledgers[bits].values()))
            for bits, chips in rows
        ]
        sizes = np.maximum(wanted, 0) / GiB
        ax.barh(range(len(rows)), sizes, 0.5, left, color=colour, alpha=0.75, edgecolor="white")
        for y, size in enumerate(sizes):
            if size:
                ax.text(left[y] + size / 2, y, f"{size:.1f}", ha="center", va="center", fontsize=9)
        top, level = len(rows) - 1, (0, 1, 2, 0, 0)[labels.index(name)]
        middle, height = left[top] + sizes[top] / 2, top + 0.3 + 0.25 * level
        if level:
            ax.plot([middle, middle], [top + 0.25, height], color="black", linewidth=0.8)
        side, at = ("right", left[top] + sizes[top]) if level == 1 else ("center", middle)
        ax.text(at, height, name, ha=side, va="bottom", fontsize=9)
        left += sizes
    for y, (bits, chips) in enumerate(rows):
        for chip in chips:
            ax.vlines(rooms[chip] / GiB, y - 0.38, y + 0.32, color="black", linewidth=3)
            ax.text(
                rooms[chip] / GiB,
                y - 0.4,
                f"{chip} has {rooms[chip] / GiB:.1f}",
                ha="right" if chip == chips[0] else "left",
                va="top",
                fontsize=8.5,
            )
        more, fits = "" if (chips[0], bits) in peaks else "more than ", left[y] <= min(rooms[c] for c in chips) / GiB
        ax.text(left[y] + 0.2, y, f"{more}{left[y]:.1f}: {'fits' if fits else 'too large'}", va="center", fontsize=10)
    ax.set_yticks(range(len(rows)), [bits if len(chips) > 1 else f"{bits}, {chips[0]}" for bits, chips in rows])
    ax.set(xlabel="GiB on the chip", xlim=(0, 1.3 * left.max()), ylim=(-0.75, len(rows) + 0.2))
    return fig
