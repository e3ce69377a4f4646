"""Format rules of the notebooks, read without running them, and a test of each rule on a notebook that breaks it."""

import copy
import itertools
import json
import re
import statistics
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import run_notebooks

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SLUG = PROJECT["urls"]["Repository"].removeprefix("https://github.com/")
TAG = f"v{PROJECT['version']}"
BOOTSTRAP = f"""\
try:
    import llamem
except ImportError:  # Colab, Kaggle: leaves the jax and numpy found there alone
    %pip install -q "llamem[notebooks,train] @ git+https://github.com/{SLUG}@{TAG}"
    import llamem"""
MAX_MIB = 3
MAX_CELLS, MAX_LINES, MEDIAN_LINES = 36, 40, 20
MIN_WORDS_PER_LINE = 7

Notebook = dict[str, Any]


def badges(name: str) -> tuple[str, str]:
    """What opens `notebooks/<name>` in Colab and in Binder."""
    colab = f"https://colab.research.google.com/github/{SLUG}/blob/{TAG}/notebooks/{name}"
    binder = f"https://mybinder.org/v2/gh/{SLUG}/{TAG}?labpath=notebooks%2F{name}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})",
        f"[![Binder](https://mybinder.org/badge_logo.svg)]({binder})",
    )


def source(cell: Notebook) -> str:
    return "".join(cell["source"])


def tags(cell: Notebook) -> list[str]:
    return cell["metadata"].get("tags", [])


def code_cells(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def code_lines(cell: Notebook) -> int:
    return sum(bool(line.strip()) for line in source(cell).splitlines())


def prose(notebook: Notebook) -> str:
    """Markdown without fenced code."""
    text = "\n\n".join(source(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def output_texts(cell: Notebook) -> Iterator[str]:
    for output in cell["outputs"]:
        yield "".join(output.get("text", ""))
        for mime in ("text/plain", "text/html", "text/markdown"):
            yield "".join(output.get("data", {}).get(mime, ""))


def problems(notebook: Notebook, name: str, lock: str) -> Iterator[str]:
    """What breaks the rules in a notebook stored as `notebooks/<name>`; `lock` is the text of the locked versions."""
    yield from _state(notebook)
    yield from _opening(notebook, name, lock)
    yield from _prose(notebook)
    yield from _code(notebook)
    yield from _outputs(notebook)
    if len(notebook["cells"]) > MAX_CELLS:
        yield f"{len(notebook['cells'])} cells, more than {MAX_CELLS}: what bores, what is told twice?"
    if len(json.dumps(notebook)) > MAX_MIB * 2**20:
        yield f"larger than {MAX_MIB} MiB: draw fewer or smaller figures"


def _state(notebook: Notebook) -> Iterator[str]:
    for where, metadata in [("the notebook", notebook["metadata"])] + [
        (f"cell {i}", cell["metadata"]) for i, cell in enumerate(notebook["cells"])
    ]:
        for key in {"papermill", "widgets", "colab", "execution"} & set(metadata):
            yield f"{where} has metadata.{key}: store it with `make notebooks`"
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "the kernel is not python3"
    counts = [cell["execution_count"] for cell in code_cells(notebook) if source(cell).strip()]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts {counts} are not 1, 2, 3 ...: store it with `make notebooks`"


def _opening(notebook: Notebook, name: str, lock: str) -> Iterator[str]:
    first, text = notebook["cells"][0], source(notebook["cells"][0])
    if first["cell_type"] != "markdown" or not re.match(rf"# {name[:2]} · .+\?\n", text):
        yield f"the first cell does not open with '# {name[:2]} · A question?'"
    for badge in badges(name):
        if badge not in text:
            yield f"the first cell lacks the badge {badge}"
    for words in ("**You will be able to**", "**Needs**", "**Cost**"):
        if words not in text:
            yield f"the first cell lacks {words}"
    stamp = re.search(r"Tested with jax (\S+), reviewed \d{4}-\d{2}-\d{2}", text)
    if not stamp or f"\njax=={stamp[1]}\n" not in lock:
        yield "the first cell lacks 'Tested with jax VERSION, reviewed YYYY-MM-DD' with the locked jax"
    code = code_cells(notebook)
    if not code or source(code[0]) != BOOTSTRAP or "bootstrap" not in tags(code[0]):
        yield "the first code cell is not the bootstrap cell, tagged bootstrap; see CONTRIBUTING.md"
    tagged = [i for i, cell in enumerate(code) if "parameters" in tags(cell)]
    if tagged != [1]:
        yield f"the tag parameters stands on code cells {tagged}, not on the second alone"
    else:
        for line in filter(str.strip, source(code[1]).splitlines()):
            if not re.fullmatch(r"\w+(: \w[\w\[\] |]*)? = [^#]+  # .+", line):
                yield f"the parameter {line!r} is not 'name = literal  # what it is'"


def _prose(notebook: Notebook) -> Iterator[str]:
    text = prose(notebook)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, flags=re.MULTILINE)]
    if levels.count(1) != 1:
        yield f"{levels.count(1)} headings of the first level instead of one"
    if any(deeper > level + 1 for level, deeper in itertools.pairwise(levels)):
        yield "a heading skips a level"
    if re.search(r"!\[\s*\]\(", text) or any('alt="' not in tag for tag in re.findall(r"<img[^>]*>", text)):
        yield "an image in the prose has no alternative text"
    lines = sum(code_lines(cell) for cell in code_cells(notebook)[1:])
    if len(text.split()) < MIN_WORDS_PER_LINE * lines:
        yield f"{len(text.split())} words for {lines} lines of code: fewer than {MIN_WORDS_PER_LINE} for each"
    for link in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text):
        if not (ROOT / "notebooks" / link).exists():
            yield f"the link {link} leads nowhere"
    if "What to remember" not in text or "Limits" not in text:
        yield "the end lacks 'What to remember' or 'Limits'"


def _code(notebook: Notebook) -> Iterator[str]:
    code = code_cells(notebook)
    for number, cell in enumerate(code, 1):
        if code_lines(cell) > MAX_LINES:
            yield f"code cell {number} has {code_lines(cell)} lines, more than {MAX_LINES}"
        for bad, why in {
            r"XLA_FLAGS": "an unknown flag kills the kernel",
            r"jax\._src": "private names go without notice",
            r"tqdm\.notebook|tqdm\.auto": "GitHub shows no widgets",
            r"(?m)^\s*!": "a shell command runs on one system only",
        }.items():
            if re.search(bad, source(cell)):
                yield f"code cell {number} uses {bad}: {why}"
    if code and statistics.median(map(code_lines, code)) > MEDIAN_LINES:
        yield f"the median code cell has more than {MEDIAN_LINES} lines"


def _outputs(notebook: Notebook) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), 1):
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                yield f"code cell {number} ends in {output['ename']}"
            for mime in {"image/png", "image/jpeg", "image/svg+xml"} & set(output.get("data", {})):
                if len(output["metadata"].get(mime, {}).get("alt", "").split()) < 3:
                    yield f"a figure of code cell {number} has no alternative text: plots.show(fig, alt=...)"
        for text in output_texts(cell):
            if found := re.search(r"(/home|/root|/work|/Users|/tmp|/content)/|[A-Z]:\\|site-packages", text):
                yield f"an output of code cell {number} shows a path of one machine: {found[0]}"
            if found := re.search(r"\w*Warning:|WARNING|^[WE]\d{4} .*|Traceback", text, flags=re.MULTILINE):
                yield f"an output of code cell {number} shows a warning: {found[0]}"


LOCK = (ROOT / "requirements" / "lock.txt").read_text()


@pytest.mark.quick
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_follows_the_rules(path):
    assert re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name), "notebooks are called NN_words.ipynb"
    found = list(problems(json.loads(path.read_text(encoding="utf-8")), path.name, LOCK))
    assert not found, "\n".join(["", *found])


def markdown(text: str) -> Notebook:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def code(count: int, text: str, *tags: str, outputs: list[Notebook] | None = None) -> Notebook:
    metadata = {"tags": list(tags)} if tags else {}
    return {
        "cell_type": "code",
        "metadata": metadata,
        "source": text,
        "execution_count": count,
        "outputs": outputs or [],
    }


def stream(text: str) -> Notebook:
    return {"output_type": "stream", "name": "stdout", "text": text}


def good() -> Notebook:
    opening = "\n\n".join(
        [
            "# 07 · Does a good notebook pass?",
            " ".join(badges("07_good.ipynb")),
            "**You will be able to** tell. **Needs** nothing. **Cost** nothing.",
            "Tested with jax 1.2.3, reviewed 2026-11-20",
        ]
    )
    figure = {
        "output_type": "display_data",
        "data": {"image/png": "aGk=", "text/plain": "<Figure>"},
        "metadata": {"image/png": {"alt": "Memory falls with tiles"}},
    }
    return {
        "metadata": {"kernelspec": {"name": "python3"}},
        "cells": [
            markdown(opening),
            code(1, BOOTSTRAP, "bootstrap"),
            code(2, 'size = 3  # how many\nname: str = "a b"  # of what', "parameters"),
            markdown("## A step\n\n" + "word " * 60),
            code(3, "print(size)", outputs=[stream("3\n")]),
            code(4, "plot()", outputs=[figure]),
            markdown("## What to remember\n\nIt works.\n\n## Limits\n\nNone."),
        ],
    }


def edit(*path_and_value: Any) -> Callable[[Notebook], None]:
    """A change that sets `notebook[path[0]][path[1]]...` to a value."""
    *path, key, value = path_and_value

    def change(notebook: Notebook) -> None:
        at: Any = notebook
        for step in path:
            at = at[step]
        at[key] = value

    return change


def swap(cell: int, old: str, new: str) -> Callable[[Notebook], None]:
    def change(notebook: Notebook) -> None:
        text = notebook["cells"][cell]["source"]
        assert old in text
        notebook["cells"][cell]["source"] = text.replace(old, new)

    return change


BAD = {
    "metadata.widgets": edit("metadata", "widgets", {}),
    "metadata.papermill": edit("cells", 4, "metadata", "papermill", {}),
    "kernel is not python3": edit("metadata", "kernelspec", "name", "my-venv"),
    "execution counts": edit("cells", 4, "execution_count", 9),
    "execution counts [1, 2, 3, None]": edit("cells", 5, "execution_count", None),
    "does not open with": swap(0, "pass?", "pass."),
    "does not open with '# 07": swap(0, "# 07", "# 08"),
    "lacks the badge [![Open in Colab]": swap(0, "notebooks/07_good", "notebooks/06_other"),
    "lacks the badge [![Binder]": swap(0, "mybinder.org/v2/gh/", "mybinder.org/v2/gh/someone-"),
    "lacks **Cost**": swap(0, "**Cost**", "Cost"),
    "with the locked jax": swap(0, "jax 1.2.3", "jax 1.2.4"),
    "not the bootstrap cell": swap(1, "-q", "-q -U"),
    "not the bootstrap cell, tagged": edit("cells", 1, "metadata", {}),
    "tag parameters stands on code cells []": edit("cells", 2, "metadata", {}),
    "tag parameters stands on code cells [1, 2]": edit("cells", 4, "metadata", "tags", ["parameters"]),
    "the parameter 'size = 3' is not": swap(2, "  # how many", ""),
    "2 headings of the first level": swap(3, "## A step", "# A step"),
    "a heading skips a level": swap(3, "## A step", "### A step"),
    "in the prose has no alternative text": swap(3, "word", "![](https://x.org/a.png)"),
    "prose has no alternative text": swap(3, "word", '<img src="https://x.org/a.png">'),
    "words for 23 lines of code": edit("cells", 4, "source", "x = 1\n" * 20),
    "leads nowhere": swap(3, "word", "[there](08_nowhere.ipynb)"),
    "the end lacks": swap(6, "Limits", "More"),
    "has 41 lines": edit("cells", 4, "source", "print(1)\n" * 41),
    "uses XLA_FLAGS": swap(4, "print", "XLA_FLAGS"),
    "uses jax": swap(4, "print", "jax._src.core"),
    "tqdm": swap(4, "print(size)", "from tqdm.auto import tqdm"),
    "a shell command": swap(4, "print(size)", "!nvidia-smi"),
    "median code cell": lambda notebook: [c.update(source="x = 1\n" * 21) for c in code_cells(notebook)[1:]],
    "ends in ValueError": edit("cells", 4, "outputs", [{"output_type": "error", "ename": "ValueError"}]),
    "a figure of code cell 4": edit("cells", 5, "outputs", 0, "metadata", {}),
    "a path of one machine: /home/": edit("cells", 4, "outputs", [stream("saved in /home/ada/x")]),
    "a path of one machine: site-packages": edit(
        "cells", 5, "outputs", 0, "data", "text/plain", "lib/site-packages/jax"
    ),
    "shows a warning: UserWarning:": edit("cells", 4, "outputs", [stream("x.py:3: UserWarning: old\n")]),
    "shows a warning: W1120": edit("cells", 4, "outputs", [stream("fine\nW1120 10:00:00 xla slow\n")]),
    "52 cells, more than": lambda notebook: notebook["cells"].extend(markdown("word") for _ in range(45)),
    "larger than": edit("cells", 5, "outputs", 0, "data", "image/png", "A" * (MAX_MIB * 2**20)),
}


def test_a_good_notebook_passes():
    assert list(problems(good(), "07_good.ipynb", "\njax==1.2.3\n")) == []


@pytest.mark.parametrize("complaint", BAD)
def test_a_bad_notebook_is_refused(complaint):
    notebook = copy.deepcopy(good())
    BAD[complaint](notebook)
    found = list(problems(notebook, "07_good.ipynb", "\njax==1.2.3\n"))
    assert any(complaint in problem for problem in found), found


def test_what_is_stored_is_cleaned():
    noise = "WARNING: All log messages before absl::InitializeLog() ...\nI0000 00:00:1.2 3 stub.cc:31] no GPU\n"
    notebook = good()
    for cell in notebook["cells"]:
        cell["metadata"] |= {"papermill": {}, "execution": {}}
    notebook["metadata"] |= {"widgets": {}, "papermill": {}}
    notebook["cells"][4]["outputs"] += [
        stream(noise) | {"name": "stderr"},
        stream(noise + "kept\n") | {"name": "stderr"},
        {"output_type": "display_data", "data": {run_notebooks.WIDGET_VIEW: {}}, "metadata": {}},
    ]
    cleaned = run_notebooks.clean(nbformat.from_dict(notebook))
    assert [output["text"] for output in cleaned["cells"][4]["outputs"]] == ["3\n", "kept\n"]
    assert list(problems(cleaned, "07_good.ipynb", "\njax==1.2.3\n")) == []
