"""Notebook 13's rewards rise from a seed that is not the stored one, on questions that were never asked."""

import re
from typing import Any

import nbformat
import pytest
from test_notebook_parameters import run


@pytest.mark.weekly  # minutes; on every push the notebook runs, with its own claim
def test_rewards_rise_from_another_seed(tmp_path):
    run("13", {"seed": 7}, tmp_path)
    (path,) = tmp_path.glob("13*.ipynb")
    notebook: Any = nbformat.read(path, 4)
    texts = (output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    found = re.search(r"unseen questions: ([\d.]+) before, ([\d.]+) after", "".join(texts))
    assert found
    before, after = map(float, found.groups())
    assert after > before + 0.05
