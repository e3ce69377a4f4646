"""Figures of notebook 10: which proof catches which program, and what a loss curve shows of the same."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from llamem.verify import Verification


def proof_grid(answers: Mapping[str, Verification]) -> Figure:
    """Draw a grid of programs and proofs: blue where a proof holds, red where it fails, grey where it cannot judge."""
    names = _proofs(answers)
    shade = {True: 1, False: 2, None: 0}
    judged = [{proof.name: proof.holds for proof in answer.proofs} for answer in answers.values()]
    grid = np.array([[shade[one.get(name)] for name in names] for one in judged])
    fig, ax = plt.subplots(figsize=(9, 5.2))
    ax.imshow(grid, cmap=ListedColormap(["#f0f0f0", "#a9c8e8", "#b5402a"]), vmin=0, vmax=2, aspect="auto")
    for row, column in np.argwhere(grid == 2):
        ax.text(column, row, "failed", ha="center", va="center", color="white", fontsize=8)
    ax.set_yticks(range(len(answers)), list(answers))
    ax.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    ax.set_xticks(np.arange(len(names)) + 0.5, minor=True)
    ax.set_yticks(np.arange(len(answers)) + 0.5, minor=True)
    ax.grid(which="minor", color="white", linewidth=2)
    ax.tick_params(which="both", length=0)
    ax.set_title("Blue holds, red fails, grey had nothing to judge")
    return fig


def proof_grid_alt(answers: Mapping[str, Verification]) -> str:
    """Say what `proof_grid` shows."""
    failed = {case: ", ".join(proof.name for proof in answer.failed) or "none" for case, answer in answers.items()}
    return f"A grid of programs and proofs. Failed: {'; '.join(f'{case}: {names}' for case, names in failed.items())}."


def learning_curves(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draw losses by name on a logarithmic axis, side by side in panels with titles; a name keeps its line's style."""
    fig, axes = plt.subplots(1, len(panels), figsize=(10, 3.6), sharey=True)
    for ax, (title, curves) in zip(axes, panels.items(), strict=True):
        for i, (name, curve) in enumerate(curves.items()):
            ax.plot(curve, label=name, color=f"C{i}", linestyle=("-", "--", ":")[i % 3], linewidth=2)
        ax.set(yscale="log", xlabel="step of Adam", title=title)
        ax.legend(frameon=False)
    axes[0].set_ylabel("loss")
    return fig


def _proofs(answers: Mapping[str, Verification]) -> list[str]:
    return list(dict.fromkeys(proof.name for answer in answers.values() for proof in answer.proofs))
