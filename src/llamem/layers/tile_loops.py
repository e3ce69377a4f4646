"""The loop over tiles of the leading axis, and how arrays lie on the mesh around it.

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
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxmem.common.checks import check_whole
from llamem.layers.custom_rules import add_to, vjp_of, wide_zeros, with_rule


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


def tile_size(length: int, num_tiles: int, align: int = 1) -> int:
    """Return the rows per tile: `length / num_tiles` rounded up, then to a multiple of `align`, at most `length`."""
    rows = -(-length // check_whole("num_tiles", num_tiles))
    return max(1, min(length, -(-rows // align) * align))


def leading_length(xs: PyTree) -> int:
    """Return the length of the leading axis. Raise ValueError where the arrays have not the same."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(xs)]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        raise ValueError(
            f"Every array to tile needs the same leading axis, got shapes {shapes}. "
            "Pass what all tiles share (weights, scalars) as parameters instead."
        )
    return shapes[0][0]


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
    length = leading_length(xs)
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


def split_shares(xs: PyTree, axis: int, shares: int) -> PyTree:
    """Return arrays `[.., shares * n, ..]` as `[n, .., shares, ..]`: each slice has a row of every share of `axis`."""

    def split(a: Array) -> Array:
        sizes = shares, a.shape[axis] // shares
        return jnp.moveaxis(a.reshape(*a.shape[:axis], *sizes, *a.shape[axis + 1 :]), axis + 1, 0)

    return jax.tree.map(split, xs)


def _fold_shares(
    fn: Callable, init: PyTree, xs: PyTree, num_tiles: int, align: int, shares: int
) -> tuple[PyTree, PyTree]:
    """Fold tiles that have some rows of each share, in the order of shares."""

    def in_a_row(rows: PyTree) -> PyTree:
        return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(-1, *a.shape[2:]), rows)

    def step(carry: PyTree, tile: PyTree) -> tuple[PyTree, PyTree]:
        carry, rows = fn(carry, in_a_row(tile))
        return carry, split_shares(rows, 0, shares)

    carry, rows = fold_tiles(step, init, split_shares(xs, 0, shares), num_tiles, align=max(1, align // shares))
    return carry, in_a_row(rows)


def sum_tiles(fn: Callable[[Any, Any], Array], params: PyTree, xs: PyTree, num_tiles: int, devices: int = 1) -> Array:
    """Return what `llamem.tiled_sum` documents, of tiles that have some rows of the share of each of `devices`."""
    params, xs = jax.tree.map(jnp.asarray, (params, xs))
    rows = tile_size(leading_length(xs), num_tiles)

    def of_device(params: PyTree, xs: PyTree) -> Array:
        args = params, xs = vary_together(params, xs)
        total = jax.eval_shape(lambda *args: fn(args[0], jax.tree.map(lambda x: x[:rows], args[1])), params, xs)
        if getattr(total, "shape", None) != () or not jnp.issubdtype(total.dtype, jnp.floating):
            raise ValueError(f"fn must return one real number for a tile, got {total}. Sum over the tile's rows.")
        wide = jnp.promote_types(total.dtype, jnp.float32)

        def value(params: PyTree, xs: PyTree) -> Array:
            start = jnp.zeros((), wide)

            def step(total: Array, tile: Any) -> tuple[Array, tuple]:
                return total + fn(params, tile), ()

            return fold_tiles(step, start, xs, num_tiles, devices=devices)[0]

        def forward(wanted: PyTree, frozen: PyTree) -> tuple[Array, PyTree]:
            (params, xs), (frozen_params, frozen_xs) = wanted, frozen

            def add(carry: tuple[Array, PyTree], tile: Any) -> tuple[tuple[Array, PyTree], PyTree]:
                (total, d_params), (x, frozen_x) = carry, tile
                of_tile, pull = vjp_of(fn, (params, x), (frozen_params, frozen_x))
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
