"""What adapters add to a model's products, each sequence's its own: nothing of `[in, out]` is made for an adapter.

Each sequence's `A` `[r, in]` and `B` `[r, out]` are gathered, then multiplied as a batch: two thin products per matrix,
whatever the number of adapters. On a mesh every device holds all adapters whole, and slices what its part of a matrix
meets; in "tensor" each computes a summand or a part, as it does of the frozen product.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from llamem.llama.lora import IN_LAYERS, Adapters


def layers_of(adapters: Adapters | None) -> Any:
    """Return what the layers adapt, every leaf `[L, A, ...]`, for `apply_stack`; None without adapters."""
    if adapters is None:
        return None
    parts = {"a": adapters.a, "b": adapters.b, "scale": adapters.scale}
    return {name: {t: x for t, x in part.items() if t in IN_LAYERS} for name, part in parts.items()}


@partial(jax.tree_util.register_dataclass, data_fields=("a", "b", "scale", "adapter_B"), meta_fields=("tensor_axis",))
@dataclasses.dataclass(frozen=True)
class LayerAdapters:
    """One layer's adapters, `a` `[A, r, in]`, `b` `[A, r, out]`, `scale` `[A]` by target; each sequence's choice."""

    a: Mapping[str, Any]  # arrays; what JAX puts into trees while it traces them, too
    b: Mapping[str, Any]
    scale: Mapping[str, Any]
    adapter_B: Any = None
    tensor_axis: str | None = None

    @classmethod
    def of(cls, part: Any, adapter_B: Any, tensor_axis: str | None = None) -> "LayerAdapters":
        """Wrap one layer's part of what `layers_of` returned; none where that was None."""
        return NO_ADAPTERS if part is None else cls(**part, adapter_B=adapter_B, tensor_axis=tensor_axis)

    def add(self, target: str, x: Float[Array, "B T *from"], out: Float[Array, "B T *to"]) -> Float[Array, "B T *to"]:
        """Return `out`, the frozen product of `x`, with what this target's adapters add to it, if there are any.

        The last axes may be split in two, as heads are; their sizes may be a device's part of the whole.
        """
        if target not in self.a:
            return out
        x_BTI = x.reshape(*x.shape[:2], -1)
        n_out = out.reshape(*out.shape[:2], -1).shape[-1]
        a_ArI = _own(self.a[target], x_BTI.shape[-1], self.tensor_axis)
        b_ArO = _own(self.b[target], n_out, self.tensor_axis)
        z_BTr = project_in(x_BTI, a_ArI, self.scale[target], self.adapter_B)
        delta_BTO = jnp.einsum("BTr,BrO->BTO", z_BTr, chosen(b_ArO, self.adapter_B).astype(out.dtype))
        return out + delta_BTO.reshape(out.shape)

    def in_groups_of_heads(self, groups: int, sizes: Mapping[str, int]) -> tuple["LayerAdapters", "LayerAdapters"]:
        """Cut what has heads, of q, k, v and o, into groups `[groups, A, r, ..]`; return them and what all groups read.

        `sizes` are this device's channels of each target. A group's adapters are `mine.with_shared(shared)`.
        """

        def cut(target: str, array_ArO: Array) -> Array:
            own_ArO = _own(array_ArO, sizes[target], self.tensor_axis)
            return jnp.moveaxis(own_ArO.reshape(*own_ArO.shape[:2], groups, -1), 2, 0)

        a = {t: cut(t, x) for t, x in self.a.items() if t == "o"}
        b = {t: cut(t, x) for t, x in self.b.items() if t in ("q", "k", "v")}
        shared = LayerAdapters(
            {t: x for t, x in self.a.items() if t in b}, {t: x for t, x in self.b.items() if t in a},
            self.scale, self.adapter_B, self.tensor_axis,
        )  # fmt: skip
        return LayerAdapters(a, b, {}, None, self.tensor_axis), shared

    def with_shared(self, shared: "LayerAdapters") -> "LayerAdapters":
        """Join one group's adapters with those that all groups read: see `in_groups_of_heads`."""
        return dataclasses.replace(shared, a={**self.a, **shared.a}, b={**self.b, **shared.b})


NO_ADAPTERS = LayerAdapters({}, {}, {})


def chosen(array_A: Float[Array, "A *rest"], adapter_B: Int[Array, " B"]) -> Float[Array, "B *rest"]:
    """Return each sequence's adapter; NaN for an id that is none."""
    known_B = jnp.where(adapter_B < 0, array_A.shape[0], adapter_B)  # a negative id would count from the end
    return array_A.at[known_B].get(mode="fill", fill_value=jnp.nan)


def project_in(
    x_BTI: Float[Array, "B T I"], a_ArI: Float[Array, "A r I"], scale_A: Float[Array, " A"], adapter_B: Int[Array, " B"]
) -> Float[Array, "B T r"]:
    """Return `scale (x A')` of each sequence, in the type of `x`.

    A is scaled and rounded before the product: one in f32 would have a gradient for `x` of f32, twice as large as any
    other array of a step. It is chosen before that, so that gradients of sequences add up in f32.
    """
    a_BrI = chosen(a_ArI, adapter_B) * chosen(scale_A, adapter_B)[:, None, None]
    return jnp.einsum("BTI,BrI->BTr", x_BTI, a_BrI.astype(x_BTI.dtype))


def adapted_head(
    x_BTD: Float[Array, "B T D"],
    head_VD: Float[Array, "V D"],
    adapters: Adapters | None,
    adapter_B: Int[Array, " B"] | None,
    tensor_axis: str | None = None,
) -> tuple[Float[Array, "B T W"], tuple[Float[Array, "V _"], ...]]:
    """Return hidden states and head of the adapted model: `tiled_cross_entropy(*adapted_head(...), targets)`.

    The logits `x W' + scale (x A') B` are one wider product: `[x, z] [W, B_1 .. B_A]'`, in which `z` holds `scale x A'`
    in the columns of the sequence's own adapter and zeros in the others. So the head comes back as two matrices, the
    frozen `[V, D]` as it was and the adapters' `[V, min(A, B) r]`, and hidden with as many columns. Without adapters of
    the head both are as they were, the head alone in a tuple. Inside `shard_map`, with the vocabulary split over
    `tensor_axis`, the head's rows and the adapters' are this device's.
    """
    if adapters is None or adapter_B is None or "head" not in adapters.a:
        return x_BTD, (head_VD,)
    dtype = x_BTD.dtype
    z_BTr = project_in(x_BTD, adapters.a["head"], adapters.scale["head"], adapter_B)
    b_ArV = _own(adapters.b["head"], head_VD.shape[0], tensor_axis)
    if adapters.count <= x_BTD.shape[0]:
        unknown_B = (adapter_B < 0) | (adapter_B >= adapters.count)  # their z is NaN, and belongs somewhere
        own_BA = (adapter_B[:, None] == jnp.arange(adapters.count)) | unknown_B[:, None]
    else:  # fewer columns with one block for each sequence
        b_ArV, own_BA = chosen(b_ArV, adapter_B), jnp.eye(x_BTD.shape[0], dtype=bool)
    z_BTAr = jnp.where(own_BA[:, None, :, None], z_BTr[:, :, None, :], 0)
    wide_BTW = jnp.concatenate([x_BTD, z_BTAr.reshape(*z_BTr.shape[:2], -1)], axis=-1)
    b_VR = b_ArV.astype(dtype).reshape(-1, b_ArV.shape[-1]).T
    return wide_BTW, (head_VD, b_VR)


def _own(array: Array, size: int, tensor_axis: str | None) -> Array:
    """Return the part of the last axis that belongs to this device, of which it has `size` numbers."""
    if tensor_axis is None or array.shape[-1] == size:
        return array
    return lax.dynamic_slice_in_dim(array, lax.axis_index(tensor_axis) * size, size, axis=-1)
