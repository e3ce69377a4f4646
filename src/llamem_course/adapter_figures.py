"""Figures of notebook 09: rewards from round to round, and what a chip must hold to fine-tune a model."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from jaxmem import GiB
from llamem_course.plots import HATCHES


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
    """Draw a bar for each chip and ledger: the ledger's parts, what the compiler's peak adds, and a line for the room.

    `ledgers` are bytes by name; `rooms` is what each chip has, and `peaks` are by chip and ledger, where known.
    """
    fig, ax = plt.subplots(figsize=(9, 3.6))
    rows = [(bits, chip) for bits in reversed([*ledgers]) for chip in reversed([*rooms])]
    left, labels = np.zeros(len(rows)), [*next(iter(ledgers.values())), "a layer at work"]
    for name, hatch in zip(labels, HATCHES, strict=False):
        wanted = [
            ledgers[bits].get(name, peaks.get((chip, bits), 0) - sum(ledgers[bits].values())) for bits, chip in rows
        ]
        sizes = np.maximum(wanted, 0) / GiB
        ax.barh(range(len(rows)), sizes, 0.6, left, hatch=hatch, edgecolor="white", label=name)
        left += sizes
    for y, (_, chip) in enumerate(rows):
        room = rooms[chip] / GiB
        ax.vlines(room, y - 0.45, y + 0.45, color="black", linewidth=3, label="" if y else "what the chip has")
        ax.text(
            left[y] + 0.25, y, f"{left[y]:.1f}: {'fits' if left[y] <= room else 'too large'}", va="center", fontsize=10
        )
    ax.set_yticks(range(len(rows)), [f"{bits}, {chip}" for bits, chip in rows])
    ax.set(xlabel="GiB", xlim=(0, 1.15 * left.max()))
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, fontsize=9)
    return fig
