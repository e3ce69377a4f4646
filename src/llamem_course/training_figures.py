"""Figures of notebook 07: losses beside each other, and which tokens of a chat have a loss."""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from llamem_course.plots import MARKERS

_CHARACTERS = 114  # in a line of the strip of tokens


def loss_lines(lines: Mapping[str, Mapping[int, float]], marked: bool = False) -> Figure:
    """Draw losses by step, a line for each name; `marked`: with a marker at each of them."""
    fig, ax = plt.subplots(figsize=(9.4, 3.6))
    for (name, losses), marker in zip(lines.items(), MARKERS, strict=False):
        ax.plot(list(losses), list(losses.values()), marker=marker if marked else "", label=name)
    ax.set(xlabel="step", ylabel="loss (nats per token)")
    ax.legend(frameon=False)
    return fig


def loss_lines_alt(lines: Mapping[str, Mapping[int, float]]) -> str:
    """Say what `loss_lines` shows."""
    ends = [(name, *list(losses.items())[:: len(losses) - 1 or 1]) for name, losses in lines.items()]
    told = (f"{name}: {first[1]:.2f} at step {first[0]}, {last[1]:.2f} at {last[0]}" for name, first, *_, last in ends)
    return f"Losses by step. {'; '.join(told)}."


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
