"""What a policy costs and what it spares: memory against arithmetic, a point for each choice."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator


def trade(tflop: Mapping[str, float], peaks: Mapping[str, float], chip: str, capacity: float) -> tuple[Figure, str]:
    """Draw GiB at the peak against TFLOP of matmuls for each choice, and return the figure and its words.

    `capacity` is what the chip offers, in GiB: choices below its line fit.
    """
    fig, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
    ax.axhline(capacity, color="black", linestyle="--", linewidth=1)
    ax.annotate(f"{chip} offers {capacity:.2f} GiB", (1, capacity), xycoords=("axes fraction", "data"), ha="right",
                xytext=(0, 4), textcoords="offset points", fontsize=10)  # fmt: skip
    for choice, peak in peaks.items():
        ax.plot(tflop[choice], peak, "o", markersize=9, color="C0" if peak <= capacity else "C3")
        ax.annotate(choice, (tflop[choice], peak), xytext=(7, 5), textcoords="offset points", fontsize=11)
    ax.set_yscale("log")
    ax.set_yticks([10, 15, 20, 30], ["10", "15", "20", "30"])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.margins(x=0.14, y=0.12)
    ax.set(xlabel="TFLOP of the step's matmuls: less arithmetic to the left", ylabel=f"GiB at the peak, {chip}")
    told = "; ".join(f"{choice}: {tflop[choice]:.1f}, {peak:.1f}" for choice, peak in peaks.items())
    return fig, f"Points for each choice: TFLOP and GiB at the peak. {told}. {chip} offers {capacity:.2f}."
