"""Notebook 06's figure of RoPE: a pair of channels of a query and a key, which turns."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

QUERY, KEY = "C0", "C1"


def turning_pair(
    q_xy: Sequence[float], k_xy: Sequence[float], angle: float, places: Sequence[tuple[int, int]]
) -> Figure:
    """Draw one pair of a query and a key, turned as far as their places say.

    `angle`: the pair's, in radians per token; `places` of query and key.
    """
    fig, axes = plt.subplots(1, len(places), figsize=(3.2 * len(places), 3.3), layout="constrained")
    for ax, (at_q, at_k) in zip(axes, places, strict=True):
        ax.add_patch(plt.Circle((0, 0), 1, fill=False, color="lightgrey"))
        query, key = _turned(q_xy, at_q * angle), _turned(k_xy, at_k * angle)
        for name, (x, y), colour in (("query", query, QUERY), ("key", key, KEY)):
            ax.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 2.5})
            ax.text(1.2 * x, 1.2 * y, name, color=colour, ha="center", va="center")
        ax.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal", title=f"query at {at_q}, key at {at_k}")
        ax.axis("off")
        degrees = _between(query, key)
        way = np.arctan2(key[1], key[0]) + np.linspace(0, np.radians(degrees), 40)  # from the key to the query
        ax.plot(0.4 * np.cos(way), 0.4 * np.sin(way), color="black", linewidth=1.5)
        x, y = 0.64 * np.cos(way[20]), 0.64 * np.sin(way[20])
        ax.text(x, y, f"{degrees:.0f}°", ha="center", va="center", fontweight="bold")
    return fig


def turning_pair_alt(
    q_xy: Sequence[float], k_xy: Sequence[float], angle: float, places: Sequence[tuple[int, int]]
) -> str:
    """Say what `turning_pair` shows."""
    between = [_between(_turned(q_xy, a * angle), _turned(k_xy, b * angle)) for a, b in places]
    shown = ", ".join(f"at {a} and {b} {degrees:.0f}°" for (a, b), degrees in zip(places, between, strict=True))
    return f"Arrows of one pair's query and key. The angle between them: {shown}."


def _turned(pair: Sequence[float], angle: float) -> tuple[float, float]:
    a, b = pair
    return a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)


def _between(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the angle from one arrow to another, in degrees from 0 to 360."""
    return float(np.degrees(np.arctan2(one[1], one[0]) - np.arctan2(other[1], other[0])) % 360)
