"""Figures of notebook 13: PPO's clip, rewards by round, pairs by update."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def clip_curves(term: Callable[[Any, float], Any], epsilon: float) -> Figure:
    """Draw a token's term of the loss against the ratio, `term(ratio, advantage)`, for a good token and a bad one."""
    ratio = np.linspace(0, 2, 401)
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for ax, advantage, name, way in zip(axes, (1.0, -1.0), ("good", "bad"), ("rose", "fell"), strict=True):
        ax.axvspan(1 - epsilon, 1 + epsilon, color="0.9", zorder=0)
        ax.plot(ratio, -ratio * advantage, "--", color="C1", label="without the clip")
        ax.plot(ratio, np.asarray(term(ratio, advantage)), color="C0", linewidth=2.5, label="with the clip")
        ax.plot(1, -advantage, "o", color="black", markersize=7)
        flat = 1.6 if advantage > 0 else 0.4
        ax.annotate(
            f"flat: it {way} enough,\nno gradient",
            (flat, float(term(np.asarray(flat), advantage))),
            textcoords="offset points",
            xytext=(0, 34) if advantage > 0 else (0, 26),
            ha="center",
            fontsize=10,
            arrowprops={"arrowstyle": "->"},
        )
        ax.set(title=f"a {name} token, advantage {advantage:+g}", xlabel="ratio $r$, new probability over old")
    axes[0].set_ylabel("term of the loss")
    axes[0].legend(frameon=False, loc="lower left", fontsize=10)
    return fig


def reward_rounds(rounds: Sequence[np.ndarray]) -> tuple[Figure, str]:
    """Draw every drawn answer's reward as a dot, round by round, and return the figure and its words.

    Each of `rounds` is `[groups, answers]`: the groups of a round stand side by side.
    """
    fig, ax = plt.subplots(figsize=(9, 3.3), layout="constrained")
    for x, rewards_GB in enumerate(rounds):
        width = 0.6 / len(rewards_GB)
        for group, rewards in enumerate(rewards_GB):
            middle = x + width * (group - (len(rewards_GB) - 1) / 2)
            aside = 0.38 * width * np.linspace(-1, 1, len(rewards))  # equal rewards would hide each other
            label = "" if x else f"answers to question {group + 1} of a round"
            style = "o^sD"[group % 4]
            ax.plot(middle + aside, rewards, style, color=f"C{2 * group}", alpha=0.7, markersize=6, label=label)
        ax.hlines(rewards_GB.mean(), x - 0.34, x + 0.34, color="black", linewidth=2, label="" if x else "mean")
    ax.set_xticks(range(len(rounds)), [f"round {i + 1}" for i in range(len(rounds))])
    ax.set(ylabel="reward of a drawn answer", ylim=(-0.04, 0.8), xlim=(-0.5, max(len(rounds), 2) - 0.5))
    ax.legend(frameon=False, loc="upper left", ncols=3, fontsize=10)
    means = ", ".join(f"{np.mean(rewards):.2f}" for rewards in rounds)
    return fig, f"Dots of the rewards of drawn answers. Their mean, round by round: {means}."


def preference_curves(runs: Mapping[str, np.ndarray]) -> tuple[Figure, str]:
    """Draw how likely better and worse answers become, and its words.

    `runs` are log-probabilities by training, `[updates + 1, 2, pairs]`, better answers first. Each has a picture.
    """
    fig, axes = plt.subplots(1, len(runs), figsize=(9, 3.4), sharey=True, squeeze=False, layout="constrained")
    told = []
    for ax, (name, sums) in zip(axes[0], runs.items(), strict=True):
        better, worse = np.mean(np.asarray(sums), axis=2).T
        ax.axhline(better[0], color="0.7", linewidth=1, zorder=0)
        ax.plot(better, color="C0", label="better answer")
        ax.plot(worse, "--", color="C1", label="worse answer")
        told.append(f"{name}: {better[0]:.1f} to {better[-1]:.1f}")
        ax.set_title(name, fontsize=11)
        ax.set_xlabel("updates")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set_ylabel("log-probability of an answer")
    axes[0, 0].legend(frameon=False, fontsize=10, loc="lower left")
    return fig, f"Log-probabilities by update. The better answer's before and after, {'; '.join(told)}."
