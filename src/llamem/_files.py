"""Where this package caches, and files and folders that appear whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Where things of one kind are cached: under `$LLAMEM_CACHE`, or `llamem` in `$XDG_CACHE_HOME` or `~/.cache`."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llamem"
    return Path(os.environ.get("LLAMEM_CACHE") or default).expanduser() / kind


def write_whole(file: Path, content: str | bytes) -> None:
    """Writes a file beside its place, then renames it: whoever reads meets all of it, or what stood there before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    unfinished = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        umask = os.umask(0)
        os.umask(umask)
        unfinished.chmod(0o666 & ~umask)  # mkstemp's own mode is for the owner alone
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which is given its name at the end; after an error nothing of it is left.

    An empty folder of that name is replaced; OSError where one with something in it is there by then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield unfinished
        umask = os.umask(0)
        os.umask(umask)
        unfinished.chmod(0o777 & ~umask)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
