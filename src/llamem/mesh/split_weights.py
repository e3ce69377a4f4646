"""Weights of which a device of a mesh has its part, inside `jax.shard_map(..., check_vma=False)`.

FSDP and context parallelism: a matrix is gathered when a layer asks for it, rematerialised with the layer and so never
whole for more than one, and its gradient is scattered again. Tensor parallelism: a norm that enters products of which
each device does a part, matrices whose results are summands, a table with some of the rows.

What devices say to each other is written with its gradient: what autodiff would make of it depends on `check_vma`.
Without a mesh axis (None, or an empty tuple) these functions do nothing.

Context parallelism cuts a sequence into 2c pieces for c devices, and device i holds the pieces i and 2c - 1 - i
("zigzag"): under a causal mask a late piece sees much and an early one little, so every device computes as much as the
others.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmem.chips.chip import compiling_for
from llamem.layers.attention import Implementation, causal_attention, choose_attention
from llamem.layers.attention_splash import SPLASH_BLOCK, check_splash, splash_kernel, through_kernel
from llamem.layers.attention_tiles import KEY_TILE, attend_in_tiles, visible_pairs
from llamem.llama.model import Attend, Llama
from llamem.llama.plan import MeshShape
from llamem.llama.weights import MATRICES, PARAMETERS, Matrix, Norm, Table
from llamem.mesh.torus import Route, route_over
from llamem.quantized.blocks import QuantizedMatrix


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


def gather(w: Float[Array, "..."], route: Route, dim: int, dtype: Any) -> Float[Array, "..."]:
    """Return a weight that is split along `dim` over the devices of the `route`, whole, in the type `dtype`.

    It travels in `dtype`. Its gradients are summed over the devices in the type in which it is stored, and each device
    gets the part that it holds: a reduce-scatter.
    """
    return _gather(w, route, dim, jnp.dtype(dtype), w.dtype) if route.axes else w.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(w: Array, route: Route, dim: int, dtype: Any, stored: Any) -> Array:
    return route.gather(w.astype(dtype), dim)


def _gather_backward(route: Route, dim: int, dtype: Any, stored: Any, _: None, dw: Array) -> tuple[Array]:
    return (route.scatter(dw.astype(stored), dim),)


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


def local_positions(length: int, axis: str | None) -> Int[Array, " t"]:
    """Return the places, in a sequence of `length` tokens, of those on this device; of all without an axis."""
    if axis is None:
        return jnp.arange(length)
    return jnp.asarray(_zigzag(length, lax.axis_size(axis)))[lax.axis_index(axis)]


def context_attention(
    q_BTHh: Float[Array, "B t H h"],
    k_BTKh: Float[Array, "B t K h"],
    v_BTKh: Float[Array, "B t K h"],
    *,
    axis: str,
    implementation: Implementation = "auto",
) -> Float[Array, "B t H h"]:
    """Compute `causal_attention` of one device's queries, at `local_positions`, over everybody's keys and values.

    Keys and values, which have few heads, are gathered; the queries stay where they are. "auto" chooses as
    `causal_attention` does, with Splash where a piece is a multiple of its block. Raises ValueError for "cudnn".
    """
    devices, t = lax.axis_size(axis), q_BTHh.shape[1]
    k_BSKh, v_BSKh = (_in_order(lax.all_gather(a, axis), devices) for a in (k_BTKh, v_BTKh))
    if implementation == "cudnn":
        raise ValueError("implementation='cudnn' computes whole sequences: with context parallelism use 'tiled'.")
    if implementation == "auto":
        implementation = choose_attention(t, tpu="TPU" in compiling_for(), block=2 * SPLASH_BLOCK)
    places = _zigzag(t * devices, devices)
    if implementation == "splash":
        check_splash(t)
        return through_kernel(_own_rows(splash_kernel(q_BTHh.shape[2], places), axis), q_BTHh, k_BSKh, v_BSKh)
    positions_BT = jnp.broadcast_to(jnp.asarray(places)[lax.axis_index(axis)], q_BTHh.shape[:2])
    if implementation == "tiled":
        pairs = jnp.asarray(_pairs_of_devices(places))[lax.axis_index(axis)]
        return attend_in_tiles(q_BTHh, k_BSKh, v_BSKh, positions_BT, None, pairs)
    return causal_attention(q_BTHh, k_BSKh, v_BSKh, q_positions=positions_BT, implementation=implementation)


def _pairs_of_devices(places: Int[np.ndarray, "devices t"]) -> Int[np.ndarray, "devices P 2"]:
    """Return each device's visible pairs of tiles, as many as the others': the rest, beyond all keys, nobody sees."""
    lists = [visible_pairs(places_T, places.size) for places_T in places]
    beyond = [(0, -(-places.size // KEY_TILE))]
    return np.array([pairs + beyond * (max(map(len, lists)) - len(pairs)) for pairs in lists], np.int32)


def _own_rows(kernel: Any, axis: str) -> Any:
    """Return Splash's kernel for this device's queries: of its tables, which are in devices' order, the own rows."""
    devices = lax.axis_size(axis)

    def rows(table: Array) -> Array:
        dim = 1 if table.ndim == 3 else 0  # [heads, queries, keys] in blocks, or the places of queries
        count = table.shape[dim] // devices
        return lax.dynamic_slice_in_dim(table, lax.axis_index(axis) * count, count, dim)

    return jax.tree.map(rows, kernel)


def _zigzag(length: int, devices: int) -> np.ndarray:
    """Return positions `[devices, length / devices]`: each device's two pieces."""
    pieces = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return np.concatenate([pieces[:devices], pieces[: devices - 1 : -1]], axis=1)


def _in_order(a: Array, devices: int) -> Array:
    """Return `[devices, B, t, ..]`, two pieces from each device, as `[B, T, ..]` in the order of the sequence."""
    first, second = jnp.split(a, 2, axis=2)
    pieces = jnp.concatenate([first, second[::-1]])
    return jnp.moveaxis(pieces, 0, 1).reshape(a.shape[1], devices * a.shape[2], *a.shape[3:])


class SplitMatrix(Matrix):
    """A part along D, which is the axis `dim`, of what the devices of the `route` have together.

    Over `tensor_axis` each device has its heads, or its part of F.
    """

    route: Route
    dim: int
    tensor_axis: str | None

    def ready(self, dtype: Any) -> Matrix:
        """Return the matrix whole along D; its gradient is summed over the devices, and each gets its part."""
        w = gather(self[...], self.route, self.dim, dtype)
        if self.tensor_axis is None:
            return Matrix(w, n_in=self.n_in)
        return SummandMatrix(w, n_in=self.n_in, tensor_axis=self.tensor_axis)


class SummandMatrix(Matrix):
    """The inputs of the devices of `tensor_axis` are parts of the whole, so what they compute is to be summed."""

    tensor_axis: str
    is_whole = False

    def total(self, out: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the sum of what the devices computed."""
        return leave(out, self.tensor_axis)


class SplitTable(Table):
    """Some columns of what the devices of the `route` have together, and some rows over `tensor_axis`."""

    route: Route
    tensor_axis: str | None

    @property
    def vocab_axis(self) -> str | None:  # pyrefly: ignore
        """The mesh axis whose devices have some rows each."""
        return self.tensor_axis

    def ready(self, dtype: Any) -> "SplitTable":
        """Return this device's rows, whole along D."""
        return SplitTable(gather(self[...], self.route, 1, dtype), route=Route((), ()), tensor_axis=self.tensor_axis)

    def look_up(self, ids: Int[Array, "*N"], dtype: Any) -> Float[Array, "*N D"]:
        """Return rows for own ids; no device ever holds the table whole."""
        return look_up(self[...].astype(dtype), ids.astype("int32"), self.route.axes, self.tensor_axis)


class EnteringNorm(Norm):
    """A norm whose result every device of `tensor_axis` reads for its part: gradients are summed here, once."""

    tensor_axis: str

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        """Return the norm; in the backward pass its gradients, one of each part, are summed."""
        return enter(super().__call__(x), self.tensor_axis)


@dataclasses.dataclass(frozen=True)
class ContextAttend(Attend):
    """How one device's queries meet everybody's keys and values, where the devices of `axis` share a sequence."""

    axis: str = "context"

    def own(self, tokens_BT: Int[Array, "B T"]) -> tuple[Int[Array, "B t"], Int[Array, " t"]]:
        """Return the tokens of this device, and where in the sequence they stand."""
        positions_T = local_positions(tokens_BT.shape[1], self.axis)
        return tokens_BT[:, positions_T], positions_T

    def __call__(self, q_BTHh: Array, k_BTKh: Array, v_BTKh: Array, segments_BT: Array | None = None) -> Array:
        """Return what each query found. Raise ValueError for packed documents."""
        if segments_BT is not None:
            raise ValueError(
                "segments_BT: packed documents are not computed with context parallelism. Give every document a "
                "sequence of its own, or choose a mesh with context=1."
            )
        return context_attention(q_BTHh, k_BTKh, v_BTKh, axis=self.axis, implementation=self.implementation)


def split(model: Llama, mesh: MeshShape) -> Llama:
    """Put the weights of one device of a mesh in the place of plain ones; return the model, which is changed.

    Its arrays are this device's parts already. Raise ValueError outside of the mesh.
    """
    _check_inside(mesh)
    route, tensor_axis, blocks = route_over(mesh, mesh.over("d_model")), mesh.tensor_axis, model.blocks
    for name in MATRICES:
        matrix, names = getattr(blocks, name), PARAMETERS[name]
        if isinstance(matrix, QuantizedMatrix):  # whole on every device
            continue
        summed = tensor_axis if names[-1] == "d_model" else None
        part = SplitMatrix(matrix[...], n_in=matrix.n_in, route=route, dim=names.index("d_model"), tensor_axis=summed)
        setattr(blocks, name, part)
    for name in ("embedding", "untied_head"):
        if hasattr(model, name):
            setattr(model, name, SplitTable(getattr(model, name)[...], route=route, tensor_axis=tensor_axis))
    for name in ("attn_norm", "mlp_norm") if tensor_axis else ():
        norm = getattr(blocks, name)
        setattr(blocks, name, EnteringNorm(norm[...], eps=norm.eps, tensor_axis=tensor_axis))
    if mesh.context_axis:
        model.attend = ContextAttend(model.plan.attention, mesh.context_axis)
    return model


def _check_inside(mesh: MeshShape) -> None:
    """Raise ValueError where the function that calls this is not the program of one device of such a mesh."""
    try:
        sizes = {name: lax.axis_size(name) for name in mesh.axes}
    except NameError:
        sizes = {}
    if sizes != mesh.axes:
        raise ValueError(
            f"the plan's mesh has the axes {mesh.axes}, and this is computed outside of it. A training step goes "
            "there by itself; to call the model, give it a plan without a mesh: JAX then shares the work out by "
            "itself, after where the weights lie."
        )
