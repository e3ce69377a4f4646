"""Every measured number in a notebook's prose is printed by a cell of that notebook, or stands beside its source."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
# A number with a unit of what is measured, or with a decimal point.
UNITS = r"GiB|MiB|KiB|GB|MB|kB|TFLOPs?|GFLOPs?|FLOPs|percent|nats|tokens/s"
CLAIM = re.compile(rf"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)(?:[ ]?(%|(?:{UNITS})\b)|(?<=\.\d)|(?<=\.\d\d)|(?<=\.\d\d\d))")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
# What looks like a measured number and is none.
EXEMPT = (
    (r"Tested with jax [^\n]*", "versions, which another test compares with the lock"),
    (r"\*\*Cost\*\*[^\n]*", "minutes and memory of a run, which differ from machine to machine"),
    (r"(Llama|Qwen|Gemma)[ -]?\d(\.\d)?", "names of models"),
    (r"(?:16|24|40|80) GB (?:of |TPU|GPU|chip|card)", "what a chip is sold as"),
    (r"jax \d+\.\d+(\.\d+)?|JAX \d+\.\d+(\.\d+)?|Python \d+\.\d+", "versions"),
    (r"\$[^$]*\$", "formulas"),
    (r"[Ss]ection \d+(\.\d+)*", "places in a paper"),
)


def prose(cell: dict[str, Any]) -> str:
    """A cell's text without code, solutions, addresses and what is exempt."""
    text = re.sub(r"```.*?```|`[^`\n]*`|<details>.*?</details>", " ", "".join(cell["source"]), flags=re.DOTALL)
    paragraphs = [part for part in text.split("\n\n") if not re.search(r"\]\(https?://(?!colab|mybinder)|arXiv", part)]
    text = re.sub(r"\]\([^)]*\)", "]", "\n\n".join(paragraphs))
    for pattern, _ in EXEMPT:
        text = re.sub(pattern, " ", text)
    return text


def printed(notebook: dict[str, Any]) -> Iterator[float]:
    """Every number that a cell of the notebook prints or sets as a parameter."""
    for cell in notebook["cells"]:
        texts = ["".join(cell["source"])] if cell["cell_type"] == "code" else []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            texts += ["".join(output.get("text", ""))]
            texts += ["".join(data.get(kind, "")) for kind in ("text/plain", "text/html", "text/markdown")]
        for text in texts:
            for found in NUMBER.findall(text.replace("_", "")):
                yield float(found.replace(",", ""))


def unproved(notebook: dict[str, Any]) -> Iterator[str]:
    """Numbers of the prose that no printed one rounds to, each with its surroundings."""
    known = list(printed(notebook))
    for cell in notebook["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        text = prose(cell)
        for claim in CLAIM.finditer(text):
            digits = claim[1].replace(",", "")
            decimals = len(digits.partition(".")[2])
            value, half = float(digits), 0.5 * 10**-decimals
            # Of a percentage the printed number may be the fraction.
            scales = (1.0, 100.0) if claim[2] in ("%", "percent") else (1.0,)
            if not any(abs(x * scale - value) <= half * 1.001 for x in known for scale in scales):
                around = text[max(0, claim.start() - 40) : claim.end() + 30].replace("\n", " ")
                yield f"{claim[0]} in '... {around} ...'"


@pytest.mark.quick
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_number_in_the_prose_is_printed(path):
    found = list(unproved(json.loads(path.read_text(encoding="utf-8"))))
    assert not found, "print these in a cell, or link their source:\n" + "\n".join(found)


def test_a_false_number_is_found_and_a_true_one_is_not():
    def notebook(text: str, output: str) -> dict[str, Any]:
        code = {"cell_type": "code", "source": ["tokens = 8192"], "outputs": [{"text": output}]}
        return {"cells": [{"cell_type": "markdown", "source": text}, code]}

    for text, output in (
        ("The peak is 3.9 GiB.", "peak 3.914"),
        ("It takes 8,192 tokens/s.", ""),
        ("A share of 21 % and 4.25 in all.", "0.2133 4.25"),
        ("Llama 3.1 on a 16 GB chip, `7.77` and [source](https://x.org/1) says 5.55.", ""),
    ):
        assert not list(unproved(notebook(text, output))), text
    for text, output in (
        ("The peak is 4.0 GiB.", "peak 3.914"),
        ("It saves 17 %.", "0.21"),
        ("A ratio of 1.36.", "1.4"),
    ):
        assert len(list(unproved(notebook(text, output)))) == 1, text
