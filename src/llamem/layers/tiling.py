"""Tiles: run a function on slices of the leading axis, one after the other: only one slice's workspace is alive.

`tiled_map` maps rows, such as the tokens of a feed-forward; `tiled_sum` adds up one number per tile and makes its
gradients on the way. Autodiff of a loop would add up the gradients of shared weights in their own type, so that many
tiles of bf16 lose bits: both let them grow in f32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from llamem.layers.custom_rules import add_to, cast_like, vjp_of, wide_zeros, with_rule
from llamem.layers.module_state import Watch, changed_by, variables_in
from llamem.layers.tile_loops import (
    devices_of_compiler,
    explicit_mesh,
    fold_tiles,
    leading_length,
    partitioned,
    sum_tiles,
    vary_together,
)

__all__ = ["tiled_map", "tiled_sum"]


def _check_no_state(fn: Callable[[Any, Any], Any], params: PyTree, xs: PyTree) -> None:
    """Raise ValueError where `fn` sets a variable of an nnx module in `params`: a tile's own, and gone with it."""
    variables = variables_in(params)
    if all(isinstance(variable, nnx.Param) for variable in variables):
        return

    def assigned(params: PyTree, xs: PyTree) -> Any:
        state = Watch(params)
        fn(params, xs)
        return state.assigned()

    traced, values = jax.make_jaxpr(assigned, return_shape=True)(params, xs)
    if changed := changed_by(traced.jaxpr, values):
        kinds = dict.fromkeys(type(variables[i]).__name__ for i in changed)
        raise ValueError(
            f"fn sets {', '.join(kinds)} of a module in params, which would be lost: each step would draw the same "
            "random numbers, or no statistic would ever move. Draw inside of fn from keys that are given in xs, one "
            "for each row; statistics over rows are of no tile. Or switch the module to evaluation: module.eval()."
        )


def _of_this_trace(params: PyTree) -> PyTree:
    """Return new modules of the same arrays: a part in `nnx.jit` or `nnx.remat` sets no variables of an outer trace."""
    return jax.tree.map(lambda leaf: leaf, params)


def tiled_map(fn: Callable[[Any, Any], Any], params: PyTree, xs: PyTree, num_tiles: int) -> PyTree:
    """Apply a row-wise function tile by tile; compute each tile again in the backward pass.

    Equal to `fn(params, xs)` wherever `fn` treats the rows of the leading axis independently, at the memory of one
    tile. Leaves that are not differentiated cost no gradient work.

    On a mesh, under `jax.jit` alone, a tile has some rows of each device's share of the leading axis.

    Args:
        fn: takes `params` and a tile of `xs` (`[rows, ...]` each), returns a tree of arrays `[rows, ...]`. What it
            closes over gets no gradient: pass it in `params`.
        params: tree shared by all tiles. Gradients grow in f32 (or the parameter's own type where that is wider) and
            come back in the parameters' types.
        xs: tree of arrays `[N, ...]`; `num_tiles` need not divide `N`.
        num_tiles: how many tiles, at least 1.

    Returns:
        `fn`'s tree with arrays `[N, ...]`. Reverse mode only. Raises ValueError for arrays of unequal N, for no whole
        number of tiles, and where `fn` returns something else or sets state of an nnx module in `params`.

    Source: `Blockwise Parallel Transformer` (arXiv 2305.19370), `TiledMLP` of Arctic Long Sequence Training
    (arXiv 2506.13996).
    """
    params, xs = jax.tree.map(jnp.asarray, (params, xs))
    leading_length(xs)
    devices = devices_of_compiler((params, xs))
    _check_no_state(fn, params, xs)

    def rows_of(params: PyTree, tile: PyTree) -> PyTree:
        out, rows = fn(_of_this_trace(params), tile), leading_length(tile)
        shapes = [jnp.shape(y) for y in jax.tree.leaves(out)]
        if any(shape[:1] != (rows,) for shape in shapes):
            raise ValueError(
                f"fn must return arrays [rows, ...] for a tile of {rows} rows, got {shapes}. For one number per tile "
                "use tiled_sum."
            )
        return out

    def value(params: PyTree, xs: PyTree) -> PyTree:
        return fold_tiles(lambda _, tile: ((), rows_of(params, tile)), (), xs, num_tiles, devices=devices)[1]

    def backward(wanted: PyTree, frozen: PyTree, d_rows: PyTree) -> tuple[PyTree, PyTree]:
        (params, xs), (frozen_params, frozen_xs) = wanted, frozen

        def add(total: PyTree, tile: Any) -> tuple[PyTree, PyTree]:
            x, frozen_x, d_tile = tile
            _, pull = vjp_of(rows_of, (params, x), (frozen_params, frozen_x))
            d_params, dx = pull(d_tile)
            return add_to(total, d_params), dx

        tiles = xs, frozen_xs, d_rows
        d_params, d_xs = fold_tiles(add, wide_zeros(params), tiles, num_tiles, devices=devices)
        return cast_like(d_params, params), d_xs

    mapped = with_rule(value, backward)
    specs = None
    if explicit_mesh((params, xs)):  # results lie as those of all rows at once would
        specs = jax.tree.map(lambda y: y.sharding.spec, jax.eval_shape(rows_of, params, xs))
    return partitioned(lambda *args: mapped(*vary_together(*args)), specs, params, xs)


def tiled_sum(fn: Callable[[Any, Any], Array], params: PyTree, xs: PyTree, num_tiles: int) -> Array:
    """Sum `fn(params, tile)` over tiles, with the gradients made tile by tile during the forward pass.

    A gradient that is wanted is computed while the tile's activations are alive, so the backward pass computes
    nothing again: it multiplies by the cotangent of the sum. Frozen leaves (integers, `stop_gradient`, arguments that
    are not differentiated) cost no gradient work, and without differentiation nothing but the sum is computed.

    Args:
        fn: differentiable; takes `params` and a tile of `xs` (`[rows, ...]` each), returns a scalar. What it closes
            over gets no gradient: pass it in `params`.
        params: tree shared by all tiles. Gradients accumulate in f32 (or the parameter's own type where that is wider)
            and come back in the parameters' types.
        xs: tree of arrays `[N, ...]`; `num_tiles` need not divide `N`.
        num_tiles: how many tiles, at least 1.

    Returns:
        Scalar of f32, or of `fn`'s type where that is wider. Reverse mode, and forward over reverse.

    Source: the gradient-in-forward of mgmalek/efficient_cross_entropy and Liger-Kernel (arXiv 2410.10989).
    """
    params, xs = jax.tree.map(jnp.asarray, (params, xs))
    leading_length(xs)
    _check_no_state(fn, params, xs)

    def sum_of(params: PyTree, tile: PyTree) -> Array:
        return fn(_of_this_trace(params), tile)

    return sum_tiles(sum_of, params, xs, num_tiles, devices_of_compiler((params, xs)))
