"""Parts computed one after the other, forward and backward, whose gradients for what they share are summed in f32.

`map_rows` cuts rows, such as the tokens of a feed-forward; `sum_parts` cuts a sum, such as attention's over its heads.
Autodiff of a loop adds up gradients of shared weights in their own type, so that many tiles of bf16 lose bits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from llamem.layers.tiling import check_num_tiles, fold_tiles


def map_rows(fn: Callable[[Any, Any], Array], params: PyTree, xs: PyTree, num_tiles: int) -> Float[Array, "N *out"]:  # pyrefly: ignore
    """`fn(params, xs)` for a row-wise `fn`, tile by tile; in the backward pass each tile is computed again.

    As `tiled_map`, but gradients of `params` grow in f32 (or their own type where that is wider) and come back in the
    parameters' types. Leaves that are not differentiated cost no gradient work.

    Args:
        fn: takes `params` and a tile of `xs` (`[rows, ...]` each), returns one array `[rows, ...]`. What it closes over
            gets no gradient: pass it in `params`.
        params: tree shared by all tiles.
        xs: tree of arrays `[N, ...]`; `num_tiles` need not divide `N`.
        num_tiles: how many tiles, at least 1.

    Reverse mode only. Raises ValueError for a count that is no whole number of at least 1, and for arrays of unequal N.
    """
    num_tiles = check_num_tiles(num_tiles)

    @jax.custom_vjp
    def rows(params: Any, xs: Any) -> Array:
        return fold_tiles(lambda _, tile: ((), fn(params, tile)), (), xs, num_tiles)[1]

    def forward(params: Any, xs: Any) -> tuple[Array, Any]:
        return rows(*_values((params, xs))), (_wanted((params, xs)), _frozen((params, xs)))

    def backward(residuals: Any, d_rows: Array) -> Any:
        (params, xs), (frozen_params, frozen_xs) = residuals

        def add(total: Any, tile: Any) -> tuple[Any, Any]:
            x, frozen_x, d_tile = tile
            _, pull = jax.vjp(lambda p, x: fn(_join(p, frozen_params), _join(x, frozen_x)), params, x)
            d_params, dx = pull(d_tile)
            return _add(total, d_params), dx

        total, d_xs = fold_tiles(add, _wide_zeros(params), (xs, frozen_xs, d_rows), num_tiles)
        return _as_types_of(params, total), d_xs

    rows.defvjp(forward, backward, symbolic_zeros=True)
    return rows(params, xs)


def sum_parts(fn: Callable[[Any, Any, Any], Array], shared: PyTree, parts: PyTree, dtype: Any) -> Float[Array, "..."]:
    """The sum of `fn(shared, part, type)` over parts, grown in f32; in the backward pass each part is computed again.

    Args:
        fn: takes `shared`, one part and the type of its result: f32 forward, where it is added to a sum, and `dtype`
            backward, where only its gradients are asked for and wide products would be slow.
        shared: tree that all parts read. Its gradients grow in f32 and come back in its own types.
        parts: tree of arrays `[parts, ...]`.
        dtype: type of the result.

    Returns:
        One array of `dtype`, in the shape of `fn`'s. Reverse mode only; what `fn` closes over gets no gradient.
    """
    wide = jnp.promote_types(dtype, jnp.float32)

    @jax.custom_vjp
    def total(shared: Any, parts: Any) -> Array:
        first = jax.eval_shape(lambda parts: fn(shared, jax.tree.map(lambda a: a[0], parts), wide), parts)
        start = jnp.zeros(first.shape, wide)
        return jax.lax.scan(lambda out, part: (out + fn(shared, part, wide), None), start, parts)[0].astype(dtype)

    def forward(shared: Any, parts: Any) -> tuple[Array, Any]:
        return total(*_values((shared, parts))), (_wanted((shared, parts)), _frozen((shared, parts)))

    def backward(residuals: Any, d_out: Array) -> Any:
        (shared, parts), (frozen_shared, frozen_parts) = residuals

        def add(total: Any, part: Any) -> tuple[Any, Any]:
            part, frozen_part = part
            _, pull = jax.vjp(lambda s, p: fn(_join(s, frozen_shared), _join(p, frozen_part), dtype), shared, part)
            # What `pull` keeps lies in memory as it is, and not as a wider array that it is a part of.
            d_shared, d_part = jax.lax.optimization_barrier(pull)(d_out)
            return _add(total, d_shared), d_part

        # Not before d_out is here: else the compiler lays the zeros out while the forward pass still runs again.
        start, d_out = jax.lax.optimization_barrier((_wide_zeros(shared), d_out))
        d_shared, d_parts = jax.lax.scan(add, start, (parts, frozen_parts))
        return _as_types_of(shared, d_shared), d_parts

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(shared, parts)


@jax.custom_vjp
def order_gradients(x: PyTree, weights: PyTree) -> tuple[PyTree, PyTree]:
    """Return both as they are. In the backward pass the gradient of `x` is used once those of `weights` are there.

    A compiler computes a weight's gradient when somebody wants it: without this at the very end, and what it is a
    product of (the feed-forward's three `[N, F]`, a head's gradient in f32) stays until then. Both must be
    differentiated: those of weights that are not would be computed for nothing.
    """
    return x, weights


def _in_order(_: None, grads: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    dx, d_weights = grads
    # d_weights past the barrier, which would keep a product from being written into the stack it belongs to.
    return jax.lax.optimization_barrier((dx, d_weights))[0], d_weights


order_gradients.defvjp(lambda x, weights: ((x, weights), None), _in_order)


def _values(args: Any) -> Any:
    return jax.tree.map(lambda arg: arg.value, args)


def _wanted(args: Any) -> Any:
    """The arrays whose gradients are asked for; None for the others, which `_frozen` has."""
    return jax.tree.map(lambda arg: arg.value if arg.perturbed else None, args)


def _frozen(args: Any) -> Any:
    return jax.tree.map(lambda arg: None if arg.perturbed else arg.value, args)


def _join(wanted: Any, frozen: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, wanted, frozen, is_leaf=lambda a: a is None)


def _wide_zeros(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), tree)


def _add(total: Any, gradient: Any) -> Any:
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradient)


def _as_types_of(like: Any, tree: Any) -> Any:
    return jax.tree.map(lambda a, b: b.astype(a.dtype), like, tree)
