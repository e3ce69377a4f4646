"""Checks of arguments, each with one wording: the value, what was expected, and what to do."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def check_whole(name: str, value: Any, *, at_least: int = 1) -> int:
    """Return `value` as an int. Raise ValueError unless it is a whole number of at least `at_least`; no bool is."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < at_least:
        raise ValueError(f"{name}={show(value)}: expected a whole number of at least {at_least}.")
    return int(value)


def check_number(name: str, value: Any, *, at_least: float = -math.inf, above: float = -math.inf) -> float:
    """Return `value` as a float. Raise ValueError unless it is finite, at least `at_least` and more than `above`."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < at_least or value <= above:
        bound = (
            f" of at least {at_least:g}" if at_least > -math.inf else f" above {above:g}" if above > -math.inf else ""
        )
        raise ValueError(f"{name}={show(value)}: expected a finite number{bound}.")
    return float(value)


def check_one_of(name: str, value: T, choices: Sequence[T]) -> T:
    """Return `value`. Raise ValueError, with all choices, unless it is one of them."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise ValueError(f"{name}={show(value)}: expected one of {', '.join(map(repr, choices))}.")
    return value


def show(value: Any) -> str:
    """Return `repr(value)`, cut to 60 characters, or the type where it has no repr."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def few(names: Sequence[str]) -> str:
    """Return the first four of some names, and how many more there are."""
    return ", ".join(name[:80] for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
