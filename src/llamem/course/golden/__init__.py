"""A tiny Llama 3.1 that `transformers` made, and what it computed with it; written by tests/llama/make_golden.py."""

from pathlib import Path


def transformers_llama() -> Path:
    """Return the folder of `config.json`, `model.safetensors` and `numbers.npz` (tokens, logits, loss, gradients)."""
    return Path(__file__).parent / "llama31"
