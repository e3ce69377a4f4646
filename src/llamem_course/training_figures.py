"""Figures of notebook 07: which tokens of a chat have a loss, and what training does to each one's."""

from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

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
    fig, ax = plt.subplots(figsize=(9.4, 0.36 * (row + 2)))
    for token, (x, y), own in zip(shown, places, wrote, strict=True):
        box = {"boxstyle": "round,pad=0.22", "facecolor": "#ffa90e" if own else "#f2f2f2", "edgecolor": "none"}
        ax.text(x, y, token, va="center", fontsize=9, family="monospace", bbox=box)
    ax.set(xlim=(-1, _CHARACTERS + 5), ylim=(row + 1.3, -0.6))
    ax.axis("off")
    words = ("counts in the loss", "#c27c00"), ("is only read", "#6b6b6b")
    for x, (label, colour) in zip((0, 24), words, strict=True):
        ax.text(x, row + 0.95, label, va="center", fontsize=10, fontweight="bold", color=colour)
    return fig


def answer_losses(tokens: Sequence[str], before: Sequence[float], after: Sequence[float]) -> Figure:
    """Draw the loss of each token of an answer as an arrow, from before the training to after it."""
    fig, ax = plt.subplots(figsize=(9.4, 3.6), layout="constrained")
    for x, (old, new) in enumerate(zip(before, after, strict=True)):
        ax.plot([x, x], [old, new], color="lightgrey", linewidth=5, zorder=1)
    ax.plot(before, "o", color="C0", markersize=9)
    ax.plot(after, "o", color="C1", markersize=9)
    first = {"textcoords": "offset points", "va": "center", "fontweight": "bold"}
    ax.annotate("before", (0, before[0]), xytext=(10, 0), color="C0", **first)
    ax.annotate("after", (0, after[0]), xytext=(10, 6), color="C1", **first)
    ax.set_xticks(range(len(tokens)), [repr(token)[1:-1] for token in tokens], family="monospace")
    ax.set(ylabel="loss (nats)", ylim=(-0.4, None), xlim=(-0.5, len(tokens) - 0.5))
    ax.set_xlabel("the tokens of the right answer, in order")
    return fig
