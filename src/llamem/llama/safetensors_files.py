"""Where every tensor of a folder of safetensors is, from the files' headers alone: read without trust.

Source: the format's description, github.com/huggingface/safetensors. Read here, not through the library: that maps
whole files into memory, and each tensor would be there twice.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

from llamem._files import parse_json, read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16, "F64": np.float64}
_MAX_HEADER = 100_000_000  # bytes; the format's own limit


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor's bytes are."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the file's beginning

    def read(self) -> np.ndarray:
        """The tensor."""
        return np.fromfile(self.file, self.dtype, math.prod(self.shape), offset=self.offset).reshape(self.shape)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder by name.

    Raises FileNotFoundError for a missing file, ValueError, which names the file, for one that is cut off, damaged or
    made to deceive: a header of more than 100 MB, tensors that overlap, leave gaps or lie outside the file.
    """
    if (folder / INDEX).is_file():
        weight_map = _weight_map(folder / INDEX)
        files = {name: tensors_in(folder / name) for name in sorted(set(weight_map.values()))}
        lost = [tensor for tensor, name in weight_map.items() if tensor not in files[name]]
        if lost:
            raise ValueError(f"{folder / INDEX} promises {few(lost)}, which are not in the files that it names.")
        return {tensor: files[name][tensor] for tensor, name in weight_map.items()}
    if (folder / WEIGHTS).is_file():
        return tensors_in(folder / WEIGHTS)
    raise FileNotFoundError(
        f"{folder} has neither {WEIGHTS} nor {INDEX}. Pickled weights (.bin, .pt) can run any code and are not read: "
        "let transformers write the model again, with save_pretrained."
    )


def few(names: list[str]) -> str:
    """The first four of some names, and how many more there are."""
    return ", ".join(name[:80] for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, _MAX_HEADER, _once).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map, an object that names each tensor's file. Download it again.")
    for name in set(map(_text, weight_map.values())):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} names the file {name!r}: expected a .safetensors file beside it.")
    return weight_map


def _text(name: Any) -> str:
    return name if isinstance(name, str) else repr(name)


def tensors_in(file: Path) -> dict[str, Stored]:
    """Every tensor of one file by name, with the errors of `stored_tensors`."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing. Download it again.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file} is no complete safetensors file: its header does not end in it.")
        if length > _MAX_HEADER:
            raise ValueError(f"{file} has a header of {length:,} bytes: expected at most {_MAX_HEADER:,}.")
        entries = parse_json(stream.read(length), f"the header of {file}, no complete safetensors file,", _once)
    entries.pop("__metadata__", None)
    data = 8 + length
    places = {name: _place(name, entry, file, size - data) for name, entry in entries.items()}
    _check_places(places, file, size - data)
    return {name: Stored(file, dtype, shape, data + start) for name, (start, _, dtype, shape) in places.items()}


def _place(name: str, entry: Any, file: Path, size: int) -> tuple[int, int, np.dtype, tuple[int, ...]]:
    """Where a tensor begins and ends among the `size` bytes of data, its type and its shape."""
    kind, shape, offsets = map((entry if isinstance(entry, dict) else {}).get, ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{name} in {file} is described as {str(entry)[:80]!r}: expected a dtype, a shape and two data_offsets, "
            "all numbers whole and not negative. The file is damaged. Download it again."
        )
    if kind not in _DTYPES:
        raise ValueError(
            f"{name} in {file} is stored as {kind}: expected one of {', '.join(_DTYPES)}. Quantised weights are not "
            "read; take the model's unquantised original."
        )
    dtype = np.dtype(_DTYPES[kind])
    start, end = offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{name} should take {math.prod(shape) * dtype.itemsize} bytes and has {end - start} in {file}, which is "
            "damaged. Download it again."
        )
    if end > size:
        raise ValueError(
            f"{name} should end at byte {end:,} of the data in {file}, which has {size:,}: the file is cut off or "
            "damaged. Download it again."
        )
    return start, end, dtype, tuple(shape)


def _check_places(places: dict[str, tuple[int, int, np.dtype, tuple[int, ...]]], file: Path, size: int) -> None:
    """Tensors follow each other without overlap or gap, from the first byte of the data to the last."""
    in_order = sorted((start, end, name) for name, (start, end, *_) in places.items())
    for (_, before, one), (start, _, other) in itertools.pairwise([(0, 0, "the header"), *in_order]):
        if start != before:
            fault = "overlap" if start < before else "leave a gap"
            raise ValueError(
                f"{one} ends at byte {before} of the data in {file}, and {other} begins at byte {start}: they {fault}. "
                "The file is damaged or made to deceive. Download it again from where you trust it."
            )
    end = in_order[-1][1] if in_order else 0
    if end != size:
        raise ValueError(
            f"{file} has {size - end} bytes after its last tensor, which belong to none: the file is damaged or made "
            "to deceive. Download it again from where you trust it."
        )


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    # At most eight: the product of very many would take very long.
    is_short_list = isinstance(values, list) and len(values) <= 8
    return is_short_list and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} stands in it twice")
        found[name] = value
    return found
