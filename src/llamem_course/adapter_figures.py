"""Figures of notebook 09: what a chip must hold to fine-tune a model, and which numbers float16 can hold."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from jaxmem import GiB
from llamem_course.plots import HATCHES


def ledger_bars(
    ledgers: Mapping[str, Mapping[str, float]], peaks: Mapping[tuple[str, str], float], rooms: Mapping[str, float]
) -> Figure:
    """Draw a bar for each chip and ledger: the ledger's parts, what the compiler's peak adds, and a line for the room.

    `ledgers` are bytes by name; `rooms` is what each chip has, and `peaks` are by chip and ledger, where known.
    """
    fig, ax = plt.subplots(figsize=(9, 3.6))
    rows = [(bits, chip) for bits in reversed([*ledgers]) for chip in reversed([*rooms])]
    left, labels = np.zeros(len(rows)), [*next(iter(ledgers.values())), "a layer at work"]
    for name, hatch in zip(labels, HATCHES, strict=False):
        wanted = [
            ledgers[bits].get(name, peaks.get((chip, bits), 0) - sum(ledgers[bits].values())) for bits, chip in rows
        ]
        sizes = np.maximum(wanted, 0) / GiB
        ax.barh(range(len(rows)), sizes, 0.6, left, hatch=hatch, edgecolor="white", label=name)
        left += sizes
    for y, (_, chip) in enumerate(rows):
        room = rooms[chip] / GiB
        ax.vlines(room, y - 0.45, y + 0.45, color="black", linewidth=3, label="" if y else "what the chip has")
        ax.text(
            left[y] + 0.25, y, f"{left[y]:.1f}: {'fits' if left[y] <= room else 'too large'}", va="center", fontsize=10
        )
    ax.set_yticks(range(len(rows)), [f"{bits}, {chip}" for bits, chip in rows])
    ax.set(xlabel="GiB", xlim=(0, 1.15 * left.max()))
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, fontsize=9)
    return fig


def float16_range(values: Mapping[str, Any]) -> Figure:
    """Draw how large numbers are, a histogram for each name, on an axis that is marked by what float16 can hold.

    Numbers that are zero are left out.
    """
    normal, subnormal = (float(np.finfo(np.float16).smallest_normal), float(np.finfo(np.float16).smallest_subnormal))
    largest, left, right = float(np.finfo(np.float16).max), 1e-13, 1e6
    fig, ax = plt.subplots(figsize=(9, 3.4))
    bins = np.logspace(np.log10(left), np.log10(right), 96).tolist()
    for i, (name, array) in enumerate(values.items()):
        sizes = np.abs(np.asarray(array, np.float64)).ravel()
        shares = np.full(len(sizes), 100 / len(sizes))
        ax.hist(sizes, bins, weights=shares, color=f"C{i}", hatch=HATCHES[i], edgecolor="white", label=name)
    zones = ((left, subnormal / 2, "becomes zero"), (subnormal / 2, normal, "few digits"))
    zones += ((normal, largest, "all 11 bits"), (largest, right, "infinite"))
    for i, (low, high, text) in enumerate(zones):
        ax.axvspan(low, high, color="0.85" if i % 2 == 0 else "0.95", zorder=0)
        ax.text(np.sqrt(low * high), 0.97, text, transform=ax.get_xaxis_transform(), ha="center", va="top", fontsize=10)
    ax.set(xscale="log", xlim=(left, right), xlabel="size of a number", ylabel="share of the numbers (%)")
    ax.set_ylim(0, 1.25 * ax.get_ylim()[1])
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=2, fontsize=10)
    return fig
