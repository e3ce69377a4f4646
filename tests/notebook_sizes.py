"""How long the notebooks are: `python tests/notebook_sizes.py [GIT REVISION]` prints a row for each, and the totals."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def row(notebook: dict[str, Any]) -> tuple[int, int, float]:
    """Cells, words of Markdown, lines of code in the median code cell (blank ones not counted)."""
    sources = {"markdown": [], "code": []}
    for cell in notebook["cells"]:
        sources[cell["cell_type"]].append("".join(cell["source"]))
    lines = [sum(bool(line.strip()) for line in source.splitlines()) for source in sources["code"]]
    return len(notebook["cells"]), sum(len(text.split()) for text in sources["markdown"]), statistics.median(lines)


def main(revision: str = "") -> None:
    print("| notebook | cells | words | median lines |\n|---|---|---|---|")
    rows = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        if revision:
            shown = ["git", "show", f"{revision}:notebooks/{path.name}"]
            text = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        rows.append(row(json.loads(text)))
        print(f"| {path.name[:2]} | {rows[-1][0]} | {rows[-1][1]:,} | {rows[-1][2]:g} |")
    print(f"| all | {sum(cells for cells, *_ in rows)} | {sum(words for _, words, _ in rows):,} | |")


if __name__ == "__main__":
    main(*sys.argv[1:])
