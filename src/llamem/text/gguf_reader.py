"""GGUF files, llama.cpp's format: fields and tensors by name, read through the `gguf` package."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.common.checks import import_extra

_MISSING: Any = object()


@dataclasses.dataclass(frozen=True)
class Gguf:
    """One file: its fields `gguf.ReaderField` and its tensors `gguf.ReaderTensor` by name."""

    file: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def get(self, name: str, default: Any = _MISSING) -> Any:
        """Return what a field says. Raise ValueError for one that the file lacks, where there is no default."""
        if name in self.fields:
            return self.fields[name].contents()
        if default is _MISSING:
            raise ValueError(f"{self.file} has no field {name}, which this model needs. Download it again.")
        return default


def open_gguf(file: Path) -> Gguf:
    """Read where everything is; tensors stay in the file until they are asked for.

    Raise FileNotFoundError, and ValueError for a file that is cut off, damaged, of another format, or written for a
    machine with the other order of bytes.
    """
    gguf = import_extra("gguf", "a GGUF file")
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {str(file)!r}.")

    a_list = int(gguf.GGUFValueType.ARRAY)

    class Reader(gguf.GGUFReader):
        # The package counts on beyond the file's end, as far as a damaged length of a list says.
        def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
            left = len(self.data) - orig_offs
            if left < 1 or (raw_type == a_list and int(self._get(orig_offs + 4, np.uint64)[0]) > left):
                raise ValueError(f"at byte {orig_offs:,} more is to be read than the file has")
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        reader = Reader(file)
    except Exception as error:  # damaged bytes raise whatever they hit
        raise ValueError(
            f"{file} is no complete GGUF file: {type(error).__name__}: {str(error)[:200]}. It is cut off, damaged or "
            "of a newer version of the format; a Git LFS pointer must be downloaded first."
        ) from None
    if reader.byte_order == "S":
        # The package turns the fields' bytes round, and not the tensors'.
        raise ValueError(
            f"{file} is written in the other order of bytes than this machine's, big-endian for most: convert a copy "
            f"of it with the `gguf` package, `gguf-convert-endian {file.name} little`, or take the little-endian file."
        )
    return Gguf(file, reader.fields, {tensor.name: tensor for tensor in reader.tensors})
