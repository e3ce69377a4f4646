"""Lines of a program that ask JAX which devices are here, while it is traced for a chip that is not."""

import contextlib
import functools
import os
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax

from llamem.memory.show import line_of_source

_QUESTIONS = ("devices", "local_devices", "default_backend")
# Their own questions are not about what to compute; the package's own are answered by `compiling_for`.
_ASK_RIGHTLY = tuple(f"{Path(file).parent}{os.sep}" for file in (jax.__file__, flax.__file__, __file__))


@contextlib.contextmanager
def noted_queries() -> Iterator[dict[str, str]]:
    """Within it, each call of `jax.devices`, `jax.local_devices` or `jax.default_backend` is noted in the dictionary.

    By line, `model.py:12`: the question, `jax.devices()`. A model that chooses its program by the answer is compiled as
    the program of this machine. What was traced before, and is in JAX's cache, does not ask again.
    """
    asked: dict[str, str] = {}
    before = {name: getattr(jax, name) for name in _QUESTIONS}

    def noting(name: str) -> Callable[..., Any]:
        @functools.wraps(before[name])
        @typing.no_type_check  # whoever checks types would stand between this and the line that asks
        def answer(*args: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            if not frame.f_code.co_filename.startswith(_ASK_RIGHTLY):
                asked[line_of_source(frame.f_code.co_filename, frame.f_lineno)] = f"jax.{name}()"
            return before[name](*args, **options)

        return answer

    for name in _QUESTIONS:
        setattr(jax, name, noting(name))
    try:
        yield asked
    finally:
        for name, question in before.items():
            setattr(jax, name, question)
