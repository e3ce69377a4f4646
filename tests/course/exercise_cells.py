"""The exercises of notebooks as they stand in their cells: read, and not run."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent.parent / "notebooks").glob("*.ipynb"))
SOLUTION = re.compile(r"<details>\s*<summary>Solution</summary>\n\n```python\n(.*?)```\n[^`<]*</details>", re.DOTALL)


def exercises_of(path: Path) -> list[SimpleNamespace]:
    """The stub, its name, the line that checks it and the folded solution of each exercise of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    (topic,) = set(re.findall(r"from llamem_course\.exercises import (\w+) as exercises", "\n".join(texts))) or {None}
    found = []
    for i, cell in enumerate(cells):
        if "exercise" not in cell["metadata"].get("tags", []):
            continue
        stub, _, check = texts[i].rstrip().rpartition("\n")
        call = re.fullmatch(r"exercises\.(check_\w+)\((\w+)\)", check)
        assert call, f"{path.name}: the last line of an exercise is {check!r}, not exercises.check_NAME(FUNCTION)"
        assert "raise NotImplementedError" in stub, f"{path.name}: {call[2]} is no stub"
        solution = SOLUTION.search(texts[i + 1])
        assert solution, f"{path.name}: the cell after {call[2]} holds no folded solution"
        found.append(SimpleNamespace(topic=topic, stub=stub, name=call[2], check=check, solution=solution[1]))
    return found
