"""Checks of arguments, each with one wording: the value, what was expected, what to do. Packages that some need."""

import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def replaced(instance: T, changes: Mapping[str, Any]) -> T:
    """Return a copy of a frozen dataclass with other fields. Raise TypeError, with those it has, for one it has not."""
    known = [field.name for field in dataclasses.fields(instance)]  # pyrefly: ignore[bad-argument-type]
    if unknown := [name for name in changes if name not in known]:
        kind = type(instance).__name__
        raise TypeError(f"{kind} has no field {', '.join(map(repr, unknown))}. Its fields are {', '.join(known)}.")
    return dataclasses.replace(instance, **changes)  # pyrefly: ignore[bad-specialization]


def check_whole(name: str, value: Any, *, at_least: int = 1) -> int:
    """Return `value` as an int. Raise ValueError unless it is a whole number of at least `at_least`; no bool is."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < at_least:
        raise ValueError(f"{name}={show(value)}: expected a whole number of at least {at_least}.")
    return int(value)


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return `value` as a float. Raise ValueError unless it is a finite number within these bounds."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not (at_least <= value <= at_most and above < value < below):
        bounds = {"of at least": at_least, "above": above, "at most": at_most, "below": below}
        phrase = " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound))
        raise ValueError(f"{name}={show(value)}: expected a finite number{phrase and ' '}{phrase}.")
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


def import_extra(name: str, purpose: str) -> Any:
    """Return a module of the extra `train`, or raise an ImportError that says what needs it and how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f'{purpose} needs the package {name!r}: `pip install "llamem[train]"`.') from None
