"""Choose which cells of notebooks nbval compares with what is stored: `python tests/compare_cells.py FOLDER WHICH`.

A cell tagged `nbval-check-output` prints the same text on every machine under the locked versions. Under others
"compilers" compares those that only say what the chips' compilers answer, and lets those run that carry the tag
`locked-versions` too: their text depends on the JAX that traces. "nothing" lets all of them run.
"""

import json
import sys
from pathlib import Path

STRICT, LOCKED = "nbval-check-output", "locked-versions"


def main(folder: Path, which: str) -> None:
    """Rewrite the tags of every notebook in a folder."""
    if which not in ("compilers", "nothing"):
        raise SystemExit(f"{which!r}: expected 'compilers' or 'nothing'.")
    for path in sorted(folder.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            tags = cell["metadata"].get("tags", [])
            if STRICT in tags and (which == "nothing" or LOCKED in tags):
                tags.remove(STRICT)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
