"""Notebook 09's own cells learn to sort by rewards alone, from a seed that is not the stored one."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent.parent / "notebooks" / "09_lora_and_rl.ipynb"
IMPORTS = """
import jax, jax.numpy as jnp, llamem, numpy as np, optax
from flax import nnx
"""


@pytest.mark.weekly  # over a minute; on every push the notebook runs, with its own assert
def test_rewards_rise_well_above_the_supervised_start(as_a_user):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    chosen = [cell for cell in cells if {"parameters", "grpo"} & set(cell["metadata"].get("tags", []))]
    assert len(chosen) == 4
    namespace: dict[str, Any] = {}
    exec(IMPORTS, namespace)
    for cell in chosen:
        exec("".join(cell["source"]), namespace)
        namespace["seed"] = 7
    assert 0.05 < namespace["before"] < 0.4
    assert namespace["after"] > namespace["before"] + 0.3
    assert sum(namespace["history"][-10:]) > sum(namespace["history"][:10]) + 3
