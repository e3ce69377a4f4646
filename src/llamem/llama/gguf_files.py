"""GGUF files, llama.cpp's format: fields and tensors by name, read through the `gguf` package without trust."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar, no_type_check

import numpy as np

from llamem._checks import show
from llamem._extras import import_extra

_MISSING: Any = object()
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Gguf:
    """One file: its fields, each asked for by its type, and its tensors `gguf.ReaderTensor` by name."""

    file: Path
    fields: dict[str, Any]
    tensors: dict[str, Any]

    def text(self, name: str, default: Any = _MISSING) -> Any:
        """Return a field that is a text."""
        return self._field(name, default, str, "a text")

    def whole(self, name: str, default: Any = _MISSING) -> Any:
        """Return a field that is a whole number, not negative."""
        return self._field(name, default, int, "a whole number")

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """Return a field that is a number."""
        return self._field(name, default, float, "a number")

    def texts(self, name: str) -> list[str]:
        """Return a field that is a list of texts."""
        return self._list(name, str)

    def wholes(self, name: str) -> list[int]:
        """Return a field that is a list of whole numbers."""
        return self._list(name, int)

    def _list(self, name: str, kind: type[T]) -> list[T]:
        values = self._field(name, _MISSING, list, "a list")
        if not all(type(value) is kind for value in values):
            raise ValueError(f"{name} in {self.file} is no list of {kind.__name__}: the file is damaged.")
        return values

    def _field(self, name: str, default: Any, kind: type, expected: str) -> Any:
        field = self.fields.get(name)
        if field is None:
            if default is _MISSING:
                raise ValueError(f"{self.file} has no field {name}, which this model needs. Download it again.")
            return default
        try:
            value = field.contents()
        except Exception as error:
            raise ValueError(f"{name} in {self.file} cannot be read ({error}): the file is damaged.") from None
        if type(value) is not kind or (kind is int and value < 0) or (kind is float and not np.isfinite(value)):
            raise ValueError(f"{name}={show(value)} in {self.file}: expected {expected}.")
        return value


def open_gguf(file: Path) -> Gguf:
    """Read where everything is; tensors stay in the file until they are asked for.

    Raise FileNotFoundError, and ValueError for a file that is cut off, damaged or of another format.
    """
    gguf = import_extra("gguf", "a GGUF file")
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {str(file)!r}.")
    with file.open("rb") as opened:
        magic = opened.read(4)
    if magic != b"GGUF":
        raise ValueError(
            f"{file} is no GGUF file: it begins with {magic!r}, not b'GGUF'. A Git LFS pointer must be downloaded "
            "first."
        )

    class Reader(gguf.GGUFReader):
        # The package reads nothing beyond the file's end without a word, as often as a damaged length says.
        @no_type_check  # called for each of some hundred thousand tokens
        def _get(self, offset: Any, dtype: Any, count: Any = 1, *args: Any, **kwargs: Any) -> Any:
            if offset < 0 or offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"something should lie at byte {offset:,}, and the file has {len(self.data):,} bytes")
            return super()._get(offset, dtype, count, *args, **kwargs)

    try:
        reader = Reader(file)
    except Exception as error:  # damaged bytes raise whatever they hit
        raise ValueError(
            f"{file} is no complete GGUF file: {type(error).__name__}: {str(error)[:200]}. It is cut off, damaged or "
            "of a newer version of the format. Download it again."
        ) from None
    return Gguf(file, dict(reader.fields), {tensor.name: tensor for tensor in reader.tensors})
