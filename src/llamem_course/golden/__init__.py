"""A tiny Llama 3.1 that `transformers` made, and what it computed with it; written by tests/files/make_golden.py."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from llamem.files import load_pretrained


def transformers_llama() -> Path:
    """Return the folder of `config.json`, `model.safetensors` and `numbers.npz` (tokens, logits, loss, gradients)."""
    return Path(__file__).parent / "llama31"


def transformers_numbers() -> dict[str, Any]:
    """Return what `transformers` computed: tokens, logits, loss, the text it wrote, and the gradients of all weights.

    Gradients have the names and the layout of the weights that `llamem` reads: a file of them is read as such weights.
    """
    with np.load(transformers_llama() / "numbers.npz") as file:
        numbers = dict(file)
    gradients = {name.removeprefix("grad "): numbers.pop(name) for name in list(numbers) if name.startswith("grad ")}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(transformers_llama() / "config.json", folder)
        save_file(gradients, f"{folder}/model.safetensors")
        return numbers | {"gradients": nnx.to_pure_dict(nnx.state(load_pretrained(folder)))}
