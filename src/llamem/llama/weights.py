"""What a model asks of its weights, and the plain answers.

A weight is an `nnx.Param` that knows how to multiply. The model never looks at the array of one: it asks. Whatever
answers the same questions can stand in a plain weight's place, and the model does not know.

| asked of | question | the plain answer | who answers otherwise |
|---|---|---|---|
| a matrix | `ready(dtype)`, once a layer, before all others | itself, cast | all that follow |
| | `linear(x, dtype)` | the product, summed in `dtype`, that of `x` unless told | all that follow |
| | `cut(n, axis)`, `together(matrices, x)`: groups of heads | n parts of its heads; one product | four bits, adapters |
| | `total(out)`, `is_whole`: summands | the result itself; True | a tensor axis of a mesh |
| | `tells_sequences_apart`: tiles of tokens | False | many adapters at once |
| a table | `ready(dtype)` | itself, cast | all that follow |
| | `look_up(ids, dtype)` | rows | four-bit blocks, a mesh |
| | `at_hand()`: whoever wants the numbers | all, on the device | the host's memory, adapters |
| | `beside(x)`: the loss | `x`, and what stands side by side as the head | an adapted head |
| | `vocab_axis`: the loss | None: all rows are here | a tensor axis of a mesh |
| both | `is_trained`: the order of gradients, the loss | True | a base under adapters |
| a norm | `norm(x)` | `x / rms(x) * scale` | |

So the model asks what only a power needs: it alone knows the moment, between two products or before the loss, and a
power that wrapped the model's functions would repeat them. A plain model without powers needs `ready`, `linear`,
`look_up` and `beside`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

# The last axes of every parameter; before them come the layers. None: one that is never split among devices.
PARAMETERS: dict[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", "d_model"),
    "untied_head": ("vocab", "d_model"),
    "wq": ("d_model", "heads", None),
    "wk": ("d_model", "kv_heads", None),
    "wv": ("d_model", "kv_heads", None),
    "wo": ("heads", None, "d_model"),
    "w_gate": ("d_model", "d_ff"),
    "w_up": ("d_model", "d_ff"),
    "w_down": ("d_ff", "d_model"),
    "norm": (None,),
    "attn_norm": (None,),
    "mlp_norm": (None,),
    "q_norm": (None,),
    "k_norm": (None,),
}
MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


class Matrix(nnx.Param):
    """`[*inputs, *outputs]`; `n_in` says how many axes are inputs: one of D, or heads and their channels."""

    n_in: int
    is_trained = True
    is_whole = True  # what `linear` returns; else a summand of it
    tells_sequences_apart = False  # else rows of `x` are multiplied by what belongs to their sequence

    def ready(self, dtype: Any) -> "Matrix":
        """Return the matrix in the type of its products."""
        return with_numbers(self, self[...].astype(dtype))

    def linear(self, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Return `x W`, in `dtype` or the type of `x`."""
        return jnp.tensordot(x, self[...], self.n_in, preferred_element_type=dtype)

    def total(self, out: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the whole result where `linear` returned a summand."""
        return out

    def cut(self, n: int, axis: Literal["input", "output"]) -> "Matrix":
        """Return n matrices, stacked: each has a part of the heads, which are its first input or output."""
        return with_numbers(self, cut(self[...], n, 0 if axis == "input" else self.n_in))

    @classmethod
    def together(cls, matrices: Sequence[Any], x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
        """Return `[m.linear(x) for m in matrices]` by one product, whose gradient for `x` is one array."""
        axis = matrices[0].n_in
        ends = np.cumsum([m[...].shape[axis] for m in matrices])[:-1]
        product = jnp.tensordot(x, jnp.concatenate([m[...] for m in matrices], axis=axis), axis)
        return jnp.split(product, ends, axis=x.ndim - axis)


class Table(nnx.Param):
    """`[V, D]`: a row for each entry of the vocabulary. The embedding, and the head."""

    vocab_axis: str | None = None  # the mesh axis whose devices have some rows each
    is_trained = True

    def ready(self, dtype: Any) -> "Table":
        """Return the table in the type of its products."""
        return with_numbers(self, self[...].astype(dtype))

    def at_hand(self) -> Float[Array, "V D"]:
        """Return its numbers."""
        return self[...]

    def look_up(self, ids: Int[Array, "*N"], dtype: Any) -> Float[Array, "*N D"]:
        """Return rows in `dtype`; NaN for an id that there is not."""
        table_VD = self[...].astype(dtype)
        ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))  # a narrow type cannot say V
        # A negative id would count from the table's end.
        return table_VD.at[jnp.where(ids < 0, table_VD.shape[0], ids)].get(mode="fill", fill_value=jnp.nan)

    def beside(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T W"], tuple[Float[Array, "V _"], ...]]:
        """Return what the loss multiplies: logits are the first times the others, which stand side by side."""
        return x, (self[...],)


class Norm(nnx.Param):
    """Its scale `[D]`, and `eps`."""

    eps: float

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Return `x / rms(x) * scale` over the last axis, computed in f32, in the type of `x`."""
        return rms_norm(x, self[...], self.eps)


def rms_norm(x: Float[Array, "*N D"], scale_D: Float[Array, " D"], eps: float) -> Float[Array, "*N D"]:
    """Return `x / rms(x) * scale` over the last axis, computed in f32, in the type of `x`. Zhang & Sennrich 2019."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * scale_D.astype(jnp.float32)).astype(x.dtype)


def linear_together(matrices: Sequence[Any], x: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """Return `[m.linear(x) for m in matrices]`, by one product where they are of one kind."""
    kinds = {type(matrix) for matrix in matrices}
    return kinds.pop().together(matrices, x) if len(kinds) == 1 else [m.linear(x) for m in matrices]


def with_numbers(weight: Any, w: Array) -> Any:
    """Return a weight of the same kind with other numbers."""
    return weight.replace(w)


def cut(w: Float[Array, "..."], n: int, axis: int) -> Float[Array, "n ..."]:
    """Cut an axis into n parts, and put them first: `[n, ...]`."""
    return jnp.moveaxis(w.reshape(*w.shape[:axis], n, -1, *w.shape[axis + 1 :]), axis, 0)


def whole_logits(x_BTD: Float[Array, "B T D"], head_VD: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    """Return all logits of hidden states, in float32."""
    if jax.__version_info__ >= (0, 9):
        return jnp.einsum("BTD,VD->BTV", x_BTD, head_VD, preferred_element_type=jnp.float32)
    # Older compilers for CPUs have no bf16 product of an array with three axes and a matrix that lies this way.
    rows_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    logits_NV = jnp.einsum("ND,VD->NV", rows_ND, head_VD, preferred_element_type=jnp.float32)
    return logits_NV.reshape(*x_BTD.shape[:-1], head_VD.shape[0])


def parameter_name(path: tuple[Any, ...]) -> str | None:
    """Return which parameter a leaf of a model, a layer or moments is part of; None for other leaves."""
    keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return next((key for key in keys if key in PARAMETERS), None)
