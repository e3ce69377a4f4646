"""Figures of notebook 07: how a loss falls beside that of a table, and which tokens of a chat have one."""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
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


def loss_curves(
    losses: Sequence[float], held_out: Mapping[int, float], of_table: Mapping[int, float], tokens_a_step: int
) -> Figure:
    """Draw a model's loss on each training batch, and on the text held out its own and that of a table of pairs.

    The two on the text held out are by the number of steps before them.
    """
    fig, ax = plt.subplots(figsize=(9.4, 3.8), layout="constrained")
    ax.plot(np.arange(len(losses)) * tokens_a_step, losses, color="C0", alpha=0.35, linewidth=1)
    last = {"textcoords": "offset points", "xytext": (8, 0), "va": "center", "fontweight": "bold"}
    for curve, name, colour in ((held_out, "the Llama", "C0"), (of_table, "a table of pairs", "C2")):
        tokens = [step * tokens_a_step for step in curve]
        ax.plot(tokens, list(curve.values()), "o-", color=colour, linewidth=2.5)
        end = list(curve.values())[-1]
        ax.annotate(f"{name}: {end:.2f}", (tokens[-1], end), color=colour, **last)
    middle = len(losses) // 3
    ax.annotate(
        "the Llama, on the batches it trains on",
        (middle * tokens_a_step, max(losses[middle : middle + 5])),
        xytext=(10, 16),
        textcoords="offset points",
        color="C0",
        alpha=0.7,
    )
    ax.set(xlabel="tokens read", ylabel="loss (nats per token)", title="Loss on text that is held out")
    ax.set_xlim(0, len(losses) * tokens_a_step * 1.25)
    ax.set_xticks([step * tokens_a_step for step in held_out])
    ax.xaxis.set_major_formatter("{x:,.0f}")
    return fig
