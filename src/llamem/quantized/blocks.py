"""A frozen matrix in few bits: blocks of 32 numbers along its input, as GGUF files have them.

| kind | a block | a number |
|---|---|---|
| q4_0 | 16 bytes of two numbers, a scale: 4.5 bits a number | scale * (q - 8) |
| q4_1 | 16 bytes of two numbers, a scale, a minimum: 5 bits | scale * q + minimum |
| q8_0 | 32 bytes, a scale: 8.5 bits | scale * q |

Byte i of a block of four bits holds number i below and number i + 16 above. Source: llama.cpp's ggml-quants.c.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from jaxmem.common.checks import check_one_of
from llamem.llama.config import LlamaConfig
from llamem.llama.weights import Matrix, cut, with_numbers

BlockKind = Literal["q4_0", "q4_1", "q8_0"]
KINDS: tuple[BlockKind, ...] = ("q4_0", "q4_1", "q8_0")
BLOCK = 32  # numbers that share a scale
Blocks = dict[str, Any]  # "values" [.., out, in / 32, 16 or 32], "scale" and in q4_1 "minimum" [.., out, in / 32]


class Frozen(nnx.Variable):
    """Numbers of a model that are read and never trained."""


class QuantizedMatrix(nnx.Module):
    """Stacked matrices in blocks, dequantised where one of them is read: in the place of a layer's `nnx.Param`.

    `values` is uint8 (q8_0: int8), `scale` and `minimum` are float16. `shape` is that of the parameter it stands for.
    """

    def __init__(self, blocks: Blocks, kind: BlockKind, matrix_shape: tuple[int, ...]):
        self.kind: BlockKind = kind
        self.matrix_shape = matrix_shape  # of one: [D, H, h] of the queries, inputs first
        self.values, self.scale = Frozen(blocks["values"]), Frozen(blocks["scale"])
        if kind == "q4_1":
            self.minimum = Frozen(blocks["minimum"])

    @property
    def blocks(self) -> Blocks:
        """The parts of the blocks, by name."""
        return {name: part[...] for name, part in vars(self).items() if isinstance(part, Frozen)}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices, with the axes before them."""
        return (*self.scale[...].shape[:-2], *self.matrix_shape)

    def dequantize(self, dtype: Any) -> Float[Array, "..."]:
        """Return the matrices as they are multiplied. Computed in f32 and rounded once: GGUF's own numbers in f32."""
        minimum = self.minimum[...] if self.kind == "q4_1" else None
        w_OI = dequantize_rows(self.kind, self.values[...], self.scale[...], minimum, dtype)
        return jnp.swapaxes(w_OI, -1, -2).reshape(self.shape)

    def ready(self, dtype: Any) -> "RowMatrix":
        """Return one layer's matrix as it is multiplied, dequantised once for all tiles and groups."""
        minimum = self.minimum[...] if self.kind == "q4_1" else None
        w_OI = dequantize_rows(self.kind, self.values[...], self.scale[...], minimum, dtype)
        n_in = _n_in(self.matrix_shape, w_OI.shape[1])
        return RowMatrix(w_OI.reshape(*self.matrix_shape[n_in:], *self.matrix_shape[:n_in]), n_in=n_in)


class RowMatrix(Matrix):
    """`[*outputs, *inputs]`, as its blocks lie, and turned where it is multiplied.

    So it enters a loop over tiles or groups: else XLA for GPUs would bring the blocks of all layers into the other
    order before the loop over layers, in a copy.
    """

    def linear(self, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Return `x W`, in `dtype` or the type of `x`."""
        return self._turned().linear(x, dtype)

    def cut(self, n: int, axis: Literal["input", "output"]) -> "RowMatrix":
        """Return n matrices, stacked: each has a part of the heads, which are its first input or output."""
        return with_numbers(self, cut(self[...], n, self[...].ndim - self.n_in if axis == "input" else 0))

    @classmethod
    def together(cls, matrices: "Sequence[RowMatrix]", x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
        """Return `[m.linear(x) for m in matrices]` by one product."""
        return Matrix.together([m._turned() for m in matrices], x)

    def _turned(self) -> Matrix:
        w, inputs = self[...], range(self.n_in)
        return Matrix(jnp.moveaxis(w, [w.ndim - self.n_in + i for i in inputs], list(inputs)), n_in=self.n_in)


def _n_in(matrix_shape: tuple[int, ...], size: int) -> int:
    """Return how many of the first axes are the inputs, of which there are `size`."""
    return next(n for n in range(1, len(matrix_shape)) if math.prod(matrix_shape[:n]) == size)


def dequantize_rows(
    kind: BlockKind,
    values: Shaped[Array, "*N O blocks bytes"],
    scale: Float[Array, "*N O blocks"],
    minimum: Float[Array, "*N O blocks"] | None,
    dtype: Any,
) -> Float[Array, "*N O I"]:
    """Return the numbers of rows of blocks, `[.., out, in]`."""
    if kind == "q8_0":
        q = values.astype(jnp.float32)
    else:
        q = jnp.concatenate([values & 15, values >> 4], axis=-1).astype(jnp.float32)
        q = q - 8 if kind == "q4_0" else q
    numbers = q * scale.astype(jnp.float32)[..., None]
    if minimum is not None:
        numbers = numbers + minimum.astype(jnp.float32)[..., None]
    return numbers.astype(dtype).reshape(*scale.shape[:-1], -1)


def quantize_rows(rows: Float[Array, "*N O I"], kind: BlockKind) -> Blocks:
    """Return rows `[.., out, in]` as blocks, each rounded as llama.cpp's reference does."""
    b = rows.astype(jnp.float32).reshape(*rows.shape[:-1], -1, BLOCK)
    if kind == "q4_0":  # the number that is farthest from zero becomes -8
        farthest = jnp.argmax(jnp.abs(b), axis=-1, keepdims=True)
        scale, minimum = jnp.take_along_axis(b, farthest, axis=-1) / -8, None
        q = jnp.clip(jnp.trunc(b * _inverse(scale) + 8.5), 0, 15)
    elif kind == "q4_1":
        minimum = jnp.min(b, axis=-1, keepdims=True)
        scale = (jnp.max(b, axis=-1, keepdims=True) - minimum) / 15
        q = jnp.clip(jnp.trunc((b - minimum) * _inverse(scale) + 0.5), 0, 15)
    else:
        scale, minimum = jnp.max(jnp.abs(b), axis=-1, keepdims=True) / 127, None
        q = b * _inverse(scale)
        q = jnp.sign(q) * jnp.floor(jnp.abs(q) + 0.5)
    if kind == "q8_0":
        values = q.astype(jnp.int8)
    else:
        q = q.astype(jnp.uint8)
        values = q[..., :16] | (q[..., 16:] << 4)
    blocks: Blocks = {"values": values, "scale": scale[..., 0].astype(jnp.float16)}
    return blocks if minimum is None else blocks | {"minimum": minimum[..., 0].astype(jnp.float16)}


def with_blocks(model: Any, kinds: Mapping[str, BlockKind]) -> Any:
    """Put blocks in the place of these parameters of a model's layers; return the model, which is changed."""
    for name, kind in kinds.items():
        matrix = getattr(model.blocks, name)
        setattr(model.blocks, name, quantize_matrices(matrix[...], matrix.n_in, kind))
    return model


def is_in_blocks(path: tuple[Any, ...]) -> bool:
    """Return whether a parameter's leaf is a part of its blocks, and not its numbers."""
    keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return bool(keys) and keys[-1] in ("values", "scale", "minimum")


def kinds_in(params: Any) -> dict[str, BlockKind]:
    """Return the kind of each parameter that is in blocks, from a model's state alone: `nnx.state(model)`."""
    parts: dict[str, dict[str, Any]] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        if is_in_blocks(path):
            parts.setdefault(keys[-2], {})[keys[-1]] = leaf
    return {
        name: "q4_1" if "minimum" in blocks else "q8_0" if blocks["values"].dtype == jnp.int8 else "q4_0"
        for name, blocks in parts.items()
    }


def quantize_matrices(w: Float[Array, "L ..."], n_in: int, kind: BlockKind) -> QuantizedMatrix:
    """Return stacked matrices `[L, *inputs, *outputs]` in blocks, one after the other."""
    matrix_shape = w.shape[1:]
    size = math.prod(matrix_shape[:n_in])

    def in_blocks(matrix: Array) -> Blocks:
        return quantize_rows(jnp.swapaxes(matrix.reshape(size, -1), -1, -2), kind)

    return QuantizedMatrix(jax.lax.map(in_blocks, w) if len(w) else jax.vmap(in_blocks)(w), kind, matrix_shape)


def check_kinds(config: LlamaConfig, kind: BlockKind) -> dict[str, BlockKind]:
    """Return the parameters that `quantize` changes, each with the kind of its blocks, with `quantize`'s errors."""
    check_one_of("quantize", kind, KINDS)
    c = config
    inputs = {"wq": c.d_model, "wk": c.d_model, "wv": c.d_model, "wo": c.n_heads * c.head_dim}
    inputs |= {"w_gate": c.d_model, "w_up": c.d_model, "w_down": c.d_ff}
    if wrong := [f"{name} has {n}" for name, n in inputs.items() if n % BLOCK]:
        raise ValueError(
            f"quantize={kind!r}: blocks have {BLOCK} numbers along a matrix's inputs, and {', '.join(wrong)}. Load "
            "such a model with a dtype instead."
        )
    return dict.fromkeys(inputs, kind)


def _inverse(scale: Array) -> Array:
    return jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))
