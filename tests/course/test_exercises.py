"""Every folded solution of a notebook passes its own check; what was not tried, or is wrong, does not."""

import ast
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exercise_cells import NOTEBOOKS, exercises_of
from other_words import OTHER_WORDS

import jaxmem
import llamem
from llamem_course.exercises.exercise import Exercise, one_by_one

EXERCISES = {f"{path.stem}-{one.name}": one for path in NOTEBOOKS for one in exercises_of(path)}
ALL = [pytest.param(one, id=name) for name, one in EXERCISES.items()]


def run(exercise: SimpleNamespace, code: str) -> None:
    namespace: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "jaxmem": jaxmem, "llamem": llamem}
    namespace["exercises"] = importlib.import_module(f"llamem_course.exercises.{exercise.topic}")
    exec(f"{code}\n{exercise.check}", namespace)


@pytest.mark.parametrize("exercise", ALL)
def test_the_solution_is_right_the_stub_not_tried_and_nothing_returned_gets_a_hint(exercise, capsys):
    run(exercise, exercise.solution)
    assert "correct" in capsys.readouterr().out
    run(exercise, exercise.stub)
    output = capsys.readouterr().out
    assert "not tried yet" in output and "correct" not in output
    # The signature is the stub's, so that the answer is what is wrong.
    (function,) = [node for node in ast.parse(exercise.stub).body if isinstance(node, ast.FunctionDef)]
    function.body = ast.parse("return None").body
    with pytest.raises(AssertionError) as error:
        run(exercise, ast.unparse(function))
    assert len(str(error.value).split()) > 3, "the hint says nothing"


CHECKS = {
    f"{topic}.{name}": one
    for topic in sorted({exercise.topic for exercise in EXERCISES.values()})
    for name, one in vars(importlib.import_module(f"llamem_course.exercises.{topic}")).items()
    if isinstance(one, Exercise)
}
ENOUGH = 6


def wrong_answers(one: Exercise) -> list[tuple[str, Any]]:
    """An exercise's wrong answers, each with words of the hint that it must get."""
    return [pair for answers in (one.misconceptions, *one.demands.values()) for pair in one_by_one(answers)]


@pytest.mark.parametrize(
    ("check", "hint", "answer"),
    [
        pytest.param(one, *pair, id=f"{name}-{i}")
        for name, one in CHECKS.items()
        for i, pair in enumerate(wrong_answers(one))
    ],
)
def test_a_wrong_answer_gets_the_hint_that_stands_beside_it(check, answer, hint):
    with pytest.raises(AssertionError) as refused:
        check(answer)
    assert hint in str(refused.value)
    assert len(str(refused.value).split()) > 8, "the hint says too little"


@pytest.mark.quick
@pytest.mark.parametrize("name", CHECKS)
def test_an_exercise_has_enough_wrong_answers(name):
    assert len(wrong_answers(CHECKS[name])) >= ENOUGH


@pytest.mark.parametrize(("check", "answer"), OTHER_WORDS)
def test_a_right_answer_in_other_words_is_taken(check, answer, capsys):
    check(answer)
    assert "correct" in capsys.readouterr().out


def test_a_cell_that_breaks_the_form_is_refused(tmp_path):
    def notebook(stub: str, after: str) -> Path:
        cell = {"cell_type": "code", "metadata": {"tags": ["exercise"]}, "source": stub}
        (tmp_path / "x.ipynb").write_text(json.dumps({"cells": [cell, {"metadata": {}, "source": after}]}))
        return tmp_path / "x.ipynb"

    stub = "def f(x):\n    raise NotImplementedError\nexercises.check_f(f)"
    fold = "<details><summary>Solution</summary>\n\n```python\ndef f(x):\n    return x\n```\n\n</details>"
    assert [e.name for e in exercises_of(notebook(stub, fold))] == ["f"]
    for bad_stub, bad_fold, complaint in [
        (stub + "\nprint(1)", fold, "the last line"),
        (stub.replace("raise NotImplementedError", "return x"), fold, "is no stub"),
        (stub, fold.replace("Solution", "Look"), "no folded solution"),
    ]:
        with pytest.raises(AssertionError, match=complaint):
            exercises_of(notebook(bad_stub, bad_fold))
