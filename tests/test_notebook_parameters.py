"""Notebooks run with parameters of a reader's own: what holds for their defaults alone is told, and nothing breaks."""

import os
from pathlib import Path
from typing import Any

import papermill
import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
# By notebook: two or more natural changes. What cannot be is refused in a cell with a sentence: see REFUSED.
CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "00": ({"tokens": 4096, "small_chip": "t4"}, {"other_chip": "a100-80", "small_chip": "v6e-1"}),
    "01": ({"width": 256, "depth": 8}, {"chip": "v6e-1", "other_chip": "t4", "tokens": 5000}),
    "02": ({"chip": "v6e-1", "other_chip": "a100-80"}, {"tokens": 4096}, {"tokens": 1024}),
    "03": ({"tokens": 2048}, {"chip": "v6e-1", "other_chip": "l4"}),
    "04": ({"tokens": 16_384, "seed": 3}, {"tokens": 4096, "chip": "v6e-1", "other_chip": "l4"}),
    "05": ({"chip": "v6e-8"}, {"chip": "v5p-16", "seed": 3}),
    "06": ({"model": "llama3.1-8b", "tokens": 2048}, {"seed": 3}),
    "07": ({"steps": 24}, {"seq_len": 100, "steps": 13}),
    "08": (
        {"tokens": 65_536},
        {"chip": "t4"},
        {"chip": "v6e-1"},
        {"chip": "h100"},
        {"model": "llama3.2-3b", "chip": "v6e-1"},
    ),
    "09": ({"colab_tokens": 4096, "steps": 4}, {"seed": 7, "steps": 3}),
    "10": ({"layers": 8, "width": 64}, {"tokens": 1024}),
    "11": ({"chip": "v6e"},),
    "12": ({"chip": "t4"}, {"model": "llama3.2-3b", "chip": "v6e-1", "tokens": 65_536}, {"short": 2048}),
    "13": ({"chip": "t4", "rounds": 4}, {"seed": 7, "rounds": 4}),
}
# By notebook: a change that cannot be, and words of the sentence that says so.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "00": ({"other_chip": "h1000"}, "other_chip: no chip is called 'h1000'"),
    "01": ({"depth": 1}, "two layers or more"),
    "03": ({"chip": "v5q"}, "no chip is called 'v5q'"),
    "04": ({"tokens": 1000}, "multiple of 1,024"),
    "05": ({"chip": "v5e-1"}, "take eight chips"),
    "06": ({"model": "nonsense"}, "nothing is known of 'nonsense'"),
    "07": ({"preset": "nonsense"}, "no preset is called 'nonsense'"),
    "08": ({"chip": "v5e-8"}, "about one"),
    "09": ({"colab_tokens": 1000}, "multiple of 256"),
    "10": ({"width": 2}, "below 1 MiB"),
    "11": ({"chip": "v5p"}, "take v5e or v6e"),
    "12": ({"tokens": 262_144}, "reads up to 131,072"),
    "13": ({"chip": "v6"}, "no chip is called 'v6'"),
}
ON_EACH_PUSH = ("01",)  # of the refusals, which take seconds
ALL = [
    pytest.param(number, change, id=f"{number}-{i}")
    for number, changes in CHANGES.items()
    for i, change in enumerate(changes)
]


def run(number: str, change: dict[str, Any], tmp_path: Path) -> None:
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    os.environ.setdefault("LLAMEM_CLAIMS", "raise")
    os.environ["JAX_PLATFORMS"] = "cpu"
    papermill.execute_notebook(
        path, tmp_path / path.name, parameters=change, kernel_name="python3", cwd=str(NOTEBOOKS), progress_bar=False
    )


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(("number", "change"), ALL)
def test_a_notebook_runs_with_other_parameters(number, change, tmp_path):
    run(number, change, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [n if n in ON_EACH_PUSH else pytest.param(n, marks=pytest.mark.weekly) for n in REFUSED]
)
def test_what_cannot_be_is_refused_with_a_sentence(number, tmp_path):
    change, words = REFUSED[number]
    with pytest.raises(papermill.PapermillExecutionError, match=words):
        run(number, change, tmp_path)
