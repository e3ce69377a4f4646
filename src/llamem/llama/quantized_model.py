"""Whole models over four or eight bits: which matrices are in blocks, and the way there and back."""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

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


def dequantize(model: Llama, dtype: DTypeLike | None = None) -> Llama:
    """Return the plain model with the numbers that the blocks stand for, stored as `dtype` (default: as its norms)."""
    config = model.config.replace(param_dtype=model.config.param_dtype if dtype is None else dtype)
    plain = nnx.clone(model)
    for name, matrix in quantized_matrices(plain).items():
        graphdef, blocks = nnx.split(matrix)

        def one(blocks: Any, graphdef: Any = graphdef) -> Any:
            return nnx.merge(graphdef, blocks).dequantize(config.param_dtype)

        setattr(plain.blocks, name, nnx.Param(jax.lax.map(one, blocks)))
    state = jax.tree.map(lambda x: x.astype(config.param_dtype), nnx.to_pure_dict(nnx.state(plain)))
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), plan=model.plan)))
    nnx.replace_by_pure_dict(abstract, state)
    return nnx.merge(graphdef, abstract)


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
