"""Where this package caches; files and folders that appear whole or not at all; JSON of others; a lock on a folder."""

import contextlib
import json
import os
import shutil
import socket
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock


def setting(name: str) -> str:
    """Return `$JAXMEM_name`, or `$LLAMEM_name` as it was called before; "" where neither is set."""
    return os.environ.get(f"JAXMEM_{name}") or os.environ.get(f"LLAMEM_{name}") or ""


def cache_folder(kind: str) -> Path:
    """Return where things of one kind are cached: `$JAXMEM_CACHE`, or `llamem` in `$XDG_CACHE_HOME` or `~/.cache`."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llamem"
    return Path(setting("CACHE") or default).expanduser() / kind


def user_path(path: str | os.PathLike) -> Path:
    """Return the path that a user gave, with `~` as the home folder."""
    return Path(path).expanduser()


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file beside its place, then rename it: whoever reads meets all of it, or what stood there before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unused_name(file)
    try:
        with unfinished.open("xb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write into, and name it when all is on disk; after an error nothing of it is left.

    An empty folder of that name is replaced. Raise FileExistsError where one with something in it is there.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty: nothing was written. Choose another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unused_name(folder)
    unfinished.mkdir()
    try:
        yield unfinished
        for file in filter(Path.is_file, unfinished.rglob("*")):
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        if folder.exists():  # and is empty: only some systems rename onto it
            folder.rmdir()
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _unused_name(place: Path) -> Path:
    """Return a name beside `place`. Python's own temporary files are for their owner alone."""
    return place.with_name(f".{place.name}-{uuid.uuid4().hex}")


def read_json(file: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file that someone else wrote.

    Raises ValueError, with the file's name, for one that is longer than `max_bytes` (before it is read) or that does
    not hold a JSON object.
    """
    size = file.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{file} has {size:,} bytes: expected a JSON file of at most {max_bytes:,}.")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} holds no JSON object: {error}. Write or download it again.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object, but {type(value).__name__} {str(value)[:60]!r}.")
    return value


@contextlib.contextmanager
def locked(file: Path, why: str) -> Iterator[None]:
    """Hold `file` for this process alone; the system gives it up with the process, however that ends.

    A file beside it names the holder. Raise BlockingIOError, which says who holds it and `why` that matters. Some
    network file systems have no locks: there a warning says so, and a second process is not kept out.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock, holder = filelock.FileLock(file), file.with_name(f"{file.name}.holder")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        name = ""
        with contextlib.suppress(FileNotFoundError):  # just given up
            name = holder.read_text(encoding="utf-8")
        raise BlockingIOError(
            f"{file.parent} is in use by {name or 'another process'}. {why} Wait for it, or choose another folder."
        ) from None
    except (IsADirectoryError, PermissionError):
        raise  # locks there are; this place is taken, or not ours
    except (OSError, NotImplementedError) as error:
        warnings.warn(
            f"the file system of {file.parent} has no locks ({error}): see to it that no other process uses this "
            f"folder. {why}",
            stacklevel=4,
        )
    # The locked file stays: were it removed, another process could hold the removed one and a third a new one.
    try:
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()
