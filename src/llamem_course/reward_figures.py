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
    label = f"grey: the clip leaves\na token alone, 1 \u00b1 {epsilon:g}"
    axes[0].text(0, 1 - epsilon, label, ha="center", va="bottom", fontsize=9)
    return fig


def reward_rounds(rounds: Sequence[np.ndarray], before: np.ndarray, after: np.ndarray) -> Figure:
    """Draw every answer's reward as a dot: `before` and `after` on unseen questions, round by round in between.

    Each of `rounds` is `[groups, answers]`: the groups of a round stand side by side.
    """
    columns = [before[None], *map(np.atleast_2d, rounds), after[None]]
    fig, ax = plt.subplots(figsize=(9, 3.3), layout="constrained")
    for x, rewards_GB in enumerate(columns):
        unseen = x in (0, len(columns) - 1)
        width = 0.6 / len(rewards_GB)
        for group, rewards in enumerate(rewards_GB):
            middle = x + width * (group - (len(rewards_GB) - 1) / 2)
            aside = 0.38 * width * np.linspace(-1, 1, len(rewards))  # equal rewards would hide each other
            marker, color = ("s", "C1") if unseen else ("o^D"[group % 3], f"C{2 * group}")
            label = {0: "likeliest answer, unseen question", 1: f"drawn answer, question {group + 1}"}.get(x)
            places = middle + aside
            ax.plot(places, rewards, marker, color=color, linestyle="", alpha=0.7, markersize=5, label=label)
        ax.hlines(rewards_GB.mean(), x - 0.34, x + 0.34, color="black", linewidth=2, label="" if x else "mean")
    names = ["unseen,\nbefore", *(f"round {i + 1}" for i in range(len(rounds))), "unseen,\nafter"]
    ax.set_xticks(range(len(columns)), names)
    ax.set(ylabel="reward of an answer", ylim=(-0.04, 0.8))
    ax.legend(frameon=False, loc="upper left", ncols=2, fontsize=10)
    return fig


def reward_rounds_alt(rounds: Sequence[np.ndarray], before: np.ndarray, after: np.ndarray) -> str:
    """Say what `reward_rounds` shows."""
    means = ", ".join(f"{np.mean(rewards):.2f}" for rewards in rounds)
    ends = f"{np.mean(before):.2f} before and {np.mean(after):.2f} after"
    return f"Dots of rewards. Drawn answers: mean {means}, round by round; unseen questions: {ends}."


def preference_curves(sums: Sequence[np.ndarray]) -> tuple[Figure, str]:
    """Draw what a loss of pairs moves, and its words: `sums` are `[2, pairs]` by update, better answers first.

    Left the mean log-probabilities, right how the probability is shared among both answers and all others.
    """
    logprobs = np.mean(np.asarray(sums), axis=2)
    shares = np.mean(np.exp(np.asarray(sums)), axis=2)
    updates = np.arange(len(logprobs))
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for i, (name, marker) in enumerate((("better answer", "o"), ("worse answer", "s"))):
        left.plot(updates, logprobs[:, i], marker + "-", color=f"C{i}", label=name)
    for at, aside, align in ((0, 0.12, "left"), (updates[-1], -0.12, "right")):
        low, high = logprobs[at]
        left.annotate("", (at, low), (at, high), arrowprops={"arrowstyle": "<->", "color": "0.4"})
        left.text(at + aside, (low + high) / 2, f"{high - low:.1f} apart", ha=align, va="center", fontsize=10)
    left.set(xlabel="updates", ylabel="log-probability of an answer", xticks=updates)
    left.legend(frameon=False, loc="lower right", fontsize=10)
    others = 1 - shares.sum(axis=1)
    better = "the better answer" + (", too thin to see" if shares[:, 0].max() < 0.005 else "")
    parts = (("the worse answer", shares[:, 1], "C1"), ("all other answers", others, "0.8"))
    base = np.zeros(len(updates))
    for name, share, color in (*parts, (better, shares[:, 0], "C0")):
        right.bar(updates, share, 0.75, bottom=base, color=color, label=name)
        base = base + share
    right.set(xlabel="updates", ylabel="share of the probability", xticks=updates, ylim=(0, 1.45))
    right.set_yticks([0, 0.5, 1])
    right.legend(frameon=False, loc="upper left", fontsize=10)
    told = "; ".join(
        f"{name} {first:.2f} before, {last:.2f} after"
        for name, first, last in zip(
            ("worse answer", "all others"), (shares[0, 1], others[0]), (shares[-1, 1], others[-1]), strict=True
        )
    )
    ends = " to ".join(f"{better:.1f}" for better in (logprobs[0, 0], logprobs[-1, 0]))
    return fig, f"The better answer's log-probability rises, {ends}, and stays lowest. Shares of probability: {told}."
