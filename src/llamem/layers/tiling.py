"""Tiles: run a function on slices of the leading axis, one after the other: only one slice's workspace is alive.

`tiled_map` maps rows, such as the tokens of a feed-forward; `tiled_sum` adds up one number per tile and makes its
gradients on the way. `fold_tiles` is the loop under both, and under the losses. Autodiff of a loop would add up the
gradients of shared weights in their own type, so that many tiles of bf16 lose bits: both let them grow in f32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from llamem._checks import show
from llamem.layers.trees import add_to, by_gradient, by_mark, cast_like, combine, wide_zeros, with_zeros
from llamem.layers.varying import axes_of, explicit_mesh, partitioned, vary, vary_together

__all__ = ["fold_tiles", "tile_size", "tiled_map", "tiled_sum"]


def check_num_tiles(num_tiles: Any) -> int:
    """Return the number of tiles as an int. Raise ValueError where it is no whole number of at least 1."""
    is_whole = isinstance(num_tiles, int | np.integer) and not isinstance(num_tiles, bool)
    if not is_whole or num_tiles < 1:
        raise ValueError(f"num_tiles must be a whole number of at least 1, got {num_tiles!r}.")
    return int(num_tiles)


def tile_size(length: int, num_tiles: int, align: int = 1) -> int:
    """Return the rows per tile: `length / num_tiles` rounded up, then to a multiple of `align`, at most `length`."""
    num_tiles = check_num_tiles(num_tiles)
    rows = -(-length // num_tiles)
    return max(1, min(length, -(-rows // align) * align))


def _check_callable(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"fn must be a function of params and a tile of xs, got {show(fn)} ({type(fn).__name__}).")


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
    """Run `lax.scan` over tiles of the leading axis: `carry, rows = fn(carry, tile)`, rows joined again.

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
    _, rows = jax.eval_shape(lambda: fn(init, slice_rows(0, min(rows_per_tile, length))))
    state = (init, vary(jax.tree.map(lambda r: jnp.zeros((length, *r.shape[1:]), r.dtype), rows), axes))
    if rest:
        # First, so that what it adds to zeros becomes the carry. After the loop a GPU holds both, whatever their size.
        state = step(state, full * rows_per_tile, rest)
    if full:
        starts = jnp.arange(full) * rows_per_tile
        state, _ = lax.scan(lambda state, start: (step(state, start, rows_per_tile), None), state, starts)
    return state


def tiled_map(fn: Callable[[Any, Any], Any], params: PyTree, xs: PyTree, num_tiles: int) -> PyTree:
    """Apply a row-wise function tile by tile; compute each tile again in the backward pass.

    Equal to `fn(params, xs)` wherever `fn` treats the rows of the leading axis independently, at the memory of one
    tile. Leaves that are not differentiated cost no gradient work.

    Args:
        fn: takes `params` and a tile of `xs` (`[rows, ...]` each), returns a tree of arrays `[rows, ...]`. What it
            closes over gets no gradient: pass it in `params`.
        params: tree shared by all tiles. Gradients grow in f32 (or the parameter's own type where that is wider) and
            come back in the parameters' types.
        xs: tree of arrays `[N, ...]`; `num_tiles` need not divide `N`.
        num_tiles: how many tiles, at least 1.

    Returns:
        `fn`'s tree with arrays `[N, ...]`. Reverse mode only. Raises ValueError for arrays of unequal N, for no whole
        number of tiles, and where `fn` returns something else.

    Source: `Blockwise Parallel Transformer` (arXiv 2305.19370), `TiledMLP` of Arctic Long Sequence Training
    (arXiv 2506.13996).
    """
    _check_callable(fn)
    num_tiles = check_num_tiles(num_tiles)
    _leading_length(xs)
    params, xs = _as_arrays("params", params), _as_arrays("xs", xs)

    def rows_of(params: PyTree, tile: PyTree) -> PyTree:
        out, rows = fn(params, tile), _leading_length(tile)
        if not all(_is_array(y) and jnp.shape(y)[:1] == (rows,) for y in jax.tree.leaves(out)):
            shapes = [jnp.shape(y) if _is_array(y) else type(y).__name__ for y in jax.tree.leaves(out)]
            raise ValueError(
                f"fn must return arrays [rows, ...] for a tile of {rows} rows, got {shapes}. For one number per tile "
                "use tiled_sum."
            )
        return out

    @jax.custom_vjp
    def mapped(params: PyTree, xs: PyTree) -> PyTree:
        return fold_tiles(lambda _, tile: ((), rows_of(params, tile)), (), xs, num_tiles)[1]

    def forward(params: PyTree, xs: PyTree) -> tuple[PyTree, Any]:
        values, asked = by_gradient((params, xs))
        return mapped(*values), (values, asked)

    def backward(residuals: Any, d_rows: PyTree) -> tuple[PyTree, PyTree]:
        (params, xs), (frozen_params, frozen_xs) = by_mark(*residuals)

        def add(total: PyTree, tile: Any) -> tuple[PyTree, PyTree]:
            x, frozen_x, d_tile = tile
            _, pull = jax.vjp(lambda p, x: rows_of(combine(p, frozen_params), combine(x, frozen_x)), params, x)
            d_params, dx = pull(d_tile)
            return add_to(total, d_params), dx

        d_params, d_xs = fold_tiles(add, wide_zeros(params), (xs, frozen_xs, d_rows), num_tiles)
        return with_zeros((cast_like(d_params, params), d_xs), residuals[0])

    mapped.defvjp(forward, backward, symbolic_zeros=True)
    specs = None
    if explicit_mesh((params, xs)):  # results lie as those of all rows at once would
        specs = jax.tree.map(lambda y: y.sharding.spec, jax.eval_shape(rows_of, params, xs))
    return partitioned(lambda *args: mapped(*vary_together(*args)), specs, params, xs)


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
        Scalar of `accumulate_dtype`. Reverse mode, and forward over reverse.

    Source: the gradient-in-forward of mgmalek/efficient_cross_entropy and Liger-Kernel (arXiv 2410.10989).
    """
    _check_callable(fn)
    num_tiles = check_num_tiles(num_tiles)
    accumulate_dtype = floating_type("accumulate_dtype", accumulate_dtype)
    _leading_length(xs)
    params, xs = _as_arrays("params", params), _as_arrays("xs", xs)

    def value(params: PyTree, tile: PyTree) -> Array:
        out = fn(params, tile)
        if not _is_array(out) or jnp.shape(out) != () or jnp.iscomplexobj(out):
            seen = f"{jnp.shape(out)} of {jnp.result_type(out)}" if _is_array(out) else show(out)
            raise ValueError(f"fn must return one real number for a tile, got {seen}. Sum over the tile's rows.")
        return jnp.asarray(out, accumulate_dtype)

    def of_device(params: PyTree, xs: PyTree) -> Array:
        args = vary_together(params, xs)
        types = jax.tree.map(jax.typeof, args)

        @jax.custom_vjp
        def total(params: PyTree, xs: PyTree) -> Array:
            start = jnp.zeros((), accumulate_dtype)
            return fold_tiles(lambda total, tile: (total + value(params, tile), ()), start, xs, num_tiles)[0]

        def forward(params: PyTree, xs: PyTree) -> tuple[Array, PyTree]:
            values, asked = by_gradient((params, xs))
            (params, xs), (frozen_params, frozen_xs) = by_mark(values, asked)

            def add(carry: tuple[Array, PyTree], tile: Any) -> tuple[tuple[Array, PyTree], PyTree]:
                (total, d_params), (x, frozen_x) = carry, tile
                of_tile, pull = jax.vjp(lambda p, x: value(combine(p, frozen_params), combine(x, frozen_x)), params, x)
                more, dx = pull(jnp.ones_like(of_tile))
                return (total + of_tile, add_to(d_params, more)), dx

            start = jnp.zeros((), accumulate_dtype), wide_zeros(params, accumulate_dtype)
            (loss, d_params), dx = fold_tiles(add, start, (xs, frozen_xs), num_tiles)
            gradients = jax.tree.map(lambda g: jnp.zeros(0) if g is None else g, (d_params, dx), is_leaf=_is_none)
            return loss, (gradients, asked)

        def backward(residuals: PyTree, cotangent: Array) -> PyTree:
            gradients, _ = by_mark(*residuals)

            def scaled(gradient: Array | None, like: Any) -> Array | None:  # multiplied in the wider type
                return None if gradient is None else (gradient * cotangent).astype(like.dtype)

            return with_zeros(jax.tree.map(scaled, gradients, types, is_leaf=_is_none), types)

        total.defvjp(forward, backward, symbolic_zeros=True)
        return total(*args)

    return partitioned(of_device, PartitionSpec(), params, xs)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _as_arrays(name: str, tree: PyTree) -> PyTree:
    def array(leaf: Any) -> Array:
        try:
            if _is_array(leaf):
                return jnp.asarray(leaf)
        except (TypeError, OverflowError):  # an array of words, a number too large
            pass
        raise TypeError(f"{name} must hold arrays of numbers, got {show(leaf)} ({type(leaf).__name__}).")

    return jax.tree.map(array, tree)


def _is_array(value: Any) -> bool:
    return isinstance(value, int | float | complex) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def floating_type(name: str, dtype: Any) -> np.dtype:
    """Return the argument `name` as a type that JAX has. Raise TypeError where it is no floating-point type."""
    try:
        found = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name} must be a floating-point type such as jnp.float32, got {dtype!r}.")
    return found
