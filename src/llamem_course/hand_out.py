"""The course's notebooks for a class, without what they give away."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from jaxmem.common.files import read_json, whole_folder

MAX_BYTES = 50_000_000  # of one notebook, outputs and figures included
_BADGES = re.compile(r"^\[!\[Open in Colab\].*\n\n?", re.MULTILINE)  # they open this repository's copy, answers and all
_PAGES = re.compile(r"https://github\.com/[^\s)]+/notebooks/")
_LINK = re.compile(r"\]\((\w+\.ipynb)")


def write_hand_out(source: Path, folder: Path, only: str | None = None) -> str:
    """Write the notebooks of `source`, or the one whose name begins with `only`, to a new `folder`.

    Pages and pictures that they show go with them. Return how many notebooks there are, and what was left out. Raises
    FileNotFoundError for a source without such notebooks, FileExistsError for a folder with something in it, ValueError
    for a file that is no notebook: then nothing is there.
    """
    found = sorted(source.glob("*.ipynb"))
    notebooks = [path for path in found if path.name.startswith(only or "")]
    if not found:
        raise FileNotFoundError(f"{source} holds no notebooks (*.ipynb). Name the folder that does: --from notebooks.")
    if not notebooks:
        names = ", ".join(path.stem for path in found)
        raise FileNotFoundError(f"No notebook of {source} begins with {only!r}. There are: {names}.")
    solutions, outputs = 0, 0
    with whole_folder(folder) as unfinished:
        for path in notebooks:
            notebook = read_notebook(path)
            left_out = _without_answers(notebook)
            solutions, outputs = solutions + left_out[0], outputs + left_out[1]
            _lead_elsewhere(notebook, {path.name for path in notebooks})
            text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
            (unfinished / path.name).write_text(text, encoding="utf-8")
        for path in source.iterdir():
            if path.suffix in (".md", ".png"):
                shutil.copyfile(path, unfinished / path.name)
    return f"{folder}: {len(notebooks)} notebooks, without {solutions} solutions and {outputs} outputs to predict."


def read_notebook(path: Path) -> dict[str, Any]:
    """Read a notebook of version 4; raises ValueError for anything else."""
    notebook = read_json(path, MAX_BYTES)
    if not isinstance(notebook.get("cells"), list):
        raise ValueError(f"{path} is no notebook of version 4: it has no list of cells.")
    return notebook


def tags_of(cell: dict[str, Any]) -> list[str]:
    """Return a cell's tags."""
    return cell.get("metadata", {}).get("tags", [])


def text_of(cell: dict[str, Any]) -> str:
    """Return a cell's source, which stands as one text or in lines."""
    return "".join(cell.get("source", ""))


def _without_answers(notebook: dict[str, Any]) -> tuple[int, int]:
    """Take the solutions and the outputs that are to be predicted out of a notebook; return how many of each."""
    predicted = [cell for cell in notebook["cells"] if "predict" in tags_of(cell)]
    count = sum(bool(cell.get("outputs")) for cell in predicted)
    for cell in predicted:
        cell["outputs"] = []
    kept = [cell for cell in notebook["cells"] if "solution" not in tags_of(cell)]
    solutions = len(notebook["cells"]) - len(kept)
    notebook["cells"] = kept
    return solutions, count


def _lead_elsewhere(notebook: dict[str, Any], here: set[str]) -> None:
    """Take out the badges, and let links to notebooks that are not handed out lead to the published ones."""
    texts = [cell for cell in notebook["cells"] if cell.get("cell_type") == "markdown"]
    pages = _PAGES.search(text_of(texts[0])) if texts else None
    for cell in texts:
        text = _BADGES.sub("", text_of(cell))
        if pages:
            text = _LINK.sub(lambda link: link[0] if link[1] in here else f"]({pages[0]}{link[1]}", text)
        if text != text_of(cell):
            cell["source"] = text.splitlines(keepends=True)
