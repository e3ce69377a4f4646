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
    ledgers: Mapping[str, Mapping[str, float]], peaks: Mapping[str, float], rooms: Mapping[str, float]
) -> Figure:
    """Draw ledgers, bytes by name, as bars of their parts, chips' `rooms` as lines.

    `peaks`: of some of the ledgers, by the compiler of the first of the chips.
    """
    fig, ax = plt.subplots(figsize=(8, 2.6))
    rows, left = list(ledgers), np.zeros(len(ledgers))
    for name, hatch in zip(next(iter(ledgers.values())), HATCHES, strict=False):
        sizes = np.array([ledgers[row][name] / GiB for row in rows])
        ax.barh(rows, sizes, left=left, hatch=hatch, edgecolor="white", label=name)
        left += sizes
    if peaks:
        ax.plot(
            [peak / GiB for peak in peaks.values()],
            list(peaks),
            "kD",
            label=f"the compiler's peak, {next(iter(rooms))}",
        )
    for (name, room), style in zip(rooms.items(), ("--", ":", "-."), strict=False):
        ax.axvline(room / GiB, color="black", linestyle=style, label=f"what a {name} has")
    ax.set_xlabel("GiB")
    ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1.05), fontsize=8)
    return fig
