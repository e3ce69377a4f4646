"""Figures of notebook 13: PPO's clip, how far two readings of a policy differ, and rewards from round to round."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure


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


def ratio_dots(log_ratios: Mapping[str, Any], epsilon: float) -> Figure:
    """Draw ratios of one policy's two readings: left of each token, right of each whole answer, by type.

    `log_ratios` are `[answers, tokens]` by name: one reading's log-probabilities less the other's.
    """
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for ax, title in zip(axes, ("each token", "each whole answer, its tokens multiplied"), strict=True):
        ax.axhspan(1 - epsilon, 1 + epsilon, color="0.9", zorder=0)
        ax.axhline(1, color="0.5", linewidth=1)
        for i, differences in enumerate(log_ratios.values()):
            numbers = np.asarray(differences)
            ratios = np.exp(numbers.ravel() if title == "each token" else numbers.sum(axis=1))
            aside = i + np.linspace(-0.3, 0.3, len(ratios))
            ax.plot(aside, ratios, "os"[i % 2], color=f"C{i}", alpha=0.6, markersize=4)
        ax.set(title=title, xlim=(-0.6, len(log_ratios) - 0.4))
        ax.set_xticks(range(len(log_ratios)), [*log_ratios])
    axes[0].set_ylabel("ratio of the same policy")
    axes[1].text(
        0, 1 - epsilon, f"grey: the clip leaves\nit alone, \u00b1{epsilon:g}", ha="center", va="bottom", fontsize=9
    )
    return fig


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
