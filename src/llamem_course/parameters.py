"""What a notebook does with its parameters first: rules and names of chips are checked."""

from typing import Any

from jaxmem.chips.names import chip_called


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
