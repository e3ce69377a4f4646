"""What a notebook's text claims: asserted with the parameters it was written for, told as found with others."""

import ast
import json
from collections.abc import Callable
from typing import Any


def as_list(value: Any) -> list[Any]:
    """Return a list from a list, or from its text, in JSON or Python, as papermill's command line hands it over.

    Raise ValueError for what is neither.
    """
    found = value
    if isinstance(value, str):
        for read in (json.loads, ast.literal_eval):
            try:
                found = read(value)
                break
            except (ValueError, SyntaxError):
                continue
    if not isinstance(found, list | tuple):
        raise ValueError(f"{value!r} is no list: expected one such as [1024, 2048], or its text, '[1024, 2048]'.")
    return list(found)


def claims(as_written: bool) -> Callable[[bool, str], None]:
    """Return `claim(holds, sentence)`, which checks a sentence of the text: a clause that can follow "it holds that".

    `as_written` says whether the notebook runs with its own parameters, `(tokens, chip) == (8192, "v5e-1")`. Then a
    sentence that does not hold raises AssertionError. With other parameters it is printed that it does not hold here,
    and the notebook runs on.
    """

    def claim(holds: bool, sentence: str) -> None:
        if not holds and as_written:
            raise AssertionError(f"the text says that {sentence}, and it is not so")
        if not holds:
            print(f"With these parameters it is otherwise: it does not hold that {sentence}.")

    return claim
