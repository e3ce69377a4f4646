"""What the devices of a mesh say to each other in a layer, for use inside `jax.shard_map(..., check_vma=False)`.

There a function sees one device's part of every array, and each of these says where parts meet, forward and backward.
All are written with their gradients: what autodiff would make of them depends on `check_vma`. Without a mesh axis
(None, or an empty tuple) they do nothing.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def enter(x: Float[Array, "..."], axis: str | None) -> Float[Array, "..."]:
    """Mark where a value that every device of `axis` holds is read by computations of which each does a part.

    Forward the value itself; backward its gradients, one from each part, are summed. Megatron's f (arXiv 1909.08053).
    """
    return x if axis is None else _enter(x, axis)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _enter(x: Array, axis: str) -> Array:
    return x


_enter.defvjp(lambda x, axis: (x, None), lambda axis, _, dx: (lax.psum(dx, axis),))


def leave(x: Float[Array, "..."], axis: str | None) -> Float[Array, "..."]:
    """Add up the summands that the devices of `axis` computed: forward their sum, backward the gradient itself.

    Megatron's g (arXiv 1909.08053).
    """
    return x if axis is None else _leave(x, axis)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _leave(x: Array, axis: str) -> Array:
    return lax.psum(x, axis)


_leave.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, dx: (dx,))


def gather(w: Float[Array, "..."], axes: tuple[str, ...], dim: int, dtype: Any) -> Float[Array, "..."]:
    """Return a weight that is split along `dim` over the devices of `axes`, whole, in the type `dtype`.

    It travels in `dtype`. Its gradients are summed over the devices in the type in which it is stored, and each device
    gets the part that it holds: a reduce-scatter.
    """
    return _gather(w, axes, dim, jnp.dtype(dtype), w.dtype) if axes else w.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(w: Array, axes: tuple[str, ...], dim: int, dtype: Any, stored: Any) -> Array:
    return lax.all_gather(w.astype(dtype), axes, axis=dim, tiled=True)


def _gather_backward(axes: tuple[str, ...], dim: int, dtype: Any, stored: Any, _: None, dw: Array) -> tuple[Array]:
    return (lax.psum_scatter(dw.astype(stored), axes, scatter_dimension=dim, tiled=True),)


_gather.defvjp(lambda w, *static: (_gather(w, *static), None), _gather_backward)


def look_up(
    table_VD: Float[Array, "rows columns"], ids_BT: Int[Array, "B T"], axes: tuple[str, ...], rows_axis: str | None
) -> Float[Array, "B T D"]:
    """Look up own ids in a table whose columns are split over `axes` and whose rows are split over `rows_axis`.

    No device ever holds the table whole. Everybody looks everybody's ids up in its own columns, then columns of all
    ids are exchanged for all columns of the own ones. Ids beyond the table give NaN.
    """
    if not axes and rows_axis is None:
        return _rows(table_VD, ids_BT)
    # The ids of all devices, [devices, B, T].
    ids = lax.all_gather(ids_BT, axes) if axes else ids_BT[None]
    if rows_axis is None:
        x = _rows(table_VD, ids)
    else:
        rows = table_VD.shape[0]
        own_row = ids - lax.axis_index(rows_axis) * rows
        held = (own_row >= 0) & (own_row < rows)
        known = (ids >= 0) & (ids < rows * lax.axis_size(rows_axis))
        x = jnp.where(held[..., None], table_VD[jnp.where(held, own_row, 0)], 0)
        x = jnp.where(known[..., None], x, jnp.nan)
    if axes:
        x = lax.all_to_all(x, axes, split_axis=0, concat_axis=x.ndim - 1, tiled=True)
    return leave(x[0], rows_axis)


def _rows(table_VD: Array, ids: Array) -> Array:
    # Beyond the table reading gives NaN; a negative id would count from its end.
    return table_VD.at[jnp.where(ids < 0, table_VD.shape[0], ids)].get(mode="fill", fill_value=jnp.nan)
