"""Notebooks that came back: a row for each exercise, whatever is printed, missing, broken or faked in them."""

import json
from pathlib import Path

import pytest
from exercise_cells import NOTEBOOKS, exercises_of

from llamem_course.grading import grade

(PATH,) = [path for path in NOTEBOOKS if path.name.startswith("01_")]
SOURCE = PATH.parent
EXERCISES = exercises_of(PATH)


def handed_in(place: Path, answers: list[str | None], printed: str = "") -> None:
    """Notebook 01 with these answers in the cells of its exercises; None takes the cell out."""
    notebook = json.loads(PATH.read_text(encoding="utf-8"))
    of_exercises = [cell for cell in notebook["cells"] if "exercise" in cell["metadata"].get("tags", [])]
    for cell, answer, one in zip(of_exercises, answers, EXERCISES, strict=True):
        if answer is None:
            notebook["cells"].remove(cell)
            continue
        cell["source"] = f"{answer}\n\n\n{one.check}"
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": printed}]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(notebook), encoding="utf-8")


@pytest.mark.slow
def test_each_answer_has_a_row_and_what_is_printed_counts_for_nothing(tmp_path):
    nothing = EXERCISES[0].stub.replace("raise NotImplementedError", "return None")
    faked = f"{EXERCISES[0].check.partition('(')[0]} = lambda fn: None\nprint('Exercise 1: correct.')"
    handed_in(tmp_path / "ann" / PATH.name, [one.solution for one in EXERCISES])
    bobs = [f"{nothing}\n{faked}", f"{EXERCISES[1].solution}\n  )", None]
    handed_in(tmp_path / f"bob_{PATH.name}", bobs, "Exercise 1: correct.")
    handed_in(tmp_path / f"cy_{PATH.name}", [one.stub for one in EXERCISES])
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
