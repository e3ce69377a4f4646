"""Answers of compilers, kept on disk."""

import contextlib
import functools
import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmem.dump import needed_bytes
from jaxmem.files import cache_folder, write_whole


def cached(program: str, compile_it: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer kept for a program, or else that of `compile_it`, kept from now on.

    `program` names all that an answer depends on. An answer that other code of this package read is no answer of this.
    Of errors only the refusal of a program as too big is kept. Where the cache cannot be read or written, it compiles,
    and a warning says so once.
    """
    key = hashlib.sha256(f"{_reading_code()} {program}".encode()).hexdigest()
    file = cache_folder("reports") / f"{key[:32]}.json"
    with contextlib.suppress(OSError, ValueError):  # never compiled, not to be read
        return json.loads(file.read_text())
    answer = compile_it()
    if "error" not in answer or needed_bytes(answer["error"]) is not None:  # others may not be there next time
        try:
            write_whole(file, json.dumps(answer))
        except OSError as error:
            _warn_once(str(file.parent), str(error))
    return answer


# What only says where answers come from, and where they go.
_READS_NOTHING = ("checks", "command", "compilers", "files", "fitting", "printing", "stored_answers")


@functools.cache
def _reading_code() -> str:
    texts = [
        file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")) if file.stem not in _READS_NOTHING
    ]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


@functools.cache
def _warn_once(folder: str, reason: str) -> None:
    warnings.warn(
        f"reports cannot be kept in {folder} ({reason}): each one is compiled anew, every time. Set LLAMEM_CACHE to a "
        "folder that can be written.",
        stacklevel=4,
    )
