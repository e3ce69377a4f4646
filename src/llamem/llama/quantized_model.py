"""Whole models over four or eight bits: which matrices are in blocks, and the way there and back."""

import jax
from flax import nnx

from llamem.llama.model import Llama
from llamem.llama.quantized import BlockKind, QuantizedMatrix, check_kinds, with_blocks


def quantize(model: Llama, kind: BlockKind) -> Llama:
    """Return a model whose layers' matrices are in blocks of 32 numbers: `"q4_0"`, `"q4_1"` or `"q8_0"`.

    Norms, embedding, head and an experts' router stay as they are. The result computes, generates and carries adapters
    like any model; it cannot be trained itself. Matrices are changed one after the other, so that beside the old model
    there are the new blocks and one layer's matrix. Under `jax.eval_shape` shapes only.
    Raise ValueError for an unknown kind, for inputs that 32 does not divide, and for a model already quantised.
    """
    if is_quantized(model):
        raise ValueError(f"quantize(model, {kind!r}): the model is quantised already; dequantize(model) comes first.")
    return with_blocks(nnx.clone(model), check_kinds(model.config, kind))


def dequantize(model: Llama) -> Llama:
    """Return the plain model with the numbers that the blocks stand for, in the type of its norms."""
    plain, dtype = nnx.clone(model), model.config.param_dtype
    for name, matrix in quantized_matrices(plain).items():
        graphdef, blocks = nnx.split(matrix)
        numbers = jax.lax.map(lambda one, graphdef=graphdef: nnx.merge(graphdef, one).dequantize(dtype), blocks)
        setattr(plain.blocks, name, nnx.Param(numbers))
    return plain


def quantized_matrices(model: Llama) -> dict[str, QuantizedMatrix]:
    """Return the matrices of the layers that are in blocks, by their parameters' names."""
    return {name: matrix for name, matrix in vars(model.blocks).items() if isinstance(matrix, QuantizedMatrix)}


def is_quantized(model: Llama) -> bool:
    """Return whether any matrix of the model is in blocks."""
    return bool(quantized_matrices(model))


def check_trainable(model: Llama) -> None:
    """Raise ValueError for a model whose matrices are in blocks."""
    if is_quantized(model):
        raise ValueError(
            "this model's matrices are in blocks of four or eight bits, which have no gradient: it can carry adapters "
            "(llamem.LoraConfig), or be trained as llamem.llama.dequantize(model)."
        )
