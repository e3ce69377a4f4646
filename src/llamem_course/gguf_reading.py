"""The weights of a GGUF file for notebook 06's Llama, read without `llamem`, with which they are compared."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, dequantize

from llamem import LlamaConfig


def gguf_weights(file: Path, config: LlamaConfig) -> dict[str, Any]:
    """Return a file's weights in float32 by notebook 06's names and shapes; those of all layers are stacked.

    A file has rows of outputs and one axis for all heads; here they are columns, with an axis for heads. Within a head,
    queries and keys keep the order of the file.
    """
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in GGUFReader(file).tensors}

    def matrix(name: str) -> np.ndarray:
        return dequantize(tensors[name].data, tensors[name].tensor_type)

    def layer(i: int) -> dict[str, np.ndarray]:
        w = {"attn_norm": matrix(f"blk.{i}.attn_norm"), "mlp_norm": matrix(f"blk.{i}.ffn_norm")}
        for name, n_heads in (("q", config.n_heads), ("k", config.n_kv_heads), ("v", config.n_kv_heads)):
            w[f"w{name}"] = matrix(f"blk.{i}.attn_{name}").T.reshape(config.d_model, n_heads, -1)
        w["wo"] = matrix(f"blk.{i}.attn_output").T.reshape(config.n_heads, -1, config.d_model)
        for name in ("gate", "up", "down"):
            w[f"w_{name}"] = matrix(f"blk.{i}.ffn_{name}").T
        return w

    layers = [layer(i) for i in range(config.n_layers)]
    blocks = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *layers)
    weights = {"blocks": blocks, "embedding": matrix("token_embd"), "norm": matrix("output_norm")}
    if "output" in tensors:
        weights["untied_head"] = matrix("output")
    return weights
