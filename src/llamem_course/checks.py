"""What a notebook's text claims: asserted with the parameters it was written for, told as found with others."""

import os
from typing import Any

import jax

_written_for: dict[str, Any] = {}  # of the notebook that runs: its parameters, as they are stored


def written_for(parameters: dict[str, Any]) -> None:
    """Note with which parameters the text of this notebook was written."""
    _written_for.clear()
    _written_for.update(parameters)


def claim(holds: Any, sentence: str) -> None:
    """Check a sentence of the text: a clause that can follow "it holds that".

    Where it does not hold, print so, and the notebook runs on: another chip, size, version or compiler may differ. The
    course's own tests set `LLAMEM_CLAIMS=raise`: there, on a CPU and with the parameters as they are stored, raise
    AssertionError.
    """
    if holds:
        return
    if os.environ.get("LLAMEM_CLAIMS") == "raise" and _runs_as_written():
        raise AssertionError(f"The text says that {sentence}. In this run it is not so.")
    print(f"Here it is otherwise than in the text: it does not hold that {sentence}.")


def _runs_as_written() -> bool:
    from IPython import get_ipython

    shell = get_ipython()
    given = shell.user_ns if shell else {}
    return jax.default_backend() == "cpu" and all(given.get(name) == value for name, value in _written_for.items())
