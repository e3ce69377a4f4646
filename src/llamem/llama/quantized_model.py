"""Whole models over four or eight bits: which matrices are in blocks, and the way there and back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from llamem.llama.model import Llama
from llamem.llama.quantized import BlockKind, QuantizedMatrix, check_kinds, quantize_matrices
from llamem.llama.sharding import is_in_blocks
from llamem.llama.tensor_names import IN_LAYER

_PER_EXPERT = ("w_gate", "w_up", "w_down")


def quantize(model: Llama, kind: BlockKind) -> Llama:
    """Return a model whose layers' matrices are in blocks of 32 numbers: `"q4_0"`, `"q4_1"` or `"q8_0"`.

    Norms, embedding, head and an experts' router stay as they are. The result computes, generates and carries adapters
    like any model; it cannot be trained itself. Matrices are changed one after the other, so that beside the old model
    there are the new blocks and one layer's matrix. Under `jax.eval_shape` shapes only.
    Raise ValueError for an unknown kind, for inputs that 32 does not divide, and for a model already quantised.
    """
    if not isinstance(model, Llama):
        raise TypeError(f"quantize({type(model).__name__}, {kind!r}): expected a llamem.Llama.")
    if is_quantized(model):
        raise ValueError(f"quantize(model, {kind!r}): the model is quantised already; dequantize(model) comes first.")
    return with_blocks(nnx.clone(model), check_kinds(model.config, kind))


def dequantize(model: Llama, dtype: DTypeLike | None = None) -> Llama:
    """Return the plain model with the numbers that the blocks stand for, stored as `dtype` (default: as its norms)."""
    if not isinstance(model, Llama):
        raise TypeError(f"dequantize({type(model).__name__}): expected a llamem.Llama.")
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


def with_blocks(model: Llama, kinds: Mapping[str, BlockKind]) -> Llama:
    """Put blocks in the place of these parameters of the model's layers; return the model, which is changed."""
    for name, kind in kinds.items():
        n_before = 2 if model.config.n_experts and name in _PER_EXPERT else 1
        w = getattr(model.blocks, name)[...]
        setattr(model.blocks, name, quantize_matrices(w, IN_LAYER[name][1], n_before, kind))
    return model


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


def quantized_matrices(model: Llama) -> dict[str, QuantizedMatrix]:
    """Return the matrices of the layers that are in blocks, by their parameters' names."""
    named = {name: getattr(model.blocks, name, None) for name in IN_LAYER}
    return {name: matrix for name, matrix in named.items() if isinstance(matrix, QuantizedMatrix)}


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
