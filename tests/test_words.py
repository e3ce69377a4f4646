"""Words that claim an order, such as lower, never or largest, stand in a notebook's prose beside an assert."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_claims

NOTEBOOKS = test_claims.NOTEBOOKS
WORDS = """
lower higher faster slower smaller cheaper never always largest smallest fastest slowest lowest highest fewest
best worst cheapest dearest
"""
ORDER = re.compile(rf"\b({'|'.join(WORDS.split())})\b", re.IGNORECASE)
# Sections that repeat what the others proved, or ask.
AFTERWARDS = re.compile(r"^## (What to remember|Limits|Exercises|A chart to choose by)", re.MULTILINE)
# Uses that claim nothing of this notebook's own, by notebook: what is waived, and why.
WAIVED: dict[str, dict[str, str]] = {}


def claims(notebook: dict[str, Any]) -> Iterator[str]:
    """Sentences with a word of order that have no assert in the code cell before them, nor in the two after them."""
    cells = notebook["cells"]
    ends = [
        i
        for i, cell in enumerate(cells)
        if cell["cell_type"] == "markdown" and AFTERWARDS.search("".join(cell["source"]))
    ]
    for i, cell in enumerate(cells[: ends[0] + 1 if ends else None]):
        if cell["cell_type"] != "markdown" or i == 0:
            continue
        text = re.split(AFTERWARDS, test_claims.prose(cell))[0]
        text = re.sub(r"^#+ .*$", "", text, flags=re.MULTILINE)
        before = [one for one in cells[:i] if one["cell_type"] == "code"][-1:]
        following = [one for one in cells[i + 1 :] if one["cell_type"] == "code"]
        after = following[:2] + [one for one in _rest_of_section(cells[i + 1 :]) if "check" in _tags(one)]
        if any(re.search(r"\b(assert|claim\()", "".join(one["source"])) for one in before + after):
            continue
        for sentence in re.split(r"(?<=[.?!:])\s+", text):
            if ORDER.search(sentence) and not sentence.rstrip().endswith("?"):
                yield " ".join(sentence.split())


def _tags(cell: dict[str, Any]) -> list[str]:
    return cell.get("metadata", {}).get("tags", [])


def _rest_of_section(cells: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The cells before the next heading of a section."""
    for cell in cells:
        if cell["cell_type"] == "markdown" and re.search(r"^## ", "".join(cell["source"]), re.MULTILINE):
            return
        yield cell


@pytest.mark.quick
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_words_of_order_stand_beside_an_assert(path: Path):
    waived = WAIVED.get(path.name[:2], {})
    found = list(claims(json.loads(path.read_text(encoding="utf-8"))))
    open_claims = [sentence for sentence in found if not any(part in sentence for part in waived)]
    assert not open_claims, "assert these in a cell beside them, say them otherwise, or waive them:\n" + "\n".join(
        open_claims
    )
    unused = [part for part in waived if not any(part in sentence for sentence in found)]
    assert not unused, f"waived, and not there: {unused}"


def test_a_claim_without_an_assert_is_found():
    def notebook(text: str, code: str = "print(1)") -> dict[str, Any]:
        cells = [("markdown", "# 01 · Title?"), ("code", "x = 1"), ("markdown", text), ("code", code)]
        return {"cells": [{"cell_type": kind, "source": source} for kind, source in cells]}

    for text in ("The peak is lower. It is red.", "## A tile\n\nIt never grows.", "This is the WORST of all."):
        assert len(list(claims(notebook(text)))) == 1
        assert not list(claims(notebook(text, "assert x < 2")))
    for text in ("Is it lower?", "It is red.", "`never` is a name.", "## What to remember\n\nIt is always red."):
        assert not list(claims(notebook(text))), text
