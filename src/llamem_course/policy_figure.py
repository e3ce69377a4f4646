"""What a policy costs and what it spares: memory against arithmetic, a point for each choice."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def trade(tflop: Mapping[str, float], peaks: Mapping[str, float], chip: str, capacity: float) -> tuple[Figure, str]:
    """Draw GiB at the peak against TFLOP of matmuls for each choice, and return the figure and its words.

    `capacity` is what the chip offers, in GiB: choices below its line fit.
    """
    fig, ax = plt.subplots(figsize=(8, 3.8), layout="constrained")
    top = 1.15 * max(*peaks.values(), capacity)
    ax.axhline(capacity, color="black", linestyle="--", linewidth=1)
    ax.axhspan(capacity, top, color="C3", alpha=0.12)
    for choice, peak in peaks.items():
        fits = peak <= capacity
        ax.plot(tflop[choice], peak, "o", markersize=9, color="C0" if fits else "C3")
        ax.annotate(choice, (tflop[choice], peak), xytext=(0, -14 if fits else 13), textcoords="offset points",
                    fontsize=11, ha="center", va="center")  # fmt: skip
    ax.text(0.99, top * 0.97, f"does not fit: a {chip} offers {capacity:.2f} GiB", ha="right", va="top",
            transform=ax.get_yaxis_transform())  # fmt: skip
    ax.margins(x=0.12)
    ax.set(xlabel="matmuls of one step, TFLOP (less arithmetic to the left)", ylabel=f"peak on a {chip}, GiB")
    ax.set_ylim(0, top)
    told = "; ".join(f"{choice}: {tflop[choice]:.1f}, {peak:.1f}" for choice, peak in peaks.items())
    return fig, f"Points for each choice: TFLOP and GiB at the peak. {told}. {chip} offers {capacity:.2f}."
