"""Figures of notebook 13: PPO's clip, a group's advantages, pairs by update."""

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
