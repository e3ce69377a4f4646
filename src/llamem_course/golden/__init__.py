"""A tiny Llama 3.1 that `transformers` made, and what it computed with it; written by tests/files/make_golden.py."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from llamem.files import save_pretrained
from llamem.llama import Llama


def transformers_llama() -> Path:
    """Return the folder of `config.json`, `model.safetensors` and `numbers.npz` (tokens, logits, loss, gradients)."""
    return Path(__file__).parent / "llama31"


def transformers_numbers() -> dict[str, np.ndarray]:
    """Return what `transformers` computed: tokens, logits, loss, the text it wrote, and "grad NAME" for each weight."""
    with np.load(transformers_llama() / "numbers.npz") as file:
        return dict(file)


def as_in_transformers(model: Llama, gradients: Any) -> dict[str, np.ndarray]:
    """Return gradients of this model's weights under the names, and turned the way, of `transformers`' files.

    They have the shapes of weights: a model that holds them is saved, and its file read.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(nnx.merge(nnx.graphdef(model), gradients), folder)
        return load_file(f"{folder}/model.safetensors")
