"""The figure of notebook 10: which proof catches which program."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from jaxmem import Verification

_COLOURS = {True: "#a9c8e8", None: "#c4c4c4", False: "#b5402a"}


def proof_grid(answers: Mapping[str, Verification]) -> Figure:
    """Draw programs beside proofs: where one fails or cannot tell. Proofs that hold for all share the last row."""
    by_program = [{proof.name: proof.holds for proof in answer.proofs} for answer in answers.values()]
    titles = list(dict.fromkeys(title for one in by_program for title in one))
    telling = [title for title in titles if not all(one.get(title, True) for one in by_program)]
    rows = [(title, [one.get(title, True) for one in by_program]) for title in telling]
    if others := len(titles) - len(telling):
        rows.append((f"the other {others}", [True] * len(answers)))
    fig, ax = plt.subplots(figsize=(9.5, 0.55 * len(rows) + 1.1), layout="constrained")
    for y, (_, holds) in enumerate(rows):
        for column, one in enumerate(holds):
            ax.barh(y, 0.96, left=column - 0.48, height=0.88, color=_COLOURS[one])
            word = {True: "", None: "?", False: "fails"}[one]
            ax.text(column, y, word, ha="center", va="center", fontsize=9, color="black" if one is None else "white")
    ax.set_xlim(-0.5, len(answers) - 0.5)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(range(len(rows)), [title for title, _ in rows])
    ax.set_xticks(range(len(answers)), list(answers), rotation=30, ha="left", rotation_mode="anchor")
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("blue: the proof holds; ?: it cannot tell")
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
