"""Tiles: run a function on slices of the leading axis, one after the other: only one slice's workspace is alive.

`tiled_map` maps rows, such as the tokens of a feed-forward; `tiled_sum` adds up one number per tile and makes its
gradients on the way. `fold_tiles` is the loop under both, and under the losses. Autodiff of a loop would add up the
gradients of shared weights in their own type, so that many tiles of bf16 lose bits: both let them grow in f32.

Inside `shard_map` a value's type says over which mesh axes it differs. A loop's carry must keep that type, and so must
the gradients that a custom rule returns: what is the same on all devices is said to differ before it meets what does.
The gradient of this step is the sum over those axes. With `check_vma=False` nothing is said, and nothing is done.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxmem.common.checks import check_whole
from llamem.layers.custom_rules import add_to, cast_like, vjp_of, wide_zeros, with_rule
from llamem.layers.module_state import Watch, changed_by, variables_in


def varying_axes(array: Any) -> frozenset[str]:
    """Return the mesh axes over which a value inside `jax.shard_map` is said to differ; none with `check_vma=False`."""
    aval = jax.typeof(array)
    return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying  # its name in JAX 0.10


def axes_of(tree: Any) -> frozenset[str]:
    """Return the mesh axes over which any of the arrays in a tree differs."""
    return frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(tree)))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """Return the same arrays, said to differ over these axes, too."""

    def vary_leaf(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return _differing(leaf, missing) if missing else leaf

    return jax.tree.map(vary_leaf, tree) if axes else tree


def vary_together(*trees: Any) -> tuple:
    """Return trees of arrays, all said to differ over the axes over which any of them does."""
    return vary(trees, axes_of(trees))


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """Return the mesh of the first array in a tree that lies on one with Explicit axes; None where there is none."""
    for leaf in jax.tree.leaves(tree):
        mesh = jax.typeof(leaf).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def devices_of_compiler(tree: Any) -> int:
    """Return the number of devices among which the compiler divides the work on these arrays.

    It is 1 on one device, and inside `jax.shard_map`, where the program divides the work.
    """

    def count(mesh: AbstractMesh) -> int:
        axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
        return math.prod(size for size, kind in axes if kind != AxisType.Manual)

    return max(count(jax.typeof(leaf).sharding.mesh) for leaf in jax.tree.leaves(tree))


def partitioned(fn: Callable, specs: Any, *args: Any) -> Any:
    """Return `fn(*args)`; on a mesh with Explicit axes the compiler divides the work, results sharded as `specs`.

    A tile that is cut out of a sharded axis has no sharding that its type could say.
    """
    mesh = explicit_mesh(args)
    if mesh is None:
        return fn(*args)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.sharding.auto_axes(fn, out_sharding=shardings)(*args)


def _differing(leaf: Any, axes: tuple[str, ...]) -> Any:
    if hasattr(lax, "pcast"):
        return lax.pcast(leaf, axes, to="varying")
    return vars(lax)["pvary"](leaf, axes)  # its name in JAX 0.7


__all__ = ["fold_tiles", "scaled", "sum_tiles", "tile_size", "tiled_map", "tiled_sum"]


def tile_size(length: int, num_tiles: int, align: int = 1) -> int:
    """Return the rows per tile: `length / num_tiles` rounded up, then to a multiple of `align`, at most `length`."""
    rows = -(-length // check_whole("num_tiles", num_tiles))
    return max(1, min(length, -(-rows // align) * align))


def _leading_length(xs: PyTree) -> int:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(xs)]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        raise ValueError(
            f"Every array to tile needs the same leading axis, got shapes {shapes}. "
            "Pass what all tiles share (weights, scalars) as parameters instead."
        )
    return shapes[0][0]


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


def fold_tiles(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    xs: PyTree,
    num_tiles: int,
    *,
    align: int = 1,
    devices: int = 1,
) -> tuple[PyTree, PyTree]:
    """Run `lax.scan` over tiles of the leading axis: `carry, rows = fn(carry, tile)`, rows joined again.

    Tiles are sliced out of `xs`, and their rows written into place, so nothing of full size is copied. Where the
    tiles do not divide the axis the last one is shorter; it is the first to be folded. `fn` is then traced twice: no
    padding reaches it.

    On a mesh a tile of rows that follow each other would lie on one device, and all would work at it. So for several
    `devices` a tile has some rows of each device's share.

    Args:
        fn: takes the carry and a tile of `xs` (`[rows, ...]` each), returns the carry and a tree of `[rows, ...]`.
        init: the first carry.
        xs: tree of arrays `[N, ...]`.
        num_tiles: about how many tiles; rows per tile are `tile_size(N, num_tiles, align)`.
        align: rows per tile are a multiple of this, except in the last tile.
        devices: among which the compiler divides the work, as `devices_of_compiler` finds it.

    Returns:
        The last carry, and the tree of rows `[N, ...]`.
    """
    length = _leading_length(xs)
    if (shares := math.gcd(length, devices)) > 1:  # whatever divides the axis is a part of them
        return _fold_shares(fn, init, xs, num_tiles, align, shares)
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


def _fold_shares(
    fn: Callable, init: PyTree, xs: PyTree, num_tiles: int, align: int, shares: int
) -> tuple[PyTree, PyTree]:
    """Fold tiles that have some rows of each share, in the order of shares."""

    def side_by_side(rows: PyTree) -> PyTree:  # [shares * n, ...] to [n, shares, ...]
        return jax.tree.map(lambda a: jnp.moveaxis(a.reshape(shares, -1, *a.shape[1:]), 0, 1), rows)

    def in_a_row(rows: PyTree) -> PyTree:
        return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(-1, *a.shape[2:]), rows)

    def step(carry: PyTree, tile: PyTree) -> tuple[PyTree, PyTree]:
        carry, rows = fn(carry, in_a_row(tile))
        return carry, side_by_side(rows)

    carry, rows = fold_tiles(step, init, side_by_side(xs), num_tiles, align=max(1, align // shares))
    return carry, in_a_row(rows)


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
    _leading_length(xs)
    devices = devices_of_compiler((params, xs))
    _check_no_state(fn, params, xs)

    def rows_of(params: PyTree, tile: PyTree) -> PyTree:
        out, rows = fn(_of_this_trace(params), tile), _leading_length(tile)
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
    return sum_tiles(fn, params, xs, num_tiles, devices_of_compiler((params, xs)))


def sum_tiles(fn: Callable[[Any, Any], Array], params: PyTree, xs: PyTree, num_tiles: int, devices: int = 1) -> Array:
    """Return `tiled_sum`, of tiles that have some rows of the share of each of `devices`."""
    params, xs = jax.tree.map(jnp.asarray, (params, xs))
    rows = tile_size(_leading_length(xs), num_tiles)
    _check_no_state(fn, params, xs)

    def sum_of(params: PyTree, tile: PyTree) -> Array:
        return fn(_of_this_trace(params), tile)

    def of_device(params: PyTree, xs: PyTree) -> Array:
        args = params, xs = vary_together(params, xs)
        total = jax.eval_shape(lambda *args: sum_of(args[0], jax.tree.map(lambda x: x[:rows], args[1])), params, xs)
        if getattr(total, "shape", None) != () or not jnp.issubdtype(total.dtype, jnp.floating):
            raise ValueError(f"fn must return one real number for a tile, got {total}. Sum over the tile's rows.")
        wide = jnp.promote_types(total.dtype, jnp.float32)

        def value(params: PyTree, xs: PyTree) -> Array:
            start = jnp.zeros((), wide)

            def step(total: Array, tile: Any) -> tuple[Array, tuple]:
                return total + sum_of(params, tile), ()

            return fold_tiles(step, start, xs, num_tiles, devices=devices)[0]

        def forward(wanted: PyTree, frozen: PyTree) -> tuple[Array, PyTree]:
            (params, xs), (frozen_params, frozen_xs) = wanted, frozen

            def add(carry: tuple[Array, PyTree], tile: Any) -> tuple[tuple[Array, PyTree], PyTree]:
                (total, d_params), (x, frozen_x) = carry, tile
                of_tile, pull = vjp_of(sum_of, (params, x), (frozen_params, frozen_x))
                d_params_of_tile, dx = pull(jnp.ones_like(of_tile))
                return (total + of_tile, add_to(d_params, d_params_of_tile)), dx

            start = jnp.zeros((), wide), wide_zeros(params)
            (total, d_params), dx = fold_tiles(add, start, (xs, frozen_xs), num_tiles, devices=devices)
            return total, (d_params, dx)

        return with_rule(value, partial(scaled, jax.tree.map(jax.typeof, args)), forward)(*args)

    return partitioned(of_device, PartitionSpec(), params, xs)


def scaled(like: PyTree, gradients: PyTree, _: PyTree, cotangent: Array) -> PyTree:
    """Return gradients that were made in the forward pass times the cotangent, multiplied in the wider type."""

    def scale(gradient: Array | None, like: Any) -> Array | None:
        return None if gradient is None else (gradient * cotangent).astype(like.dtype)

    return jax.tree.map(scale, gradients, like, is_leaf=lambda gradient: gradient is None)
