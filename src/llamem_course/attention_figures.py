"""Notebook 06's figure of RoPE: a pair of channels that turns, and how far each pair turns."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

QUERY, KEY = "C0", "C1"


def turning_pair(
    q_xy: Sequence[float],
    k_xy: Sequence[float],
    angle: float,
    places: Sequence[tuple[int, int]],
    old_p: Float[np.ndarray, "p"],
    new_p: Float[np.ndarray, "p"],
    seen: int,
) -> Figure:
    """Draw one pair of a query and a key, turned as far as their places say, and how many turns each pair makes.

    `angle`: the pair's, in radians per token; `places` of query and key. `old_p`, `new_p`: the angles of all pairs in
    Llama 3 and 3.1; `seen`: tokens of the first training.
    """
    fig = plt.figure(figsize=(11, 3.0), layout="constrained")
    grid = fig.add_gridspec(1, len(places) + 1, width_ratios=(*(1.0,) * len(places), 1.3))
    for column, (at_q, at_k) in enumerate(places):
        ax = fig.add_subplot(grid[column])
        ax.add_patch(plt.Circle((0, 0), 1, fill=False, color="lightgrey"))
        query, key = _turned(q_xy, at_q * angle), _turned(k_xy, at_k * angle)
        for name, (x, y), colour in (("query", query, QUERY), ("key", key, KEY)):
            ax.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 2.5})
            ax.text(1.2 * x, 1.2 * y, name, color=colour, ha="center", va="center")
        ax.set(xlim=(-1.35, 1.35), ylim=(-1.3, 1.3), aspect="equal", title=f"query at {at_q}, key at {at_k}")
        ax.axis("off")
        degrees = _between(query, key)
        way = np.arctan2(key[1], key[0]) + np.linspace(0, np.radians(degrees), 40)  # from the key to the query
        ax.plot(0.4 * np.cos(way), 0.4 * np.sin(way), color="black", linewidth=1.5)
        x, y = 0.62 * np.cos(way[20]), 0.62 * np.sin(way[20])
        ax.text(x, y, f"{degrees:.0f}°", ha="center", va="center", fontweight="bold")
    ax = fig.add_subplot(grid[-1])
    for angle_p, name, style, colour in ((old_p, "Llama 3", "-", "C2"), (new_p, "Llama 3.1", "--", "C4")):
        ax.semilogy(seen * angle_p / (2 * np.pi), style, color=colour, linewidth=2)
        middle = int(0.78 * len(angle_p))
        at, side = (middle, seen * angle_p[middle] / (2 * np.pi)), 1 if name == "Llama 3" else -1
        place = {"xytext": (6 * side, 6 * side), "ha": "left" if side > 0 else "right", "textcoords": "offset points"}
        ax.annotate(name, at, color=colour, fontweight="bold", va="bottom" if side > 0 else "top", **place)
    for turns in (4, 1):  # where Llama 3.1's rule changes
        ax.axhline(turns, color="black", linewidth=1, linestyle=":")
    ax.text(len(old_p) - 1, 4 * 1.3, "4 turns or more: angle kept", fontsize=9, ha="right")
    ax.text(0, 1 / 1.3, f"1 turn or less: angle / {old_p[-1] / new_p[-1]:.0f}", fontsize=9, va="top")
    ax.set(xlabel="pair of channels", ylabel=f"turns in {seen:,} tokens")
    return fig


def turning_pair_alt(
    q_xy: Sequence[float],
    k_xy: Sequence[float],
    angle: float,
    places: Sequence[tuple[int, int]],
    old_p: Float[np.ndarray, "p"],
    new_p: Float[np.ndarray, "p"],
    seen: int,
) -> str:
    """Say what `turning_pair` shows."""
    between = [_between(_turned(q_xy, a * angle), _turned(k_xy, b * angle)) for a, b in places]
    shown = ", ".join(f"at {a} and {b} {degrees:.0f}°" for (a, b), degrees in zip(places, between, strict=True))
    slow = int(np.sum(2 * np.pi / old_p > seen))
    return (
        f"Arrows of one pair's query and key. The angle between them: {shown}. Beside them the turns in {seen:,} "
        f"tokens, by pair, on a log scale: a straight line for Llama 3, and below it for the slow pairs of Llama 3.1. "
        f"{slow} of {len(old_p)} pairs make less than one turn."
    )


def _turned(pair: Sequence[float], angle: float) -> tuple[float, float]:
    a, b = pair
    return a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)


def _between(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the angle from one arrow to another, in degrees from 0 to 360."""
    return float(np.degrees(np.arctan2(one[1], one[0]) - np.arctan2(other[1], other[0])) % 360)
