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


def learning_and_counting(batch_losses: Sequence[float], rows: Sequence[Row], stored: Sequence[Row]) -> Figure:
    """Draw losses over the tokens read: a run's and a stored, longer one's, and of both what counting reaches.

    `batch_losses`: one for each step of the run, drawn as a mean of as many as a twelfth of it has. `rows` and
    `stored`: where the held-out loss was taken. A stored run that is not longer is left out.
    """
    fig, ax = plt.subplots(figsize=(9.4, 4.8))
    fig.subplots_adjust(left=0.08, right=0.74, top=0.97)  # room for the names
    read, window = rows[-1][0], max(1, len(batch_losses) // 12)
    means = [np.mean(batch_losses[max(0, i + 1 - window) : i + 1]) for i in range(len(batch_losses))]
    steps = np.arange(1, len(means) + 1)
    ax.plot(steps * read / len(means), means, color="C0", linewidth=1, alpha=0.6)
    is_longer = stored[-1][0] > read
    names: list[tuple[float, str, str]] = []
    for some, name, colour in ((rows, "this run", "C0"), (stored, "a longer run", "C1")):
        if some is stored and not is_longer:
            continue
        tokens, model, single, pairs = np.transpose(some)
        ax.plot(tokens, single, "k--", tokens, pairs, "k-.", linewidth=1.5)
        ax.plot(tokens, model, "o-", color=colour, markersize=5, linewidth=2)
        words = f"{name}, {model[-1]:.2f}"
        if some is rows and is_longer:
            above = {"xytext": (6, 14), "textcoords": "offset points"}
            ax.annotate(words, (tokens[-1], model[-1]), **above, color=colour, fontweight="bold")
        else:
            counting = (single[-1], "counting single tokens", "black"), (pairs[-1], "counting pairs", "black")
            names += [(model[-1], words, colour), *((y, f"{words}, {y:.2f}", black) for y, words, black in counting)]
    ax.set(xlabel="tokens read", ylabel="loss (nats per token)", xlim=(0, max(read, stored[-1][0] * is_longer)))
    ax.set_ylim(top=max(rows[0][1:]) + 1)  # the fall from a guess is cut off
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
