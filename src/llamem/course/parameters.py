"""What a notebook does with its parameters first: lists given as text are read, names of chips are checked."""

import ast
from typing import Any

from llamem.memory.chip_names import chip_called


def as_list(value: Any) -> list[Any]:
    """Return the value of a list parameter as a list.

    papermill hands `-p chips '["t4", "l4"]'` over as text, which is read here; `t4, l4` and `[t4, l4]` are read alike.
    One value alone is a list of one.
    """
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (SyntaxError, ValueError):  # names without quotation marks
            value = [name.strip() for name in value.strip("[]() ").split(",") if name.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def check_chips(**names: Any) -> None:
    """Raise ValueError, with the parameter and the names there are, for a chip that nobody knows.

    Each argument is one name of a chip or a list of them, under the name of its parameter. Whether a compiler for the
    chip is installed does not matter here.
    """
    for parameter, value in names.items():
        for name in value if isinstance(value, list) else [value]:
            try:
                chip_called(name)
            except ValueError as unknown:
                raise ValueError(f"{parameter}: {unknown}") from None
