"""Figures of notebook 07: which tokens of a chat have a loss, and what a run learns beside tables that count."""

from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

_CHARACTERS = 114  # in a line of the strip of tokens


def token_strip(tokens: Sequence[str], wrote: Iterable[bool]) -> Figure:
    """Draw the tokens of a chat in lines, each in a box: yellow where it is predicted with a loss, else only read."""
    places, x, row = [], 0.0, 0
    shown = [repr(token)[1:-1] for token in tokens]  # a line break as \n
    for token in shown:
        if x + len(token) > _CHARACTERS:
            x, row = 0.0, row + 1
        places.append((x, row))
        x += len(token) + 1.8
    fig, ax = plt.subplots(figsize=(9.4, 0.36 * (row + 1) + 0.55))
    for token, (x, y), own in zip(shown, places, wrote, strict=True):
        box = {"boxstyle": "round,pad=0.22", "facecolor": "#ffa90e" if own else "#f2f2f2", "edgecolor": "none"}
        ax.text(x, y, token, va="center", fontsize=9, family="monospace", bbox=box)
    ax.set(xlim=(-1, _CHARACTERS + 5), ylim=(row + 0.6, -0.6))
    ax.axis("off")
    patches = [Patch(color="#ffa90e", label="predicted: has a loss"), Patch(color="#f2f2f2", label="only read")]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, 0), ncols=2, frameon=False, fontsize=9)
    return fig


# Tokens read, and three held-out losses after them: the model's, counting single tokens, counting pairs.
Row = tuple[int, float, float, float]


def learning_and_counting(run: Sequence[Row], stored: Sequence[Row], guess: float) -> Figure:
    """Draw the held-out loss of a run and of a stored, longer one, and what counting reaches on the longer's tokens.

    `guess`: the loss before the first step, in nats. A stored run that is not longer is left out.
    """
    is_longer = stored[-1][0] > run[-1][0]
    tokens, longest, single, pairs = np.transpose(stored if is_longer else run)
    of_run = np.transpose(run)[:2]
    fig, ax = plt.subplots(figsize=(9.4, 4.4))
    fig.subplots_adjust(left=0.08, right=0.74, top=0.97, bottom=0.13)  # room for the names
    ax.plot(tokens, single, "k--", tokens, pairs, "k-.", linewidth=1.5)
    words = f"{'a longer run' if is_longer else 'this run'}, {longest[-1]:.2f}"
    names = [(single[-1], f"counting single tokens, {single[-1]:.2f}", "black")]
    names += [
        (pairs[-1], f"counting pairs, {pairs[-1]:.2f}", "black"),
        (longest[-1], words, "C1" if is_longer else "C0"),
    ]
    if is_longer:
        ax.plot(tokens, longest, "o-", color="C1", markersize=5, linewidth=2, clip_on=False)
        near = {"xytext": (8, 10), "textcoords": "offset points", "color": "C0", "fontweight": "bold"}
        ax.annotate(f"this run, from {guess:.2f} to {of_run[1][-1]:.2f}", (of_run[0][-1], of_run[1][-1]), **near)
    ax.plot([0, *of_run[0]], [guess, *of_run[1]], "o-", color="C0", markersize=5, linewidth=2)
    lowest, highest = min(*pairs, *longest), max(of_run[1][0], single[0])
    ax.set(xlabel="tokens read", ylabel="loss (nats per token)", xlim=(0, tokens[-1]))
    ax.set_ylim(lowest - 0.25, highest + 0.5)  # the fall from a guess is cut off
    ax.xaxis.set_major_formatter("{x:,.0f}")
    _name_ends(ax, names)
    return fig


def _name_ends(ax: Axes, names: Sequence[tuple[float, str, str]]) -> None:
    """Write (value, words, colour) to the right of the axes, one below the other where values are close."""
    to_axes, above = ax.transData + ax.transAxes.inverted(), 2.0
    for value, words, colour in sorted(names, reverse=True):
        height = to_axes.transform((ax.get_xlim()[1], value))[1]
        above = min(height, above - 0.06)
        weight = "normal" if colour == "black" else "bold"
        ax.text(1.02, above, words, transform=ax.transAxes, va="center", color=colour, fontweight=weight)
