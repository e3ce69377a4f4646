"""How logits are made, and what a loss needs to know of them: for all of the vocabulary, or a tile of it."""

import dataclasses
import functools
import operator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from llamem.layers.trees import with_zeros
from llamem.layers.varying import vary_together


@dataclasses.dataclass(frozen=True)
class Softmax:
    """How logits are made, and whether their entropy is wanted. Hashable: it keys the jit cache."""

    dtype: Any  # of the factors of matrix products
    scale: float = 1.0
    softcap: float | None = None
    with_entropy: bool = False

    @property
    def wide(self) -> Any:
        """The type of logits, losses and sums: float32, or wider where the factors are."""
        return jnp.promote_types(jnp.float32, self.dtype)


class LogitSummary(NamedTuple):
    """What a loss needs to know of each token's logits, `[N]` each."""

    logsumexp: Array
    target: Array  # the logit of the token's target
    entropy: Array | None = None  # of the softmax, in nats; None where it was not asked for

    @property
    def logprob(self) -> Array:
        """The target's log-probability, in nats."""
        return self.target - self.logsumexp


def make_logits(softmax: Softmax, x_TD: Array, head: list[Array]) -> Array:
    """Return the logits `[T, V]`: products with the head's matrices, which side by side are one, scaled and capped."""
    parts = jnp.split(x_TD, np.cumsum([matrix.shape[1] for matrix in head])[:-1].tolist(), axis=1)
    with jax.named_scope("logits"):  # the timeline knows them by this name
        products = [
            _product(*vary_together(x.astype(softmax.wide), matrix.astype(softmax.wide)), softmax.dtype)
            for x, matrix in zip(parts, head, strict=True)
        ]
        z_TV = functools.reduce(operator.add, products)
    if softmax.scale != 1.0:
        z_TV = z_TV * softmax.scale
    return z_TV if softmax.softcap is None else softmax.softcap * jnp.tanh(z_TV / softmax.softcap)


def slope(softmax: Softmax, z: Array) -> Array | float:
    """Return the derivative of a logit `z` for its raw product."""
    return softmax.scale if softmax.softcap is None else softmax.scale * (1 - (z / softmax.softcap) ** 2)


def summary_of_logits(softmax: Softmax, z_TV: Array, targets_T: Array) -> LogitSummary:
    """Return the summary of logits over the whole vocabulary."""
    target_T = jnp.sum(jnp.where(jnp.arange(z_TV.shape[1]) == targets_T[:, None], z_TV, 0), -1)
    logsumexp_T = jax.nn.logsumexp(z_TV, -1)
    entropy_T = logsumexp_T - jnp.sum(jax.nn.softmax(z_TV) * z_TV, -1) if softmax.with_entropy else None
    return LogitSummary(logsumexp_T, target_T, entropy_T)


def zero_uncounted(summary: LogitSummary, weights_N: Array) -> LogitSummary:
    """Return 0 for what is not finite and has a weight of 0: it adds nothing to a sum, and 0 times it would be NaN."""
    return jax.tree.map(lambda a_N: jnp.where((weights_N == 0) & ~jnp.isfinite(a_N), 0, a_N), summary)


def scale_for_float16(softmax: Softmax, *weights_N: Array) -> Array | float:
    """Return the power of two that brings the largest weight near 1, in float16; 1.0 for other types.

    A mean over 65,536 tokens has weights of 1.5e-5, and float16 nothing below 6e-8.
    """
    if softmax.dtype != jnp.float16:
        return 1.0
    largest = jnp.max(jnp.abs(lax.stop_gradient(jnp.stack(weights_N))), initial=0)
    return jnp.ldexp(jnp.ones((), softmax.wide), -jnp.frexp(largest)[1])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x_TD: Array, w_VD: Array, dtype: Any) -> Array:
    """Return `x @ w.T` with factors of `dtype`, in the type of x and w, and its gradients likewise.

    Autodiff would multiply the float32 gradient of the logits by a head in bfloat16, which is made float32 for it.
    """
    return _dot(x_TD, w_VD, (1, 1), dtype, x_TD.dtype)


def _product_forward(x, w, dtype):
    z_TV = _dot(x.value, w.value, (1, 1), dtype, x.value.dtype)
    # What no gradient needs is not kept. Its place is: see `llamem.layers.trees.WantedGradients`.
    return z_TV, (x.value if w.perturbed else x.value[:0], w.value if x.perturbed else w.value[:0])


def _product_backward(dtype, residuals, d_TV):
    x_TD, w_VD = residuals
    if isinstance(d_TV, SymbolicZero):
        return None, None
    wide, d_TV = d_TV.dtype, d_TV.astype(dtype)
    x_TD, w_VD = (kept if len(kept) else None for kept in (x_TD, w_VD))
    if x_TD is not None and w_VD is not None:
        d_TV = lax.optimization_barrier(d_TV)  # made once for both products, and not beside a float32 one
    dx_TD = None if w_VD is None else _dot(d_TV, w_VD, (1, 0), dtype, wide)
    dw_VD = None if x_TD is None else _dot(d_TV, x_TD, (0, 0), dtype, wide)
    return with_zeros((dx_TD, dw_VD), residuals)


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


def _dot(a: Array, b: Array, contract: tuple[int, int], dtype: Any, wide: Any) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=wide)
