"""Notebook 06's figures of attention: a pair of channels that turns, and who may look at whom with which keys."""

from collections.abc import Sequence
from typing import Any

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
    fig = plt.figure(figsize=(11, 3.4), layout="constrained")
    grid = fig.add_gridspec(1, len(places) + 1, width_ratios=(*(1.0,) * len(places), 1.7))
    for column, (at_q, at_k) in enumerate(places):
        ax = fig.add_subplot(grid[column])
        ax.add_patch(plt.Circle((0, 0), 1, fill=False, color="lightgrey"))
        for name, place, pair, colour in (("query", at_q, q_xy, QUERY), ("key", at_k, k_xy, KEY)):
            x, y = _turned(pair, place * angle)
            ax.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 2.5})
            ax.text(1.2 * x, 1.2 * y, name, color=colour, ha="center", va="center")
        ax.set(xlim=(-1.45, 1.45), ylim=(-1.45, 1.45), aspect="equal", title=f"query at {at_q}, key at {at_k}")
        ax.axis("off")
    ax = fig.add_subplot(grid[-1])
    for angle_p, name, style, colour in ((old_p, "Llama 3", "-", "C2"), (new_p, "Llama 3.1", "--", "C4")):
        ax.semilogy(seen * angle_p / (2 * np.pi), style, color=colour, linewidth=2, label=name)
    for turns in (4, 1):  # where Llama 3.1's rule changes
        ax.axhline(turns, color="black", linewidth=1, linestyle=":")
    ax.text(len(old_p) - 1, 4 * 1.3, "4 turns or more: angle kept", fontsize=9, ha="right")
    ax.text(0, 1 / 1.3, f"1 turn or less: angle / {old_p[-1] / new_p[-1]:.0f}", fontsize=9, va="top")
    ax.set(xlabel="pair of channels", ylabel=f"turns in {seen:,} tokens")
    ax.legend(frameon=False)
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


def causal_and_shared(tokens: int, n_heads: int, n_kv_heads: int) -> Figure:
    """Draw which tokens each query sees, and which query heads share the keys and values of one head."""
    fig, (mask, heads) = plt.subplots(1, 2, figsize=(10, 3.0), width_ratios=(1, 2.4), layout="constrained")
    sees: Any = np.tril(np.ones((tokens, tokens)))
    mask.imshow(sees, cmap="Blues", vmin=0, vmax=1.6)
    mask.set(xticks=range(tokens), yticks=range(tokens), xlabel="key at", ylabel="query at", title="blue: is seen")
    group, middle = n_heads // n_kv_heads, (n_heads // n_kv_heads - 1) / 2
    for head in range(n_heads):
        shared = head // group
        heads.plot([head, shared * group + middle], [1, 0], color="lightgrey", zorder=1)
        heads.plot(head, 1, "o", color=QUERY, markersize=9)
        heads.plot(shared * group + middle, 0, "s", color=KEY, markersize=11)
    heads.text(n_heads / 2 - 0.5, 1.25, f"{n_heads} heads of queries", color=QUERY, ha="center")
    heads.text(n_heads / 2 - 0.5, -0.42, f"{n_kv_heads} heads of keys and values", color=KEY, ha="center")
    heads.set(ylim=(-0.6, 1.5))
    heads.axis("off")
    return fig


def causal_and_shared_alt(tokens: int, n_heads: int, n_kv_heads: int) -> str:
    """Say what `causal_and_shared` shows."""
    return (
        f"Left, a grid of {tokens} queries by {tokens} keys: each query sees its own token and all earlier ones. "
        f"Right, {n_heads} heads of queries above {n_kv_heads} heads of keys and values: each of these serves "
        f"{n_heads // n_kv_heads} neighbouring query heads."
    )
