"""Figures of notebook 10: which proof catches which program, and what a loss curve shows of the same."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from llamem.verify import Title, Verification

_QUESTIONS = {
    "on": (Title.CHECKPOINTS, Title.OPTIONS),
    "right": (Title.LOSS, Title.GRADIENTS, Title.CHOICES),
    "worth it": (Title.RUNS, Title.COMPILER, Title.MEMORY),
    "around it": (Title.RANDOMNESS, Title.PARAMETERS),
}


def proof_grid(answers: Mapping[str, Verification]) -> Figure:
    """Draw programs beside proofs: red where a proof fails, grey where it is not proved, or has nothing to judge."""
    rows = [(question, title) for question, titles in _QUESTIONS.items() for title in titles]
    shade = {True: 1, False: 2, None: 0}
    judged = [{proof.name: proof.holds for proof in answer.proofs} for answer in answers.values()]
    grid = np.array([[shade[one.get(title)] for one in judged] for _, title in rows])
    colours = ListedColormap(["#f0f0f0", "#a9c8e8", "#b5402a"])
    gaps = {question: 0.2 * i for i, question in enumerate(_QUESTIONS)}  # above the rows of each
    places = [row + gaps[question] for row, (question, _) in enumerate(rows)]
    fig, ax = plt.subplots(figsize=(10, 4.6))
    for y, shades in zip(places, grid, strict=True):
        extent = (-0.5, len(answers) - 0.5, y + 0.46, y - 0.46)
        ax.imshow(shades[None], cmap=colours, vmin=0, vmax=2, aspect="auto", extent=extent)
    for row, column in np.argwhere(grid == 2):
        ax.text(column, places[row], "fails", ha="center", va="center_baseline", color="white", fontsize=9)
    ax.set_ylim(places[-1] + 0.5, -0.5)
    ax.set_yticks(places, [title for _, title in rows])
    ax.set_xticks(range(len(answers)), list(answers), rotation=30, ha="left", rotation_mode="anchor")
    ax.xaxis.tick_top()
    ax.set_xticks(np.arange(len(answers)) + 0.5, minor=True)
    ax.grid(which="minor", axis="x", color="white", linewidth=2)
    for question in _QUESTIONS:
        middle = float(np.mean([y for y, (own, _) in zip(places, rows, strict=True) if own == question]))
        ax.text(len(answers) - 0.4, middle, question, va="center", fontweight="bold")
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("red: the proof fails; blue: it holds; grey: not proved, or nothing to judge")
    return fig


def proof_grid_alt(answers: Mapping[str, Verification]) -> str:
    """Say what `proof_grid` shows."""
    failed = {case: ", ".join(proof.name for proof in answer.failed) or "none" for case, answer in answers.items()}
    return f"A grid of programs and proofs. Failed: {'; '.join(f'{case}: {names}' for case, names in failed.items())}."


def learning_curves(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draw losses by name on logarithmic axes, side by side in panels with titles; all but the first share theirs."""
    fig, axes = plt.subplots(1, len(panels), figsize=(10, 3.6))
    for ax, (title, curves) in zip(axes, panels.items(), strict=True):
        for i, (name, curve) in enumerate(curves.items()):
            ax.plot(curve, label=name, color=f"C{i}", linestyle=("-", "--", ":")[i % 3], linewidth=2)
        ax.set(yscale="log", xlabel="step of Adam")
        ax.set_title(title, fontsize=11)
        ax.legend(frameon=False)
    for ax in axes[2:]:
        ax.sharey(axes[1])
    axes[0].set_ylabel("loss")
    return fig
