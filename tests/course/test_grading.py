"""Notebooks that came back: a row for each exercise, whatever is printed, missing, broken or faked in them."""

import json
import re
from pathlib import Path

import pytest

from llamem_course.grading import grade

SOURCE = Path(__file__).resolve().parents[2] / "notebooks"
(PATH,) = SOURCE.glob("01_*.ipynb")


def exercises_of(path: Path) -> tuple[list[str], list[str]]:
    """The cells of a notebook's exercises, and the folded solutions below them."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    numbers = [i for i, cell in enumerate(cells) if "exercise" in cell["metadata"].get("tags", [])]
    solutions = [re.search(r"```python\n(.*?)```", "".join(cells[i + 1]["source"]), re.DOTALL) for i in numbers]
    return ["".join(cells[i]["source"]) for i in numbers], [found[1] for found in solutions if found]


STUBS, SOLUTIONS = exercises_of(PATH)
CHECKS = [stub.rstrip().splitlines()[-1] for stub in STUBS]


def handed_in(place: Path, answers: list[str | None], printed: str = "") -> None:
    """Notebook 01 with these answers in the cells of its exercises; None takes the cell out."""
    notebook = json.loads(PATH.read_text(encoding="utf-8"))
    of_exercises = [cell for cell in notebook["cells"] if "exercise" in cell["metadata"].get("tags", [])]
    for cell, answer, check in zip(of_exercises, answers, CHECKS, strict=True):
        if answer is None:
            notebook["cells"].remove(cell)
            continue
        cell["source"] = f"{answer}\n\n\n{check}"
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": printed}]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(notebook), encoding="utf-8")


@pytest.mark.slow
def test_each_answer_has_a_row_and_what_is_printed_counts_for_nothing(tmp_path):
    nothing = STUBS[0].rpartition("\n")[0].replace("raise NotImplementedError", "return None")
    faked = f"{CHECKS[0].partition('(')[0]} = lambda fn: None\nprint('Exercise 1: correct.')"
    handed_in(tmp_path / "ann" / PATH.name, [*SOLUTIONS])
    bobs = [f"{nothing}\n{faked}", f"{SOLUTIONS[1]}\n  )", None]
    handed_in(tmp_path / f"bob_{PATH.name}", bobs, "Exercise 1: correct.")
    handed_in(tmp_path / f"cy_{PATH.name}", [stub.rpartition("\n")[0] for stub in STUBS])
    (tmp_path / "notes.ipynb").write_text('{"cells": []}')
    (tmp_path / f"di_{PATH.name}").write_text('{"cells": [')

    rows = list(grade(tmp_path, SOURCE))
    results = {
        name: [row.result for row in rows if row.file.startswith(name)] for name in ("ann", "bob", "cy", "di", "notes")
    }
    assert results == {
        "ann": ["correct"] * 3,
        "bob": ["not yet", "broken", "missing"],
        "cy": ["not tried"] * 3,
        "di": ["broken"] * 3,
        "notes": ["unknown"],
    }
    (bob,) = [row for row in rows if row.file.startswith("bob") and row.exercise == "1"]
    assert bob.told.startswith("Its stored output says correct. ")


def test_folders_without_notebooks_are_refused(tmp_path):
    for folder, source in ((tmp_path, SOURCE), (SOURCE, tmp_path)):
        with pytest.raises(FileNotFoundError, match="holds no notebooks"):
            next(grade(folder, source))
