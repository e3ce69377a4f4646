"""A reader's function in a Python that was never asked anything: what a run that goes on after a restart sees.

The check of notebook 07's second exercise freezes the function before it calls it. This file is then run as a program,
with nothing of this process but the frozen function, and another salt of Python's hashes.
"""

import functools
import importlib
import inspect
import marshal
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

Frozen = tuple[str, Any]


def freeze(fn: Callable[..., Any]) -> bytes:
    """Return a function with what it reads, by value: functions and names beside it, arguments bound to it.

    Decorators that remember or compile, such as `functools.cache`, are left out. Raise TypeError for what cannot
    be written down, such as an object of a class that stands in a notebook.
    """
    names: dict[str, Frozen] = {}
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    beside = getattr(inspect.unwrap(inner), "__globals__", {})
    try:
        frozen = _frozen(fn, beside, names)
        return pickle.dumps((frozen, names))
    except (AttributeError, pickle.PicklingError, RecursionError, TypeError, ValueError) as error:
        raise TypeError(f"{fn!r} cannot be written down for another Python: {error}") from error


def ask_afresh(frozen: bytes, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return a frozen function's answers to calls, in their order, from a new Python.

    Raise RuntimeError with the last line of its error where it ends in one.
    """
    environment = os.environ | {"PYTHONHASHSEED": "4711", "JAX_PLATFORMS": "cpu"}
    question = pickle.dumps((sys.path, frozen, list(calls)))
    child = subprocess.run([sys.executable, __file__], input=question, capture_output=True, env=environment)
    if child.returncode:
        raise RuntimeError(child.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    return pickle.loads(child.stdout)


def _frozen(value: Any, beside: dict[str, Any], names: dict[str, Frozen]) -> Frozen:
    """Write a value down. Functions that have the globals `beside` are written with their code, others by name."""
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return "partial", [_frozen(part, beside, names) for part in parts]
    fn = inspect.unwrap(value) if callable(value) else value
    if not (isinstance(fn, types.FunctionType) and fn.__globals__ is beside):
        return "pickled", pickle.dumps(value)
    for name in _names_in(fn.__code__):
        if name in beside and name not in names:
            names[name] = ("pickled", pickle.dumps(None))  # a function may call itself
            names[name] = _frozen(beside[name], beside, names)
    cells = [_frozen(cell.cell_contents, beside, names) for cell in fn.__closure__ or ()]
    return "function", (marshal.dumps(fn.__code__), fn.__defaults__, fn.__kwdefaults__, cells)


def _names_in(code: types.CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _thawed(frozen: Frozen, names: dict[str, Any]) -> Any:
    kind, content = frozen
    if kind == "module":
        return importlib.import_module(content)
    if kind == "partial":
        fn, args, keywords = (_thawed(part, names) for part in content)
        return functools.partial(fn, *args, **keywords)
    if kind == "pickled":
        return pickle.loads(content)
    code, defaults, keywords, cells = content
    closure = tuple(types.CellType(_thawed(cell, names)) for cell in cells)
    made = types.FunctionType(marshal.loads(code), names, None, defaults, closure)
    made.__kwdefaults__ = keywords
    return made


def _answer() -> None:
    """Read a function and calls of it, print its answers as bytes."""
    sys.path[:], frozen, calls = pickle.loads(sys.stdin.buffer.read())
    out, sys.stdout = sys.stdout.buffer, sys.stderr  # what the function itself prints is no answer
    fn, frozen_names = pickle.loads(frozen)
    names: dict[str, Any] = {"__builtins__": __builtins__}
    names |= {name: _thawed(one, names) for name, one in frozen_names.items()}
    asked = _thawed(fn, names)
    out.write(pickle.dumps([asked(*call) for call in calls]))


if __name__ == "__main__":
    _answer()
