"""Answers of compilers, kept on disk."""

import contextlib
import functools
import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamem._files import cache_folder, write_whole
from llamem.memory.dump import needed_bytes


def cached(program: str, compile_it: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer kept for a program, or else that of `compile_it`, kept from now on.

    `program` names all that an answer depends on. An answer that other code of this package read is no answer of this.
    Of errors only the refusal of a program as too big is kept. Where the cache cannot be read or written, it compiles,
    and a warning says so once.
    """
    key = hashlib.sha256(f"{_reading_code()} {program}".encode()).hexdigest()
    file = cache_folder("reports") / f"{key[:32]}.json"
    with contextlib.suppress(OSError, ValueError):  # never compiled, not to be read
        checksum, _, kept = file.read_text().partition("\n")
        if checksum == _checksum(kept):  # else damaged, or cut short by a full disk
            return json.loads(kept)
    answer = compile_it()
    if "error" in answer and needed_bytes(answer["error"]) is None:  # such as a full disk: it may go well next time
        return answer
    try:
        kept = json.dumps(answer)
        write_whole(file, f"{_checksum(kept)}\n{kept}")
    except OSError as error:
        _warn_once(str(file.parent), str(error))
    return answer


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _reading_code() -> str:
    texts = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


@functools.cache
def _warn_once(folder: str, reason: str) -> None:
    warnings.warn(
        f"reports cannot be kept in {folder} ({reason}): each one is compiled anew, every time. Set LLAMEM_CACHE to a "
        "folder that can be written.",
        stacklevel=4,
    )
