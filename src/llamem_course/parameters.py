"""What a notebook does with its parameters first: lists given as text are read, names of chips are checked."""

import ast
from typing import Any

from jaxmem.chip_names import chip_called


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


def check_parameters(*rules: tuple[bool, str], **chips: Any) -> None:
    """Raise ValueError for a rule that is broken, with its sentence, and for a chip that nobody knows.

    A rule is whether it holds, and what to do where it does not: `(depth % 4 == 0, "depth: take 4, 8, 12 ...")`. Each
    keyword is a parameter that names one chip or a list of them. Whether a compiler for the chip is installed does not
    matter here.
    """
    for holds, sentence in rules:
        if not holds:
            raise ValueError(sentence)
    for parameter, value in chips.items():
        for name in value if isinstance(value, list) else [value]:
            try:
                chip_called(name)
            except ValueError as unknown:
                raise ValueError(f"{parameter}: {unknown}") from None
