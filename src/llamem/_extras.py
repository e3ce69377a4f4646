"""Packages that only some of this one needs."""

import importlib
from typing import Any


def import_extra(name: str, purpose: str) -> Any:
    """Return a module of the extra `train`, or raise an ImportError that says what needs it and how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f'{purpose} needs the package {name!r}: `pip install "llamem[train]"`.') from None
