"""A sum computed part by part, such as attention's over its heads; and which gradient a backward pass makes first."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from llamem.layers.trees import add_to, cast_like, combine, partition, vjp_of, wide_zeros, with_rule


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


def order_gradients(x: PyTree, weights: PyTree) -> tuple[PyTree, PyTree]:
    """Return both as they are. In the backward pass the gradient of `x` is used once those of `weights` are there.

    A compiler computes a weight's gradient when somebody wants it: without this at the very end, and what it is a
    product of (the feed-forward's three `[N, F]`, a head's gradient in f32) stays until then. Nobody waits for weights
    that are not differentiated.
    """
    weights, rest = partition(weights, lambda _, leaf: jnp.issubdtype(leaf.dtype, jnp.floating))

    def forward(wanted: Any, frozen: Any) -> tuple[Any, Any]:
        return combine(wanted, frozen), jax.tree.map(lambda _: jnp.zeros(0), wanted)

    def backward(wanted: Any, _: Any, grads: Any) -> Any:
        def asked(asked: Any, gradient: Any) -> Any:
            return None if asked is None else gradient

        dx, d_weights = jax.tree.map(asked, wanted, grads, is_leaf=lambda leaf: leaf is None)
        if not jax.tree.leaves(d_weights):
            return dx, d_weights
        # d_weights past the barrier, which would keep a product from being written into the stack it belongs to.
        return jax.lax.optimization_barrier((dx, d_weights))[0], d_weights

    x, weights = with_rule(lambda x, weights: (x, weights), backward, forward)(x, weights)
    return x, combine(weights, rest)
