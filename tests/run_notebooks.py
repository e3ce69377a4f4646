"""Run notebooks from a fresh kernel and store their outputs: `python tests/run_notebooks.py [NUMBER or PAGE ...]`.

Without one all of them, those of docs/ as well. A notebook that fails keeps its stored outputs; what it got to lies in
build/ for a look. What the chips' compilers answered is stored with the course (`llamem_course.recording`).

`--keys`, with another version of JAX: the notebooks stay as they are, and by what their questions are known at that
version is added to the stored answers. No compiler is asked (`tests/answer_keys.sh`).
"""

import ast
import importlib.util
import os
import re
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from llamem_course.recording import add_keys, pack
from llamem_course.stored_answers import FOLDER

ROOT = Path(__file__).resolve().parent.parent
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# What editors and runners leave behind: differences without a meaning, and on GitHub "Invalid Notebook" for widgets.
NOISE = {"papermill", "widgets", "execution", "colab", "vscode", "ExecuteTime", "toc", "accelerator", "gpuClass"}
# What the C++ under JAX says about accelerators that are not there, before Python can ask it not to.
LOG_LINE = re.compile(r"^(WARNING: All log messages before absl::InitializeLog|I\d{4} ).*\n?", re.MULTILINE)


def clean(notebook: Any) -> Any:
    """The notebook without what differs from run to run or does not display, in place."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        for name in NOISE & set(cell.metadata):
            del cell.metadata[name]
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]
        if cell.cell_type == "code":
            for output in cell.outputs:
                if output.get("name") == "stderr":
                    output.text = LOG_LINE.sub("", output.text)
            shown = [o for o in cell.outputs if WIDGET_VIEW not in o.get("data", {}) and o.get("text") != ""]
            cell.outputs = shown
    return notebook


def run(path: Path, keys_only: bool) -> str:
    """Run one notebook and store it, or by what its questions are known; a line on how it went."""
    notebook: Any = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        coalesce_streams=True,
        store_widget_state=False,
        record_timing=False,
        allow_errors=keys_only,  # what a notebook claims is not asked of this version
    )
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            recorded, stored = Path(folder, "asked.jsonl"), FOLDER / f"{path.stem}.json.xz"
            os.environ["LLAMEM_RECORD_ANSWERS"] = str(recorded)
            client.execute()
            if keys_only:
                return f"{stored.name}: {add_keys(recorded, stored)}, {time.monotonic() - start:.0f} s"
            if path.parent.name == "notebooks":
                print(f"{stored.name}: {pack(recorded, stored, parameters_of(notebook))}")
    except CellExecutionError as error:
        (ROOT / "build").mkdir(exist_ok=True)
        nbformat.write(notebook, ROOT / "build" / path.name)
        raise RuntimeError(f"{path.name} failed and was not stored; see build/{path.name}.\n{error}") from None
    seconds = time.monotonic() - start
    unfinished = path.with_name(f".{path.name}.unfinished")
    nbformat.write(clean(notebook), unfinished)
    os.replace(unfinished, path)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (2**20 if sys.platform == "linux" else 2**30)
    return f"{path.name}: {seconds:.0f} s, peak {peak:.1f} GiB, {path.stat().st_size / 2**20:.2f} MiB"


def parameters_of(notebook: Any) -> dict[str, Any]:
    """The parameters of a notebook, by name: what its cell tagged `parameters` assigns."""
    cells = [cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assignments = [line for cell in cells for line in ast.parse(cell).body if isinstance(line, ast.Assign)]
    return {ast.unparse(line.targets[0]): ast.literal_eval(line.value) for line in assignments}


def names(path: Path) -> set[str]:
    """What a notebook is chosen by: its number, or the name of a page."""
    return {path.name[:2], path.stem}


def main(numbers: list[str]) -> int:
    """Run the chosen notebooks one after the other; the exit status says whether all went well."""
    keys_only = "--keys" in numbers
    numbers = [number for number in numbers if number != "--keys"]
    paths = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    if not keys_only:
        paths += sorted((ROOT / "docs").glob("*.ipynb"))
    unknown = [number for number in numbers if not any(number in names(path) for path in paths)]
    if unknown:
        print(f"There is no notebook {unknown[0]!r}. There are: {', '.join(path.name for path in paths)}.")
        return 2
    os.environ.setdefault("LLAMEM_CLAIMS", "raise")
    os.environ["JAX_PLATFORMS"] = "cpu"  # what is stored is what every reader can reproduce
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # where others work on this machine, XLA says that it takes long
    failed = False
    # One process for each notebook, so that its children's peak memory is that notebook's own.
    with ProcessPoolExecutor(max_workers=1, max_tasks_per_child=1) as pool:
        for path in paths:
            if numbers and not names(path) & set(numbers):
                continue
            if path.stem == "pytorch" and importlib.util.find_spec("torchax") is None:
                print(f"{path.name}: kept as it is, without torchax, which `make parity` installs", flush=True)
                continue
            try:
                print(pool.submit(run, path, keys_only).result(), flush=True)
            except RuntimeError as error:
                failed = True
                print(error, flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
