"""What an array in memory is for, and what the names of a program's arguments say of that."""

import re
from typing import Literal, get_args

Category = Literal[
    "weights",
    "optimizer",
    "batch",
    "gradients",
    "residuals",
    "logits",
    "rematerialised",
    "workspace",
    "output",
    "other",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

# Names of arguments that say what these are: the first of them in an argument's path decides.
_NAMES: dict[str, Category] = {
    "params": "weights",
    "weights": "weights",
    "model": "weights",
    "base": "weights",
    "opt_state": "optimizer",
    "optimizer": "optimizer",
    "batch": "batch",
    "tokens": "batch",
    "inputs": "batch",
    "images": "batch",
    "targets": "batch",
    "labels": "batch",
}


def named_category(name: str) -> Category:
    """Return what an argument is, by the first telling name in a path such as `state.params['norm']`, or "other"."""
    return next((_NAMES[part] for part in re.findall(r"\w+", name) if part in _NAMES), "other")
