"""The tensors of a folder of safetensors: known from the files' headers, each read when it is asked for."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.common.checks import few, import_extra
from jaxmem.common.files import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16", "F64")
_MAX_INDEX = 100_000_000  # bytes


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of one file."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """Return the tensor. The file is mapped for this tensor alone, so that the host holds no second model."""
        with _open(self.file) as opened:
            return opened.get_tensor(self.name)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return every tensor of the folder by name.

    Raise FileNotFoundError for a missing file, ValueError, which names the file, for one that is cut off, damaged or of
    another type than floating-point numbers, and for a folder that holds two models, or a tensor twice.
    """
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX, _MAX_INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise ValueError(
                f"{folder / INDEX} has no weight_map, which says what file a tensor is in: download it again."
            )
        files = {Path(str(name)).name for name in listed.values()}
        if (folder / WEIGHTS).is_file() and WEIGHTS not in files:
            raise ValueError(
                f"{folder} holds {WEIGHTS} and, beside it, {INDEX}, which names other files ({few(sorted(files))}): "
                "one of the two is an older model's, and programs differ in which they read. Move the one that is not "
                "meant out of the folder."
            )
        found: dict[str, Stored] = {}
        for file in sorted(files):
            tensors = tensors_in(folder / file)
            if twice := next((name for name in tensors if name in found), None):
                raise ValueError(
                    f"{twice} stands in {found[twice].file} and in {folder / file}: the files are of two models, or of "
                    "two versions of one. Download the folder again."
                )
            found |= tensors
        return found
    if (folder / WEIGHTS).is_file():
        return tensors_in(folder / WEIGHTS)
    raise FileNotFoundError(
        f"{folder} has neither {WEIGHTS} nor {INDEX}. Pickled weights (.bin, .pt) can run any code and are not read: "
        "let transformers write the model again, with save_pretrained."
    )


def tensors_in(file: Path) -> dict[str, Stored]:
    """Return every tensor of one file by name, with the errors of `stored_tensors`."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing. Download it again.")
    with _open(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, no dict
        kinds = {name: tensor.get_dtype() for name, tensor in slices.items()}
        shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
    if other := next((name for name, kind in kinds.items() if kind not in _DTYPES), None):
        raise ValueError(
            f"{other} in {file} is stored as {kinds[other]}: expected one of {', '.join(_DTYPES)}. Take the model's "
            "unquantised original, or its GGUF file."
        )
    return {name: Stored(file, name, shape) for name, shape in shapes.items()}


def _open(file: Path) -> Any:
    safetensors = import_extra("safetensors", "files of weights")
    try:
        return safetensors.safe_open(file, framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} is no complete safetensors file: {error}. It is cut off or damaged: download it again."
        ) from None
