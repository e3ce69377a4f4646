"""A sum computed part by part, such as attention's over its heads; and which gradient a backward pass makes first."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from llamem.layers.custom_rules import add_to, cast_like, vjp_of, wide_zeros, with_rule


def sum_parts(fn: Callable[[Any, Any, Any], Array], shared: PyTree, parts: PyTree, dtype: Any) -> Float[Array, "..."]:
    """Sum `fn(shared, part, type)` over parts, grown in f32; in the backward pass each part is computed again.

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

    def value(shared: Any, parts: Any) -> Array:
        first = jax.eval_shape(lambda parts: fn(shared, jax.tree.map(lambda a: a[0], parts), wide), parts)
        start = jnp.zeros(first.shape, wide)
        return jax.lax.scan(lambda out, part: (out + fn(shared, part, wide), None), start, parts)[0].astype(dtype)

    def backward(wanted: Any, frozen: Any, d_out: Array) -> Any:
        (shared, parts), (frozen_shared, frozen_parts) = wanted, frozen

        def add(total: Any, part: Any) -> tuple[Any, Any]:
            part, frozen_part = part
            _, pull = vjp_of(lambda s, p: fn(s, p, dtype), (shared, part), (frozen_shared, frozen_part))
            # What `pull` keeps lies in memory as it is, and not as a wider array that it is a part of.
            d_shared, d_part = jax.lax.optimization_barrier(pull)(d_out)
            return add_to(total, d_shared), d_part

        # Not before d_out is here: else the compiler lays the zeros out while the forward pass still runs again.
        start, d_out = jax.lax.optimization_barrier((wide_zeros(shared), d_out))
        d_shared, d_parts = jax.lax.scan(add, start, (parts, frozen_parts))
        return cast_like(d_shared, shared), d_parts

    return with_rule(value, backward)(shared, parts)


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
