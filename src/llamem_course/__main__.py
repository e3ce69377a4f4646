"""`python -m llamem_course --hand-out FOLDER`: the course's notebooks for a class, without what they give away."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmem.common.files import read_json, whole_folder

_MAX_BYTES = 50_000_000  # of one notebook, outputs and figures included


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder that is asked for; return 0, or 2 where it cannot be written, with a sentence that says why."""
    parser = argparse.ArgumentParser(
        prog="python -m llamem_course",
        description="Writes the notebooks of the course for a class: without cells tagged `solution`, and without the "
        "outputs of cells tagged `predict`, whose question a reader answers first. All else is as it is stored.",
    )
    add = parser.add_argument
    add("--hand-out", type=Path, required=True, metavar="FOLDER", help="a new folder, or an empty one")
    add("--from", dest="source", type=Path, default=Path("notebooks"), help="where they are stored; default notebooks")
    given = parser.parse_args(arguments)
    try:
        told = hand_out(given.source, given.hand_out)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(told)
    return 0


def hand_out(source: Path, folder: Path) -> str:
    """Write the notebooks of `source` to a new `folder`, pages and pictures that they show beside them.

    Return how many there are, and what was left out. Raises FileNotFoundError for a source without notebooks,
    FileExistsError for a folder with something in it, ValueError for a file that is no notebook: then nothing is there.
    """
    notebooks = sorted(source.glob("*.ipynb"))
    if not notebooks:
        raise FileNotFoundError(f"{source} holds no notebooks (*.ipynb). Name the folder that does: --from notebooks.")
    solutions, outputs = 0, 0
    with whole_folder(folder) as unfinished:
        for path in notebooks:
            notebook = read_json(path, _MAX_BYTES)
            left_out = _without_answers(notebook, path)
            solutions, outputs = solutions + left_out[0], outputs + left_out[1]
            text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
            (unfinished / path.name).write_text(text, encoding="utf-8")
        for path in source.iterdir():
            if path.suffix in (".md", ".png"):
                shutil.copyfile(path, unfinished / path.name)
    return f"{folder}: {len(notebooks)} notebooks, without {solutions} solutions and {outputs} outputs to predict."


def _without_answers(notebook: dict[str, Any], path: Path) -> tuple[int, int]:
    """Take the solutions and the outputs that are to be predicted out of a notebook; return how many of each."""
    if not isinstance(notebook.get("cells"), list):
        raise ValueError(f"{path} is no notebook of version 4: it has no list of cells.")
    tags = [cell.get("metadata", {}).get("tags", []) for cell in notebook["cells"]]
    predicted = [cell for cell, own in zip(notebook["cells"], tags, strict=True) if "predict" in own]
    count = sum(bool(cell.get("outputs")) for cell in predicted)
    for cell in predicted:
        cell["outputs"] = []
    notebook["cells"] = [cell for cell, own in zip(notebook["cells"], tags, strict=True) if "solution" not in own]
    return len(tags) - len(notebook["cells"]), count


if __name__ == "__main__":
    sys.exit(main())
