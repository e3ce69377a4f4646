"""What a notebook of the course does first: see to it that chips which are not there can be asked."""

import os
from pathlib import Path
from typing import Any

from jaxmem import stored_answers
from jaxmem.chips.compilers import fetch_compilers, find_compilers
from llamem_course import checks

_ANSWERS = Path(__file__).parent / "answers"
_HOSTED = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")  # what Colab and Kaggle set in every runtime


def begin(name: str) -> None:
    """Prepare the kernel for one notebook of the course, such as "00_where_the_memory_goes".

    On Colab and Kaggle the chips' compilers are fetched where they are missing (`jaxmem.fetch_compilers`); nowhere else
    is anything downloaded. Where there are none, the answers that are stored with the course are shown, and each cell
    that shows one says so.
    """
    checks.written_for(stored_answers.use(_ANSWERS / f"{name}.json.xz"))
    if find_compilers("tpu") and find_compilers("cuda"):
        return
    if any(variable in os.environ for variable in _HOSTED):
        try:
            fetch_compilers("all")
            return
        except (OSError, RuntimeError) as error:
            print(f"{error} The answers stored with this notebook are shown instead.")
    _say_after_cells()


def _say_after_cells() -> None:
    """After each cell that was given a stored answer, print whose and of which day it is."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    if shell := get_ipython():
        shell.events.register("post_run_cell", _say)


def _say(_: Any = None) -> None:
    if said := stored_answers.taken():
        print(said)
