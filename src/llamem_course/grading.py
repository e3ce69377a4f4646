"""Which exercises of a class are right: the answers of notebooks that came back, with the course's own checks."""

import ast
import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llamem_course.hand_out import read_notebook, tags_of, text_of

_TOPIC = re.compile(r"from llamem_course\.exercises import (\w+) as exercises")
_CHECK = re.compile(r"exercises\.(check_\w+)\((\w+)\)\s*$")


class Row(NamedTuple):
    """What became of one exercise: "correct", "not yet", "not tried", "missing", "broken"; or "unknown", a notebook."""

    file: str
    exercise: str
    function: str
    result: str
    told: str


def grade(folder: Path, source: Path, seconds: float = 600) -> Iterator[Row]:
    """Yield a row for each exercise of each notebook under `folder`.

    A notebook that came back is known by the name of the course's own, which its name ends with, such as
    `ann/03_scan_vs_unrolled.ipynb` or `ann_03_scan_vs_unrolled.ipynb`. The course's own lie in `source`. Of a notebook
    only the answers are run, with what they need: imports, functions and constants that stand beside them; those of a
    notebook in a process of its own, for at most `seconds`.

    Raises FileNotFoundError where one of the folders holds no notebooks.
    """
    ours, theirs = sorted(source.glob("*.ipynb")), sorted(folder.rglob("*.ipynb"))
    theirs = [path for path in theirs if ".ipynb_checkpoints" not in path.parts]
    for place, found in ((source, ours), (folder, theirs)):
        if not found:
            raise FileNotFoundError(f"{place} holds no notebooks (*.ipynb).")
    for path in theirs:
        original = next((one for one in ours if path.name.endswith(one.name)), None)
        file = str(path.relative_to(folder))
        if original is None:
            yield Row(file, "", "", "unknown", "Its name does not end as that of a notebook of the course.")
        else:
            yield from _rows(path, file, original, seconds)


def _rows(path: Path, file: str, original: Path, seconds: float) -> Iterator[Row]:
    """Yield the rows of one notebook that came back."""
    asked = read_notebook(original)["cells"]
    (topic,) = set(_TOPIC.findall("\n".join(map(text_of, asked)))) or {None}
    checks = [_CHECK.search(text_of(cell)) for cell in asked if "exercise" in tags_of(cell)]
    cells, unread = [], ""
    try:
        cells = [cell for cell in read_notebook(path)["cells"] if cell.get("cell_type") == "code"]
    except (OSError, ValueError) as error:
        unread = str(error)
    answers = [(check[1], check[2], *_answer(cells, check[2])) for check in checks if check]
    to_run = [(check, name, code) for check, name, code, _ in answers if code]
    found = _ask(f"llamem_course.exercises.{topic}", to_run, seconds)
    for number, (_, function, answer, why) in enumerate(answers, 1):
        if answer:
            result, told = next(found)
        elif unread or why:
            result, told = "broken", unread or why
        else:
            result, told = "missing", f"No cell defines {function}."
        if result != "correct" and _printed_correct(cells, number):
            told = f"Its stored output says correct. {told}"
        yield Row(file, str(number), function, result, told)


def _answer(cells: list[dict[str, Any]], function: str) -> tuple[str | None, str]:
    """Return the code to run for an answer, or None and, where a cell that names it cannot be read, why."""
    beside, own, why = [], None, ""
    for cell in cells:
        try:
            lines = ast.parse(text_of(cell)).body
        except SyntaxError as error:
            if function in text_of(cell):
                why = f"A cell that names {function} is no Python: {error.msg}, line {error.lineno}"
            continue
        for line in lines:
            if function in _defines(line):
                own = line
            elif _only_defines(line):
                beside.append(line)
    if why or own is None:
        return None, why
    return "\n".join([*map(_if_it_can, beside), ast.unparse(own)]), ""


def _if_it_can(line: ast.stmt) -> str:
    """Return code that runs a line, and goes on where that needs what only the whole notebook makes."""
    return f"try:\n{textwrap.indent(ast.unparse(line), '    ')}\nexcept Exception:\n    pass"


def _defines(line: ast.stmt) -> set[str]:
    if isinstance(line, ast.FunctionDef | ast.ClassDef):
        return {line.name}
    targets = line.targets if isinstance(line, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _only_defines(line: ast.stmt) -> bool:
    """Whether a line does nothing but make a name: an import, a function, a class, a number or a word."""
    if isinstance(line, ast.Import | ast.FunctionDef | ast.ClassDef):
        return True
    if isinstance(line, ast.ImportFrom):
        return not (line.module or "").startswith("llamem_course")  # whoever checks is not the student's to choose
    if not isinstance(line, ast.Assign):
        return False
    try:
        ast.literal_eval(line.value)
    except ValueError:
        return False
    return True


def _printed_correct(cells: list[dict[str, Any]], number: int) -> bool:
    texts = ["".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", [])]
    return any(f"Exercise {number}: correct" in text for text in texts)


def _ask(module: str, answers: list[tuple[str, str, str]], seconds: float) -> Iterator[tuple[str, str]]:
    """Check answers, each a check, a function's name and code, in another process; yield result and what is told."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "told.jsonl")
        command = [sys.executable, "-c", "from llamem_course.grading import answer_for; answer_for()"]
        here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        asked = json.dumps([module, answers, str(file)])
        try:
            done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=seconds, env=here)
            why = (done.stderr.strip().splitlines() or ["Its process ended."])[-1]
        except subprocess.TimeoutExpired:
            why = f"It was still running after {seconds:.0f} seconds."
        told = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    yield from map(json.loads, told)
    for _ in answers[len(told) :]:
        yield "broken", why


def answer_for() -> None:
    """In the other process: run the answers, and write result and words of each to the file that is named."""
    module, answers, file = json.load(sys.stdin)
    checks = importlib.import_module(module)
    exercises = [getattr(checks, check) for check, _, _ in answers]  # before a line of the answers has run
    for exercise, (_, function, answer) in zip(exercises, answers, strict=True):
        told = _result(exercise, function, answer)
        with open(file, "a", encoding="utf-8") as results:
            results.write(json.dumps(told) + "\n")


def _result(exercise: Callable[[Any], None], function: str, answer: str) -> tuple[str, str]:
    names: dict[str, Any] = {}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec("import jax\nimport jax.numpy as jnp\nimport numpy as np\nimport jaxmem, llamem", names)
            exec(answer, names)
            exercise(names[function])
    except AssertionError as error:
        return "not yet", str(error).partition("not yet. ")[2]
    except Exception as error:
        return "broken", f"{type(error).__name__}: {error}"
    said = printed.getvalue().splitlines()[-1]  # the check's own word, whatever the answer printed before
    result, _, told = said.partition(": ")[2].partition(". ")
    return result.removesuffix(" yet."), told
