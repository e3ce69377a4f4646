"""Whole models over four or eight bits: which matrices are in blocks, and the way there and back."""

from typing import Any

import jax
from flax import nnx

from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.llama.weights import Matrix
from llamem.quantized.blocks import BlockKind, QuantizedMatrix, check_kinds, kinds_in, with_blocks


def quantize(model: Llama, kind: BlockKind) -> Llama:
    """Return a model whose layers' matrices are in blocks of 32 numbers: `"q4_0"`, `"q4_1"` or `"q8_0"`.

    Norms, embedding and head stay as they are. The result computes, generates and carries adapters
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
        numbers = jax.lax.map(lambda layer, graphdef=graphdef: nnx.merge(graphdef, layer).dequantize(dtype), blocks)
        n_in = 2 if name == "wo" else 1
        setattr(plain.blocks, name, Matrix(numbers, n_in=n_in))
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
            "(llamem.LoraConfig), or be trained as llamem.quantized.dequantize(model)."
        )


def graphdef_of(config: LlamaConfig, plan: Plan, params: Any) -> nnx.GraphDef:
    """Return what `nnx.merge` makes a model of from these parameters, some of which may be in blocks."""
    kinds = kinds_in(params)
    return nnx.graphdef(nnx.eval_shape(lambda: with_blocks(Llama(config, rngs=nnx.Rngs(0), plan=plan), kinds)))


def plain_params(model: Llama) -> nnx.State:
    """Return a model's parameters as those of a plain one, or of one in blocks, wherever its weights wait.

    Raise ValueError for a model that carries adapters.
    """
    params = nnx.state(model)
    kinds = kinds_in(params)
    plain = nnx.eval_shape(lambda: nnx.state(with_blocks(Llama(model.config, rngs=nnx.Rngs(0)), kinds)))
    leaves, structure = jax.tree.leaves(params), jax.tree.structure(plain)
    if len(leaves) != structure.num_leaves:
        raise ValueError(
            "this model carries adapters (adapters.on(model)): pass the model that they were put on, or "
            "llamem.merge_adapter(model, adapters, i), which adds one into the weights."
        )
    return jax.tree.unflatten(structure, leaves)
