"""Tiles: run a function on slices of its leading axis, one after the other: only one slice's workspace is alive.

`tiled_map` maps; `tiled_sum` adds up one number per tile and makes its gradients on the way. `fold_tiles` is the loop
under both, and under the losses.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from llamem.layers.varying import axes_of, explicit_mesh, partitioned, vary, vary_together

__all__ = ["fold_tiles", "tile_size", "tiled_map", "tiled_sum"]


def check_num_tiles(num_tiles: Any) -> int:
    """The number of tiles as an int. Raises ValueError where it is no whole number of at least 1."""
    is_whole = isinstance(num_tiles, int | np.integer) and not isinstance(num_tiles, bool)
    if not is_whole or num_tiles < 1:
        raise ValueError(f"num_tiles must be a whole number of at least 1, got {num_tiles!r}.")
    return int(num_tiles)


def tile_size(length: int, num_tiles: int, align: int = 1) -> int:
    """Rows per tile: `length / num_tiles` rounded up, then up to a multiple of `align` (never above `length`)."""
    num_tiles = check_num_tiles(num_tiles)
    rows = -(-length // num_tiles)
    return max(1, min(length, -(-rows // align) * align))


def _check_callable(fn: Any, takes: str) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be a function of {takes}, got {fn!r} ({type(fn).__name__}).")


def _leading_length(xs: PyTree) -> int:
    leaves = jax.tree.leaves(xs)
    for leaf in leaves:
        if not _is_array(leaf):
            raise TypeError(f"xs must hold arrays to tile, got {leaf!r} ({type(leaf).__name__}).")
    lengths = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(
            f"Every array to tile needs the same leading axis, got shapes {[jnp.shape(leaf) for leaf in leaves]}. "
            "Pass what all tiles share (weights, scalars) as parameters instead."
        )
    return lengths.pop()[0]


def fold_tiles(
    fn: Callable[[Any, Any], tuple[Any, Any]], init: PyTree, xs: PyTree, num_tiles: int, *, align: int = 1
) -> tuple[PyTree, PyTree]:
    """`lax.scan` over tiles of the leading axis: `carry, rows = fn(carry, tile)`, rows joined again.

    Tiles are sliced out of `xs`, and their rows written into place, so nothing of full size is copied. Where the
    tiles do not divide the axis the last one is shorter; it is the first to be folded. `fn` is then traced twice: no
    padding reaches it.

    Args:
        fn: takes the carry and a tile of `xs` (`[rows, ...]` each), returns the carry and a tree of `[rows, ...]`.
        init: the first carry.
        xs: tree of arrays `[N, ...]`.
        num_tiles: about how many tiles; rows per tile are `tile_size(N, num_tiles, align)`.
        align: rows per tile are a multiple of this, except in the last tile.

    Returns:
        The last carry, and the tree of rows `[N, ...]`.
    """
    length = _leading_length(xs)
    rows_per_tile = tile_size(length, num_tiles, align)
    full, rest = divmod(length, rows_per_tile)

    def slice_rows(start: Any, count: int) -> PyTree:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, count), xs)

    def step(state: tuple, start: Any, count: int) -> tuple:
        carry, out = state
        carry, rows = fn(carry, slice_rows(start, count))
        return vary(carry, axes), jax.tree.map(lambda o, r: lax.dynamic_update_slice_in_dim(o, r, start, 0), out, rows)

    if full == 1 and rest == 0:
        return fn(init, xs)
    axes = axes_of((init, xs))
    init = vary(init, axes)
    shape_of_tile = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows_per_tile, *x.shape[1:]), x.dtype), xs)
    _, rows = jax.eval_shape(fn, init, shape_of_tile)
    state = (init, vary(jax.tree.map(lambda r: jnp.zeros((length, *r.shape[1:]), r.dtype), rows), axes))
    if rest:
        # First, so that what it adds to zeros becomes the carry. After the loop a GPU holds both, whatever their size.
        state = step(state, full * rows_per_tile, rest)
    if full:
        starts = jnp.arange(full) * rows_per_tile
        state, _ = lax.scan(lambda state, start: (step(state, start, rows_per_tile), None), state, starts)
    return state


def tiled_map(fn: Callable[[Any], Any], xs: PyTree, num_tiles: int) -> PyTree:
    """Apply a row-wise function tile by tile; in the backward pass each tile is computed again.

    Equal to `fn(xs)` wherever `fn` treats the rows of the leading axis independently, at the memory of one tile.
    Differentiable in every way `fn` is, in `xs` and in whatever `fn` closes over; gradients of closed-over arrays
    accumulate in their own type (`map_rows` and `tiled_sum` accumulate in float32).

    Args:
        fn: takes a tile of `xs` (`[rows, ...]` each) and returns a tree of arrays `[rows, ...]`.
        xs: tree of arrays `[N, ...]`; `num_tiles` need not divide `N`.
        num_tiles: how many tiles, at least 1.

    Source: `Blockwise Parallel Transformer` (arXiv 2305.19370), `TiledMLP` of Arctic Long Sequence Training
    (arXiv 2506.13996).
    """
    _check_callable(fn, "a tile of xs")
    length = _leading_length(xs)
    if explicit_mesh(xs) and any(jax.typeof(x).sharding.spec[:1] not in ((), (None,)) for x in jax.tree.leaves(xs)):
        raise ValueError(
            "tiled_map cannot cut tiles out of an axis that is sharded over Explicit mesh axes, since what fn closes "
            "over lies there too. Call it inside jax.shard_map, or inside jax.sharding.auto_axes."
        )
    rows_per_tile = tile_size(length, num_tiles)
    full, rest = divmod(length, rows_per_tile)
    cut = full * rows_per_tile

    def rows_of(tile: PyTree) -> PyTree:
        out = fn(tile)
        rows = _leading_length(tile)
        if not all(_is_array(y) and jnp.shape(y)[:1] == (rows,) for y in jax.tree.leaves(out)):
            shapes = [jnp.shape(y) if _is_array(y) else type(y).__name__ for y in jax.tree.leaves(out)]
            raise ValueError(
                f"fn must return arrays [rows, ...] for a tile of {rows} rows, got {shapes}. For one number per tile "
                "use tiled_sum."
            )
        return out

    remat_fn = jax.checkpoint(rows_of)
    if full == 1 and not rest:
        return remat_fn(xs)
    # Unlike fold_tiles: autodiff of a slice inside the loop would add a full-size gradient per tile.
    head = jax.tree.map(lambda x: x[:cut].reshape(full, rows_per_tile, *x.shape[1:]), xs)
    out = jax.tree.map(lambda y: y.reshape(cut, *y.shape[2:]), lax.map(remat_fn, head))
    if not rest:
        return out
    tail = remat_fn(jax.tree.map(lambda x: x[cut:], xs))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), out, tail)


def tiled_sum(
    fn: Callable[[Any, Any], Array], params: PyTree, xs: PyTree, num_tiles: int, *, accumulate_dtype: Any = jnp.float32
) -> Array:
    """Sum `fn(params, tile)` over tiles, with the gradients made tile by tile during the forward pass.

    A gradient that is wanted is computed while the tile's activations are alive, so the backward pass computes
    nothing again: it multiplies by the cotangent of the sum. Frozen leaves (integers, `stop_gradient`, arguments that
    are not differentiated) cost no gradient work, and without differentiation nothing but the sum is computed.

    Args:
        fn: differentiable; takes `params` and a tile of `xs` (`[rows, ...]` each), returns a scalar. What it closes
            over gets no gradient: pass it in `params`.
        params: tree shared by all tiles. Gradients accumulate in `accumulate_dtype` (or the parameter's own type where
            that is wider) and come back in the parameters' types.
        xs: tree of arrays `[N, ...]`; `num_tiles` need not divide `N`.
        num_tiles: how many tiles, at least 1.
        accumulate_dtype: type of the running sum and of the parameters' gradients while they grow.

    Returns:
        Scalar of `accumulate_dtype`. Reverse mode only; for forward mode use `tiled_map`.

    Source: the gradient-in-forward of mgmalek/efficient_cross_entropy and Liger-Kernel (arXiv 2410.10989).
    """
    _check_callable(fn, "params and a tile of xs")
    num_tiles = check_num_tiles(num_tiles)
    accumulate_dtype = floating_type("accumulate_dtype", accumulate_dtype)
    _leading_length(xs)
    x_leaves, x_tree = jax.tree.flatten(xs)
    p_leaves, p_tree = jax.tree.flatten(params)
    x_leaves, p_leaves = [_as_array("xs", x) for x in x_leaves], [_as_array("params", p) for p in p_leaves]
    types = [p.dtype for p in p_leaves], [x.dtype for x in x_leaves]

    def value(p_leaves: list, x_leaves: list) -> Array:
        out = fn(p_tree.unflatten(p_leaves), x_tree.unflatten(x_leaves))
        if not _is_array(out) or jnp.shape(out) != () or jnp.iscomplexobj(out):
            seen = (
                f"{jnp.shape(out)} of {jnp.result_type(out)}" if _is_array(out) else f"{out!r} ({type(out).__name__})"
            )
            raise ValueError(f"fn must return one real number for a tile, got {seen}. Sum over the tile's rows.")
        return jnp.asarray(out, accumulate_dtype)

    @jax.custom_vjp
    def total(p_leaves: list, x_leaves: list) -> Array:
        def add(carry: Array, tile: list) -> tuple[Array, tuple]:
            return carry + value(p_leaves, tile), ()

        return fold_tiles(add, jnp.zeros((), accumulate_dtype), x_leaves, num_tiles)[0]

    def forward(p_args: list, x_args: list) -> tuple[Array, tuple[list, list]]:
        p_values, x_values = [p.value for p in p_args], [x.value for x in x_args]
        p_wanted = [i for i, p in enumerate(p_args) if p.perturbed]
        x_wanted = [i for i, x in enumerate(x_args) if x.perturbed]

        def add(carry: tuple, tile: list) -> tuple[tuple, list]:
            def of_wanted(p: list, x: list) -> Array:
                return value(_replace(p_values, p_wanted, p), _replace(tile, x_wanted, x))

            loss, pull = jax.vjp(of_wanted, [p_values[i] for i in p_wanted], [tile[i] for i in x_wanted])
            dp, dx = pull(jnp.ones_like(loss))
            return (carry[0] + loss, [a + g.astype(a.dtype) for a, g in zip(carry[1], dp, strict=True)]), dx

        wide = [
            jnp.zeros(p.shape, jnp.promote_types(p.dtype, accumulate_dtype)) for p in (p_values[i] for i in p_wanted)
        ]
        (loss, dp), dx = fold_tiles(add, (jnp.zeros((), accumulate_dtype), wide), x_values, num_tiles)
        return loss, (_replace([None] * len(p_values), p_wanted, dp), _replace([None] * len(x_values), x_wanted, dx))

    def backward(grads: tuple[list, list], cotangent: Any) -> tuple:
        dp, dx = (
            [scale_gradient(g, cotangent, dtype) for g, dtype in zip(*pair, strict=True)]
            for pair in zip(grads, types, strict=True)
        )
        return dp, dx

    total.defvjp(forward, backward, symbolic_zeros=True)
    return partitioned(lambda *leaves: total(*vary_together(*leaves)), PartitionSpec(), p_leaves, x_leaves)


def scale_gradient(gradient: Array | None, cotangent: Array, dtype: Any) -> Array | None:
    """A gradient made for a cotangent of 1, for this one; multiplied in the wider type of both, returned in `dtype`."""
    return None if gradient is None else (gradient * cotangent).astype(dtype)


def _as_array(name: str, leaf: Any) -> Array:
    try:
        if _is_array(leaf):
            return jnp.asarray(leaf)
    except (TypeError, OverflowError):  # an array of words, a number too large
        pass
    raise TypeError(f"{name} must hold arrays of numbers, got {leaf!r} ({type(leaf).__name__}).")


def _is_array(value: Any) -> bool:
    return isinstance(value, int | float | complex) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def floating_type(name: str, dtype: Any) -> np.dtype:
    """The argument `name` as a type that JAX has. Raises TypeError where it is no floating-point type."""
    try:
        found = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name} must be a floating-point type such as jnp.float32, got {dtype!r}.")
    return found


def _replace(values: list, places: list[int], new: list) -> list:
    chosen = dict(zip(places, new, strict=True))
    return [chosen.get(i, value) for i, value in enumerate(values)]
