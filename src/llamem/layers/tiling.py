"""Tiles: run a function on slices of its leading axis, one after the other: only one slice's workspace is alive.

`tiled_map` maps; `tiled_sum` adds up one number per tile and makes its gradients on the way. `fold_tiles` is the loop
under both, and under the losses.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

__all__ = ["fold_tiles", "tile_size", "tiled_map", "tiled_sum"]


def tile_size(length: int, num_tiles: int, align: int = 1) -> int:
    """Rows per tile: `length / num_tiles` rounded up, then up to a multiple of `align` (never above `length`)."""
    if not isinstance(num_tiles, int) or isinstance(num_tiles, bool) or num_tiles < 1:
        raise ValueError(f"num_tiles must be a whole number of at least 1, got {num_tiles!r}.")
    rows = -(-length // num_tiles)
    return max(1, min(length, -(-rows // align) * align))


def _leading_length(xs: PyTree) -> int:
    leaves = jax.tree.leaves(xs)
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
        return carry, jax.tree.map(lambda o, r: lax.dynamic_update_slice_in_dim(o, r, start, 0), out, rows)

    if full == 1 and rest == 0:
        return fn(init, xs)
    shape_of_tile = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows_per_tile, *x.shape[1:]), x.dtype), xs)
    _, rows = jax.eval_shape(fn, init, shape_of_tile)
    state = (init, jax.tree.map(lambda r: jnp.zeros((length, *r.shape[1:]), r.dtype), rows))
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
    accumulate in their own type (`tiled_sum` accumulates in float32).

    Args:
        fn: takes a tile of `xs` (`[rows, ...]` each) and returns a tree of arrays `[rows, ...]`.
        xs: tree of arrays `[N, ...]`; `num_tiles` need not divide `N`.
        num_tiles: how many tiles, at least 1.

    Source: `Blockwise Parallel Transformer` (arXiv 2305.19370), `TiledMLP` of Arctic Long Sequence Training
    (arXiv 2506.13996).
    """
    length = _leading_length(xs)
    rows_per_tile = tile_size(length, num_tiles)
    full, rest = divmod(length, rows_per_tile)
    cut = full * rows_per_tile
    remat_fn = jax.checkpoint(fn)
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
    x_leaves, x_tree = jax.tree.flatten(xs)
    p_leaves, p_tree = jax.tree.flatten(params)
    x_leaves, p_leaves = [jnp.asarray(x) for x in x_leaves], [jnp.asarray(p) for p in p_leaves]
    _leading_length(x_leaves)

    def value(p_leaves: list, x_leaves: list) -> Array:
        return jnp.asarray(fn(p_tree.unflatten(p_leaves), x_tree.unflatten(x_leaves)), accumulate_dtype)

    @jax.custom_vjp
    def total(p_leaves: list, x_leaves: list) -> Array:
        add = lambda carry, tile: (carry + value(p_leaves, tile), ())  # noqa: E731
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
        dp = [g.astype(p_values[i].dtype) for g, i in zip(dp, p_wanted, strict=True)]
        return loss, (_replace([None] * len(p_values), p_wanted, dp), _replace([None] * len(x_values), x_wanted, dx))

    def backward(grads: tuple[list, list], cotangent: Any) -> tuple[list, list]:
        return jax.tree.map(lambda g: scale_gradient(g, cotangent), grads)

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(p_leaves, x_leaves)


def scale_gradient(gradient: Array, cotangent: Any) -> Array:
    """A gradient made for cotangent 1, for another one; multiplied in the wider type, returned in the gradient's."""
    return (gradient * cotangent).astype(gradient.dtype)


def _replace(values: list, places: list[int], new: list) -> list:
    chosen = dict(zip(places, new, strict=True))
    return [chosen.get(i, value) for i, value in enumerate(values)]
