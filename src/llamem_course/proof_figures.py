"""The figure of notebook 10: which proof catches which program."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from jaxmem import Title, Verification

_QUESTIONS = {
    "on": (Title.CHECKPOINTS, Title.OPTIONS),
    "right": (Title.LOSS, Title.GRADIENTS, Title.CHOICES),
    "worth it": (Title.RUNS, Title.COMPILER, Title.MEMORY),
    "around it": (Title.RANDOMNESS, Title.PARAMETERS),
}


def proof_grid(answers: Mapping[str, Verification]) -> Figure:
    """Draw programs beside proofs: where one fails, cannot tell or has nothing to judge."""
    shade = {True: 1, None: 2, False: 3}
    judged = [{proof.name: shade[proof.holds] for proof in answer.proofs} for answer in answers.values()]
    asked = {title for one in judged for title in one}
    rows = [(question, title) for question, titles in _QUESTIONS.items() for title in titles if title in asked]
    grid = np.array([[one.get(title, 0) for one in judged] for _, title in rows])
    colours = ListedColormap(["#f4f4f4", "#a9c8e8", "#c4c4c4", "#b5402a"])
    gaps = {question: 0.2 * i for i, question in enumerate(_QUESTIONS)}  # above the rows of each
    places = [row + gaps[question] for row, (question, _) in enumerate(rows)]
    fig, ax = plt.subplots(figsize=(10, 4.6))
    for y, shades in zip(places, grid, strict=True):
        extent = (-0.5, len(answers) - 0.5, y + 0.46, y - 0.46)
        ax.imshow(shades[None], cmap=colours, vmin=0, vmax=3, aspect="auto", extent=extent)
    for value, word, colour in ((3, "fails", "white"), (2, "?", "black")):
        for row, column in np.argwhere(grid == value):
            ax.text(column, places[row], word, ha="center", va="center_baseline", color=colour, fontsize=9)
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
    ax.set_xlabel("blue: the proof holds; ?: it cannot tell" + "; pale: nothing to judge" * bool((grid == 0).any()))
    return fig


def proof_grid_alt(answers: Mapping[str, Verification]) -> str:
    """Say what `proof_grid` shows."""
    said = []
    for word, holds in (("Failed", False), ("Cannot tell", None)):
        of_case = {
            case: ", ".join(proof.name for proof in answer.proofs if proof.holds is holds)
            for case, answer in answers.items()
        }
        said.append(f"{word}: {'; '.join(f'{case}: {names}' for case, names in of_case.items() if names)}.")
    return " ".join(["A grid of programs and proofs.", *said])
