"""Tensors of files into stacked parameters: checked against the config first, then read one by one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.checks import few
from llamem.files.gguf import GgufTensor
from llamem.files.safetensors import Stored
from llamem.files.tensor_names import Tensor
from llamem.llama.config import LlamaConfig
from llamem.quantized.blocks import BlockKind, Blocks, quantize_rows

Tensors = Mapping[str, Stored | GgufTensor]  # by Hugging Face's names
Pieces = list[tuple[Tensor, Stored | GgufTensor]]


def check_tensors(tensors: list[Tensor], stored: Tensors, config: LlamaConfig, place: Path) -> None:
    """Raise ValueError where the files lack a tensor of the model's, hold another, or one of another shape."""
    expected = {tensor.name: tensor.shape for tensor in tensors}
    # Some writers repeat a tied head, and old ones store RoPE's frequencies.
    spare = "lm_head.weight" if config.tied_head else None
    extra = [name for name in stored if name not in expected and name != spare and "rotary_emb" not in name]
    wrong = [f"{n} {stored[n].shape}, not {s}" for n, s in expected.items() if n in stored and stored[n].shape != s]
    problems = {
        "missing": [name for name in expected if name not in stored],
        "not known to this architecture": extra,
        "of another shape": wrong,
    }
    if any(problems.values()):
        differences = "; ".join(f"{what}: {few(names)}" for what, names in problems.items() if names)
        if not config.tied_head and "lm_head.weight" in problems["missing"]:
            differences += '. A model whose head is its embedding says so in config.json: "tie_word_embeddings": true'
        raise ValueError(f"the tensors in {place} are not those that its config describes. {differences}.")


def check_tied(config: LlamaConfig, stored: Tensors, place: Path) -> None:
    """Raise ValueError where the config ties the head to the embedding, and the files hold another head."""
    head, embedding = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if not config.tied_head or head is None or embedding is None:
        return
    if head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
        raise ValueError(
            f"the config in {place} says tie_word_embeddings=true, and lm_head.weight in the files is not the "
            "embedding: one of them is wrong. If the head was trained by itself, write tie_word_embeddings=false into "
            "config.json; else delete the tensor."
        )


def fill(leaf: Any, pieces: Pieces, place: Any, kind: BlockKind | None) -> Any:
    """Return a parameter of all layers with its tensors written into it, one at a time.

    `leaf` and `place` are its shape and sharding, or with a `kind` of blocks those of its parts. Raise ValueError,
    which names the tensor, for numbers that are not finite.
    """
    if kind is None:
        stack = _Stack(leaf, place)
        for tensor, stored in pieces:
            stack.write(stored.read(), tensor, turned=tensor.linear)
        return stack.finished()
    # Blocks lie as they are stored, [outputs, inputs].
    parts = {name: _Stack(leaf[name], place[name]) for name in leaf}
    for tensor, stored in pieces:
        for name, part in _blocks(kind, stored).items():
            parts[name].write(part, tensor)
    return {name: stack.finished() for name, stack in parts.items()}


def _blocks(kind: BlockKind, stored: Stored | GgufTensor) -> Blocks:
    if isinstance(stored, GgufTensor) and stored.is_quantized:
        return stored.blocks(kind)
    return jax.jit(quantize_rows, static_argnums=1)(stored.read(), kind)


class _Stack:
    """An array of all layers, or of what has none, as `leaf` says, into which tensors are written in place."""

    def __init__(self, leaf: Any, place: Any):
        self._place, self._waits_on_host = place, place is not None and place.memory_kind == "pinned_host"
        # In the host's memory nothing is written in place: the CPU puts the array together, and no device sees it.
        where = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]) if self._waits_on_host else place
        self._array = jnp.zeros(leaf.shape, leaf.dtype, device=where)
        # Donated, so that the array is written in place.
        self._put = jax.jit(_put, static_argnums=3, donate_argnums=0, out_shardings=(where, None))

    def write(self, piece: Any, tensor: Tensor, turned: bool = False) -> None:
        """Write one tensor, or a part of its blocks, at its layer; `turned`: it is stored as [outputs, inputs]."""
        self._array, is_finite = self._put(self._array, piece, tensor.index, turned)
        if not is_finite:  # known when the piece is written, so that the host holds one piece at a time
            raise ValueError(
                f"{tensor.name} holds NaN or infinite numbers, or some beyond {self._array.dtype}: the file is "
                "damaged, the training that wrote it had diverged, or this type is too narrow for it."
            )

    def finished(self) -> jax.Array:
        """Return the array, where it is to lie."""
        if not self._waits_on_host:
            return self._array
        return jax.block_until_ready(jax.device_put(self._array, self._place))


def _put(array: jax.Array, piece: jax.Array, index: tuple[Any, ...], turned: bool) -> tuple[jax.Array, jax.Array]:
    """Return the array with the piece in it, and whether the piece is finite."""
    piece = (piece.T if turned else piece).astype(array.dtype)
    piece = piece.reshape((1,) * len(index) + array.shape[len(index) :])
    start = (*index, *(0,) * (array.ndim - len(index)))
    return jax.lax.dynamic_update_slice(array, piece, start), jnp.isfinite(piece).all()
