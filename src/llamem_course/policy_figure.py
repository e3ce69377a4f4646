"""Which share of the bytes each named value takes, and which share of the arithmetic it spares at each length."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Num
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure


def shares(
    lengths: Num[np.ndarray, " T"],
    widths: Mapping[str, int],
    flops: Mapping[str, int | Num[np.ndarray, " T"]],
    half: float,
) -> tuple[Figure, str]:
    """Draw a bar of the bytes that each name keeps beside areas of the FLOPs that it spares; return also the words.

    Both are shares of what all names keep or spare. `widths` are the numbers that a token has of each name, `flops` the
    FLOPs of a token at each of `lengths`, in tokens of a sequence. The first of `flops`, drawn at the bottom, spares
    half of all at a length of `half`.
    """
    fig, (bar, areas) = plt.subplots(1, 2, figsize=(8, 3.9), sharey=True, width_ratios=(1, 5), layout="constrained")
    rows = np.array([np.broadcast_to(row, lengths.shape) for row in flops.values()])
    spared = 100 * rows / rows.sum(axis=0)
    kept = np.array([100 * widths[name] / sum(widths.values()) for name in flops])
    colours = [to_rgba(f"C{n}", 0.9 if n == 0 else 0.45) for n in range(len(kept))]
    areas.stackplot(lengths, spared, colors=colours, edgecolor="white")
    bar.bar(0, kept, bottom=np.cumsum(kept) - kept, color=colours, edgecolor="white")
    for name, share, middle in zip(flops, kept, np.cumsum(kept) - kept / 2, strict=True):
        bar.text(0, middle, f"{name} {share:.0f}%", ha="center", va="center", fontsize=9)
    name, first, last = next(iter(flops)), *spared[0, [0, -1]]
    areas.text(0.98 * lengths[-1], last / 4, f"{name} {last:.0f}%", ha="right", va="center", fontsize=12)
    areas.plot(half, 50, "ko")
    areas.annotate(f"half from {half:,.0f} tokens on", (half, 50), (8, -8), textcoords="offset points", va="top")
    bar.set(title="bytes kept", xlabel="at any length", xticks=[], ylabel=f"% of all {len(kept)}")
    areas.set(title="arithmetic that they spare", xlabel="tokens of the sequence", xscale="log", xlim=lengths[[0, -1]])
    ticks = 2 ** np.arange(np.log2(lengths[0]), np.log2(lengths[-1]) + 1)
    areas.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    areas.minorticks_off()
    areas.set_ylim(0, 100)
    told = ", ".join(f"{name} {share:.0f}%" for name, share in zip(flops, kept, strict=True))
    words = (
        f"Shares of the bytes kept, at any length: {told}. Share of the arithmetic that {name} spares: {first:.0f}% "
        f"at {lengths[0]:,.0f} tokens of a sequence, half at {half:,.0f}, {last:.0f}% at {lengths[-1]:,.0f}."
    )
    return fig, words
