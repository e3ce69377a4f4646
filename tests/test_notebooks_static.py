"""Format rules of the notebooks, read without running them."""

import itertools
import json
import re
import statistics
import tomllib
from collections.abc import Iterator
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
    from llamem_course import notebook
except ImportError:  # Colab, Kaggle: leaves the jax and numpy found there alone
    %pip install -q "llamem[notebooks,train] @ git+https://github.com/{SLUG}@{TAG}"
    from llamem_course import notebook

notebook.begin("NAME")  # Colab, Kaggle: fetches the chips' compilers, 560 MB, half a minute"""
MAX_MIB = 3
MAX_CELLS, MAX_LINES, MEDIAN_LINES = 36, 40, 10  # beside the folded cells that check
PATH = ("00", "01", "03", "04", "06", "07")
MAX_WIDTH, MAX_WORDS, MAX_FURTHER = 100, 1650, 1800

Notebook = dict[str, Any]


def badges(name: str) -> tuple[str, ...]:
    """What opens `notebooks/<name>` in Colab, on Kaggle and in Binder."""
    file = f"https://github.com/{SLUG}/blob/{TAG}/notebooks/{name}"
    colab = f"https://colab.research.google.com/github/{SLUG}/blob/{TAG}/notebooks/{name}"
    binder = f"https://mybinder.org/v2/gh/{SLUG}/{TAG}?labpath=notebooks%2F{name}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})",
        f"[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src={file})",
        f"[![Binder](https://mybinder.org/badge_logo.svg)]({binder})",
    )


def source(cell: Notebook) -> str:
    return "".join(cell["source"])


def tags(cell: Notebook) -> list[str]:
    return cell["metadata"].get("tags", [])


def code_cells(notebook: Notebook) -> list[Notebook]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def code_lines(cell: Notebook) -> int:
    """How many lines there are to follow: neither empty nor a comment."""
    return sum(bool(line.strip()) and not line.startswith("# ") for line in source(cell).splitlines())


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
    read = [cell for cell in notebook["cells"] if "check" not in tags(cell)]
    if len(read) > MAX_CELLS:
        yield f"{len(read)} cells, more than {MAX_CELLS}: what bores, what is told twice?"
    yield from _teaching(notebook, name)
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
    if (
        not code
        or source(code[0]) != BOOTSTRAP.replace("NAME", name.removesuffix(".ipynb"))
        or "bootstrap" not in tags(code[0])
    ):
        yield "the first code cell is not the bootstrap cell, tagged bootstrap; see CONTRIBUTING.md"
    tagged = [i for i, cell in enumerate(code) if "parameters" in tags(cell)]
    if tagged != [1]:
        yield f"the tag parameters stands on code cells {tagged}, not on the second alone"
    else:
        lines = source(code[1]).splitlines()
        for told, line in zip(lines[::2], lines[1::2], strict=True):  # Colab makes a form of these
            form = r"\w+ = [^#]+  # @param \{type: \"(string|integer|number|raw)\"\}"
            if not (re.fullmatch(r"# .+\.", told) and re.fullmatch(form, line)):
                yield f"the parameter {line!r} is not a line of what it is, then a literal as a form of Colab's"


def _prose(notebook: Notebook) -> Iterator[str]:
    text = prose(notebook)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, flags=re.MULTILINE)]
    if levels.count(1) != 1:
        yield f"{levels.count(1)} headings of the first level instead of one"
    if any(deeper > level + 1 for level, deeper in itertools.pairwise(levels)):
        yield "a heading skips a level"
    if re.search(r"!\[\s*\]\(", text) or any('alt="' not in tag for tag in re.findall(r"<img[^>]*>", text)):
        yield "an image in the prose has no alternative text"
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
    code = [cell for cell in code if "check" not in tags(cell)]
    if code and statistics.median(map(code_lines, code)) > MEDIAN_LINES:
        yield f"the median code cell has more than {MEDIAN_LINES} lines"


def _teaching(notebook: Notebook, name: str) -> Iterator[str]:
    """Code as a reader would write it; what checks the text is folded, at the end of a section; solutions apart."""
    words = len(re.sub(r"<details>.*?</details>", "", prose(notebook), flags=re.DOTALL).split())
    if words > (MAX_WORDS if name[:2] in PATH else MAX_FURTHER):
        yield f"{words} words of prose: which sentence would nobody miss?"
    stubs = [cell for cell in code_cells(notebook) if "exercise" in tags(cell)]
    solutions = [cell for cell in notebook["cells"] if "solution" in tags(cell)]
    if len(stubs) < 2 or len(solutions) != len(stubs):
        yield f"{len(stubs)} exercises and {len(solutions)} solutions: expected two or more, each with its own"
    for number, cell in enumerate(code_cells(notebook), 1):
        long = [line for line in source(cell).splitlines() if len(line) > MAX_WIDTH and "%pip" not in line]
        if long and not {"bootstrap", "parameters"} & set(tags(cell)):
            yield f"code cell {number} has a line of more than {MAX_WIDTH} characters: {long[0][:60]} ..."
        if "check" in tags(cell):
            folded = cell["metadata"].get("jupyter", {}).get("source_hidden") and cell["metadata"].get("cellView")
            if not source(cell).startswith("# @title Check: ") or folded != "form":
                yield f"code cell {number} is tagged check, and is not folded: see CONTRIBUTING.md"
        elif re.search(r"^\s*(assert |claim\()", source(cell), re.MULTILINE) and "exercise" not in tags(cell):
            yield f"code cell {number} asserts: put it into the cell, tagged check, at the end of its section"
        if re.search(r"\(\w+ := .*\bfor\b|\bfor\b.*:=", source(cell)):
            yield f"code cell {number} has a walrus in a comprehension"


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


def stream(text: str) -> Notebook:
    return {"output_type": "stream", "name": "stdout", "text": text}


def test_what_is_stored_is_cleaned():
    noise = "WARNING: All log messages before absl::InitializeLog() ...\nI0000 00:00:1.2 3 stub.cc:31] no GPU\n"
    notebook: Any = nbformat.read(NOTEBOOKS[0], as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code" and not cell.outputs)
    outputs: Any = nbformat.from_dict(
        [
            stream(noise) | {"name": "stderr"},
            stream(noise + "kept\n") | {"name": "stderr"},
            {"output_type": "display_data", "data": {run_notebooks.WIDGET_VIEW: {}}, "metadata": {}},
        ]
    )
    cell.outputs = outputs
    cell.metadata |= {"papermill": {}, "execution": {}}
    notebook.metadata |= {"widgets": {}, "papermill": {}}
    assert sum("papermill" in problem for problem in problems(notebook, NOTEBOOKS[0].name, LOCK)) == 2
    cleaned = run_notebooks.clean(notebook)
    assert [output["text"] for output in cell.outputs] == ["kept\n"]
    assert list(problems(cleaned, NOTEBOOKS[0].name, LOCK)) == []
