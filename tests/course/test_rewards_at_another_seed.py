"""Notebook 13's sentences hold from a seed that is not the stored one: rewards rise, and what pairs do."""

from typing import Any

import nbformat
import pytest
from test_notebook_parameters import run


@pytest.mark.weekly  # minutes; on every push the notebook runs, with its own claims
def test_what_is_said_of_rewards_and_pairs_holds_from_another_seed(tmp_path):
    run("13", {"seed": 7}, tmp_path)
    (path,) = tmp_path.glob("13*.ipynb")
    notebook: Any = nbformat.read(path, 4)
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "which no training asked for" in "".join(texts)
    assert "otherwise than in the text" not in "".join(texts)
