"""Figures of notebook 13: a group's advantages, pairs by update."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def group_bars(texts: Sequence[str], rewards: np.ndarray, advantages: Any) -> tuple[Figure, str]:
    """Draw the answers of the group whose rewards differ most, each with its advantage, and return the figure's words.

    `rewards` and `advantages` are `[groups, answers]`, and `texts` the answers of all groups, one after the other.
    """
    group, size = int(np.argmax(np.std(rewards, axis=1))), rewards.shape[1]
    order = np.argsort(-rewards[group], kind="stable")
    shown = [f"{texts[group * size + i]} ({rewards[group][i]:.2f})".replace("\n", " ") for i in order]
    bars = np.asarray(advantages)[group][order]
    fig, ax = plt.subplots(figsize=(9, 0.3 * size + 0.9), layout="constrained")
    ax.barh(range(size), bars, color=["C0" if bar > 0 else "C1" for bar in bars])
    ax.axvline(0, color="black", linewidth=1)
    ax.set_yticks(range(size), shown, fontsize=10)
    ax.invert_yaxis()
    ax.text(-0.02, 1.02, "drawn answer (reward)", transform=ax.transAxes, ha="right", fontsize=10, style="italic")
    ax.set_xlabel("advantage: > 0 makes an answer more likely")
    told = "; ".join(f"{text}: {bar:+.2f}" for text, bar in zip(shown, bars, strict=True))
    return fig, f"Bars of the advantages of one question's drawn answers. {told}."


def preference_curves(runs: Mapping[str, np.ndarray]) -> tuple[Figure, str]:
    """Draw how likely better and worse answers become, and its words.

    `runs` are log-probabilities by training, `[updates + 1, 2, pairs]`, better answers first. Each has a picture.
    """
    fig, axes = plt.subplots(1, len(runs), figsize=(9, 3.4), sharey=True, squeeze=False, layout="constrained")
    told = []
    for ax, (name, sums) in zip(axes[0], runs.items(), strict=True):
        means = np.mean(np.asarray(sums), axis=2).T
        last = len(means[0]) - 1
        ax.axhline(means[0][0], color="0.6", linewidth=1, linestyle=":", zorder=0)
        for line, kind, colour in zip(means, ("better", "worse"), ("#3f90da", "#b36b00"), strict=True):
            ax.plot(line, color=colour, linewidth=2.5, label=f"{kind} answer")
            ax.text(last * 1.03, line[-1], f"{kind}\n{line[-1]:.1f}", color=colour, fontsize=10, va="center")
        told.append(f"{name}: {means[0][0]:.1f} to {means[0][-1]:.1f}")
        ax.set_title(name, fontsize=11)
        ax.set_xlim(0, last * 1.22)
        ax.margins(y=0.08)
        ax.set_xlabel("updates")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    start = float(np.mean(np.asarray(next(iter(runs.values()))), axis=2)[0, 0])
    axes[0, 0].annotate(
        "better, at first", (0, start), textcoords="offset points", xytext=(4, -12), fontsize=10, color="0.35"
    )
    axes[0, 0].set_ylabel("log-probability of an answer")
    return fig, f"Log-probabilities by update. The better answer's before and after, {'; '.join(told)}."
