"""The glossary holds every word and letter that it should, and each notebook links a word where it uses it first."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
GLOSSARY = (FOLDER / "GLOSSARY.md").read_text(encoding="utf-8")
# Names whose last part is no shape, by what they are.
NO_SHAPES = re.compile(r"[A-Z]{2,}(_[A-Z]+)*|[A-Z]\w*")
# What is no prose: fenced code, headings, inline code, links, formulas, tags.
NO_PROSE = re.compile(
    r"```.*?```|^#+ [^\n]*$|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|\$\$.*?\$\$|\$[^$\n]*\$|<[^>]*>",
    flags=re.DOTALL | re.MULTILINE,
)


def words(glossary: str) -> dict[str, str]:
    """The anchor of each word of a glossary, and of each of its other forms."""
    found = {}
    for section in glossary.partition("## words")[2].split("\n### ")[1:]:
        heading, _, text = section.partition("\n")
        also = re.match(r"\s*Also: ([^.]*)\.", text)
        for form in [heading, *(also[1].split(", ") if also else [])]:
            found[" ".join(form.lower().split())] = heading.replace(" ", "-")
    return found


def uses(text: str, forms: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """Where a text uses a word, that word, and its anchor. A longer word hides those that it is made of."""
    longest_first = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    for found in re.finditer(rf"(?<![\w-])({longest_first})(?![\w-])", masked(text), re.IGNORECASE):
        yield found.start(), found[0], forms[found[0].lower()]


def letters(glossary: str) -> set[str]:
    return set(re.findall(r"^\| `(\w)` \|", glossary, flags=re.MULTILINE))


def suffixes(code: str) -> Iterator[tuple[str, str]]:
    """The names in a code that end in a shape, and that shape."""
    for name in set(re.findall(r"\b\w+\b", code)):
        stem, _, shape = name.rpartition("_")
        if stem and re.fullmatch(r"[A-Z][A-Za-z1]*", shape) and not NO_SHAPES.fullmatch(stem):
            yield name, shape


def masked(text: str) -> str:
    return NO_PROSE.sub(lambda found: " " * len(found[0]), text)


def unlinked(notebook: dict, glossary: str) -> Iterator[str]:
    """The words of the glossary whose first use in the prose is no link to them."""
    forms, seen = words(glossary), set()
    for text in ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"):
        links = [(link.start(), "", link[1]) for link in re.finditer(r"\]\(GLOSSARY\.md#([^)]*)\)", text)]
        for start, word, anchor in sorted([*links, *uses(text, forms)]):
            if word and anchor not in seen:
                yield f"{word!r} in {text[max(0, start - 30) : start + 40]!r}"
            seen.add(anchor)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_word_is_linked_where_a_notebook_uses_it_first(path):
    found = list(unlinked(json.loads(path.read_text(encoding="utf-8")), GLOSSARY))
    assert not found, "link these to GLOSSARY.md#...:\n" + "\n".join(found)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_to_headings_of_the_glossary(path):
    headings = set(re.findall(r"^#+ (.*)$", GLOSSARY, flags=re.MULTILINE))
    anchors = {heading.lower().replace(" ", "-") for heading in headings} | {h.replace(" ", "-") for h in headings}
    linked = re.findall(r"\]\(GLOSSARY\.md#([^)]*)\)", path.read_text(encoding="utf-8"))
    assert linked and not set(linked) - anchors


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_letter_of_a_shape_is_in_the_glossary(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    known = letters(GLOSSARY)
    unknown = {name: set(shape) - known for name, shape in suffixes(code) if set(shape) - known}
    assert not unknown, f"letters that the glossary does not explain: {unknown}"
    if any(suffixes(code)):
        assert "GLOSSARY.md#letters" in code, "link the letters of shapes to the glossary"


def test_a_missing_link_or_letter_is_found():
    def notebook(*texts: str) -> dict:
        return {"cells": [{"cell_type": "markdown", "source": text} for text in texts]}

    linked = "The [residuals](GLOSSARY.md#residual) grow, and residuals shrink."
    assert not list(unlinked(notebook(linked, "A residual."), GLOSSARY))
    assert not list(unlinked(notebook("# The residual\n\n`residual`, [the residual](x.md)"), GLOSSARY))
    for text in ("The residuals grow.", "Residuals, [residuals](GLOSSARY.md#residual)."):
        assert len(list(unlinked(notebook(text), GLOSSARY))) == 1
    # The longer word counts as itself alone.
    assert len(list(unlinked(notebook("the residual stream"), GLOSSARY))) == 1
    assert dict(suffixes("x_TQ = PLANS_AB + w_q + MAX_LINES")) == {"x_TQ": "TQ"}
    assert "h" in letters(GLOSSARY) and "Q" not in letters(GLOSSARY)
