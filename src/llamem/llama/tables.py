"""The two ends of the model, where it meets the vocabulary: rows of the embedding, and logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from llamem.layers.collectives import look_up
from llamem.llama.config import LlamaConfig
from llamem.llama.sharding import MeshShape


def embed(
    table_VD: Float[Array, "V _"],
    tokens_BT: Int[Array, "B T"],
    config: LlamaConfig,
    mesh: MeshShape = MeshShape(),
) -> Float[Array, "B T D"]:
    """Return the rows of an embedding, in the type of the products; NaN for an id that there is not.

    On a mesh inside `shard_map` the table is this device's part, of the vocabulary and of D.
    """
    ids_BT = tokens_BT.astype(jnp.promote_types(tokens_BT.dtype, jnp.int32))  # a narrow type cannot say V
    return look_up(table_VD.astype(config.compute_dtype), ids_BT, mesh.over("d_model"), mesh.tensor_axis)


def whole_logits(x_BTD: Float[Array, "B T D"], head_VD: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    """Return all logits of hidden states, in float32."""
    if jax.__version_info__ >= (0, 9):
        return jnp.einsum("BTD,VD->BTV", x_BTD, head_VD, preferred_element_type=jnp.float32)
    # Older compilers for CPUs have no bf16 product of an array with three axes and a matrix that lies this way.
    rows_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    logits_NV = jnp.einsum("ND,VD->NV", rows_ND, head_VD, preferred_element_type=jnp.float32)
    return logits_NV.reshape(*x_BTD.shape[:-1], head_VD.shape[0])
