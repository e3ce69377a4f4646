"""Figures of notebook 09: rewards from round to round, and what a chip must hold to fine-tune a model."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from llamem.course.plots import HATCHES
from llamem.memory import GiB


def reward_rounds(rounds: Sequence[np.ndarray], before: np.ndarray, after: np.ndarray) -> Figure:
    """Draw every answer's reward as a dot: `before` and `after` on unseen questions, round by round in between."""
    columns = [before, *rounds, after]
    fig, ax = plt.subplots(figsize=(8, 3))
    for x, rewards in enumerate(columns):
        unseen = x in (0, len(columns) - 1)
        aside = np.linspace(-0.22, 0.22, len(rewards))  # equal rewards would hide each other
        label = {0: "an answer to an unseen question", 1: "an attempt"}.get(x)
        marker, color = ("s", "C1") if unseen else ("o", "C0")
        ax.plot(x + aside, rewards, marker, color=color, alpha=0.6, markersize=4, label=label)
        ax.hlines(np.mean(rewards), x - 0.3, x + 0.3, color="black", linewidth=2, label="" if x else "their mean")
    names = ["unseen,\nbefore", *(f"round {i + 1}" for i in range(len(rounds))), "unseen,\nafter"]
    ax.set_xticks(range(len(columns)), names)
    ax.set(ylabel="reward of an answer", ylim=(-0.04, 1))
    ax.legend(frameon=False, loc="upper left")
    return fig


def reward_rounds_alt(rounds: Sequence[np.ndarray], before: np.ndarray, after: np.ndarray) -> str:
    """Say what `reward_rounds` shows."""
    means = ", ".join(f"{np.mean(rewards):.2f}" for rewards in rounds)
    ends = f"{np.mean(before):.2f} before and {np.mean(after):.2f} after"
    return f"Dots of rewards. Attempts: mean {means}, round by round; unseen questions: {ends}. Zeros become fewer."


def ledger_bars(
    ledgers: Mapping[str, Mapping[str, float]], peaks: Mapping[tuple[str, str], float], rooms: Mapping[str, float]
) -> Figure:
    """Draw ledgers, bytes by name, as bars of their parts, and chips: what each has as a line, its peaks as marks.

    `rooms` are of chips, `peaks` of some of them and of a ledger each.
    """
    fig, ax = plt.subplots(figsize=(8, 2.6))
    rows, left = list(ledgers), np.zeros(len(ledgers))
    for name, hatch in zip(next(iter(ledgers.values())), HATCHES, strict=False):
        sizes = np.array([ledgers[row][name] / GiB for row in rows])
        ax.barh(rows, sizes, left=left, hatch=hatch, edgecolor="white", label=name)
        left += sizes
    for (chip, room), style, mark, up in zip(rooms.items(), ("--", ":"), ("D", "o"), (0.18, -0.18), strict=True):
        ax.axvline(room / GiB, color="black", linestyle=style, label=f"{chip}: what it has")
        mine = {rows.index(row) + up: peak / GiB for (whose, row), peak in peaks.items() if whose == chip}
        if mine:
            ax.plot(list(mine.values()), list(mine), mark, color="black", label=f"{chip}: its compiler's peak")
        for y, peak in mine.items():
            ax.annotate(f"{peak:.1f}", (peak, y), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9)
    ax.margins(x=0.09)
    ax.set_xlabel("GiB")
    ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1.05), fontsize=8)
    return fig
