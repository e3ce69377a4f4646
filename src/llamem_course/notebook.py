"""What a notebook of the course does first: see to it that chips which are not there can be asked."""

import os
from pathlib import Path
from typing import Any

from jaxmem.answers import answer_from
from jaxmem.chips.compilers import fetch_compilers, find_compilers
from llamem_course import checks
from llamem_course.stored_answers import FOLDER, StoredAnswers

_HOSTED = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")  # what Colab and Kaggle set in every runtime


def begin(name: str) -> None:
    """Prepare the kernel for one notebook of the course, such as "00_where_the_memory_goes".

    On Colab and Kaggle the chips' compilers are fetched where they are missing (`jaxmem.fetch_compilers`); nowhere else
    is anything downloaded. Where there are none, the answers that are stored with the course are shown, and each cell
    that shows one says so.
    """
    file = FOLDER / f"{name}.json.xz"
    if into := os.environ.get("LLAMEM_RECORD_ANSWERS"):
        from llamem_course.recording import Recorder

        stored = Recorder(file, Path(into))
        _after_each_cell(stored.note_looks)
    else:
        stored = StoredAnswers(file)
    checks.written_for(stored.parameters)
    answer_from(stored if stored.are_there or into else None)
    if find_compilers("tpu") and find_compilers("cuda"):
        return
    if any(variable in os.environ for variable in _HOSTED):
        try:
            fetch_compilers("all")
            return
        except (OSError, RuntimeError) as error:
            print(f"{error} The answers stored with this notebook are shown instead.")

    def say(_: Any = None) -> None:
        """Print whose answers a cell was given, and of which day."""
        if said := stored.taken():
            print(said)

    _after_each_cell(say)


def _after_each_cell(function: Any) -> None:
    try:
        from IPython import get_ipython
    except ImportError:
        return
    if shell := get_ipython():
        shell.events.register("post_run_cell", function)
