"""Notebook 06's figure of RoPE: how fast each pair of channels turns, and which angles a training has seen."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

_ROWS = {"seen": "C0", "Llama 3": "C2", "Llama 3.1": "C4"}


def rope_dials(
    old_p: Float[np.ndarray, "p"], new_p: Float[np.ndarray, "p"], pairs: tuple[int, ...], seen: int, longest: int
) -> Figure:
    """Draw the tokens that a turn takes, by pair, and for a few pairs the angles that so many tokens reach.

    `old_p`, `new_p`: radians per token of Llama 3 and 3.1; `seen`: the first training's tokens, `longest`: those read
    later. A dial has a slice for what was seen, and an arc as far as each model turns at `longest` tokens.
    """
    fig = plt.figure(figsize=(11, 3.9))
    grid = fig.add_gridspec(1, 2 + len(pairs), width_ratios=(1.7, 0.1, *(1.15,) * len(pairs)))
    ax = fig.add_subplot(grid[0])
    for angle_p, name, style in ((old_p, "Llama 3", "-"), (new_p, "Llama 3.1", "--")):
        ax.semilogy(2 * np.pi / angle_p, style, color=_ROWS[name], linewidth=2)
    ax.text(len(old_p) - 17, 2 * np.pi / new_p[-17] * 1.5, "Llama 3.1", color=_ROWS["Llama 3.1"], ha="right")
    ax.text(len(old_p) - 14, 2 * np.pi / old_p[-14] / 4, "Llama 3", color=_ROWS["Llama 3"])
    ax.axhline(seen, color="black", linewidth=1, linestyle=":")
    ax.text(0, seen * 1.3, f"first training: {seen:,}", fontsize=9)
    for pair in pairs:
        ax.plot(pair, 2 * np.pi / old_p[pair], "o", color=_ROWS["Llama 3"])
    ax.set(xlabel="pair of channels", ylabel="tokens for one turn")
    for column, pair in enumerate(pairs, 2):
        dial: Any = fig.add_subplot(grid[column], projection="polar")
        ends = {"seen": seen * old_p[pair], "Llama 3": longest * old_p[pair], "Llama 3.1": longest * new_p[pair]}
        dial.bar(0, 0.6, width=min(ends["seen"], 2 * np.pi), align="edge", color=_ROWS["seen"])
        for name, radius in (("Llama 3.1", 0.75), ("Llama 3", 0.95)):
            arc = np.linspace(0, min(ends[name], 2 * np.pi), 200)
            dial.plot(arc, np.full(200, radius), color=_ROWS[name], linewidth=4, solid_capstyle="butt")
        dial.set(ylim=(0, 1.05), xticks=[], yticks=[])
        dial.set_theta_zero_location("N")
        dial.set_theta_direction(-1)
        dial.spines["polar"].set_color("lightgrey")
        dial.set_title(f"pair {pair}", fontsize=11)
        titles = {"seen": f"{seen:,} tokens", "Llama 3": f"{longest:,}, Llama 3", "Llama 3.1": f"{longest:,}, 3.1"}
        for row, name in enumerate(ends):
            text = f"{titles[name]}: {_turned(ends[name])}"
            dial.text(
                0.5, -0.14 * (row + 1), text, transform=dial.transAxes, ha="center", color=_ROWS[name], fontsize=9
            )
    return fig


def rope_dials_alt(
    old_p: Float[np.ndarray, "p"], new_p: Float[np.ndarray, "p"], pairs: tuple[int, ...], seen: int, longest: int
) -> str:
    """Say what `rope_dials` shows."""
    first, last = (f"{2 * np.pi / old_p[pair]:,.0f}" for pair in (0, -1))
    said = f"Tokens for one turn by pair, on a log scale: a straight line from {first} to {last} for Llama 3; "
    said += "Llama 3.1 leaves it in the middle and runs above it from there on. Dials: "
    return said + "; ".join(
        f"pair {pair}, {_turned(seen * old_p[pair])} in {seen:,} tokens, and in {longest:,} "
        f"{_turned(longest * old_p[pair])} in Llama 3, {_turned(longest * new_p[pair])} in Llama 3.1"
        for pair in pairs
    )


def _turned(angle: float) -> str:
    turns = angle / (2 * np.pi)
    return f"{360 * turns:.0f}°" if turns < 1 else f"{turns:,.1f} turns"
