"""Logits, of the whole vocabulary or a tile of it, and the losses of all tokens joined by the online softmax.

The online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) carries a maximum and a sum of exponentials per token.
The gradient needs the finished sum, so a trained head makes its logits twice:

| | forward | backward | matrix products |
|---|---|---|---|
| not differentiated | summary | - | 1 |
| head trained | summary | logits again, gradients | 4 |
| head frozen | summary, gradient of logsumexp | scaling | 2; 4 where the entropy is differentiated |
"""

import dataclasses
import functools
import operator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from llamem.layers.custom_rules import WantedGradients, with_zeros
from llamem.layers.tile_loops import axes_of, fold_tiles, vary, vary_together, varying_axes


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
    """Return the logits `[.., V]`: products with the head's matrices, which side by side are one, scaled and capped."""
    parts = jnp.split(x_TD, np.cumsum([matrix.shape[1] for matrix in head])[:-1].tolist(), axis=-1)
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
    target_T = jnp.sum(jnp.where(jnp.arange(z_TV.shape[-1]) == targets_T[..., None], z_TV, 0), -1)
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
    return _dot(x_TD, w_VD, ((x_TD.ndim - 1,), (1,)), dtype, x_TD.dtype)


def _product_forward(x, w, dtype):
    z_TV = _dot(x.value, w.value, ((x.value.ndim - 1,), (1,)), dtype, x.value.dtype)
    # What no gradient needs is not kept. Its place is: see `llamem.layers.custom_rules.WantedGradients`.
    return z_TV, (x.value if w.perturbed else x.value[:0], w.value if x.perturbed else w.value[:0])


def _product_backward(dtype, residuals, d_TV):
    x_TD, w_VD = residuals
    if isinstance(d_TV, SymbolicZero):
        return None, None
    wide, d_TV = d_TV.dtype, d_TV.astype(dtype)
    x_TD, w_VD = (kept if len(kept) else None for kept in (x_TD, w_VD))
    if x_TD is not None and w_VD is not None:
        d_TV = lax.optimization_barrier(d_TV)  # made once for both products, and not beside a float32 one
    *tokens, last = range(d_TV.ndim)
    dx_TD = None if w_VD is None else _dot(d_TV, w_VD, ((last,), (0,)), dtype, wide)
    dw_VD = None if x_TD is None else _dot(d_TV, x_TD, (tokens, tokens), dtype, wide)
    return with_zeros((dx_TD, dw_VD), residuals)


_product.defvjp(_product_forward, _product_backward, symbolic_zeros=True)


def _dot(a: Array, b: Array, contract: tuple, dtype: Any, wide: Any) -> Array:
    return lax.dot_general(a.astype(dtype), b.astype(dtype), (contract, ((), ())), preferred_element_type=wide)


# A TPU's compiler lays the whole head out anew, in a copy, where tiles are no multiple of this.
_ALIGN = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What is tiled, into how many tiles, and how devices share the work. Hashable: it keys the jit cache.

    `mesh_axis`: whose devices hold some rows of the head each. `devices`: among which the compiler divides the work.
    """

    axis: Literal["tokens", "vocab"]
    count: int
    mesh_axis: str | None = None
    devices: int = 1

    def first_id(self, head: list) -> Any:
        """Return the id of the first of the head's rows that are here."""
        return 0 if self.mesh_axis is None else lax.axis_index(self.mesh_axis) * head[0].shape[0]

    def vocab(self, head: list) -> int:
        """Return the number of rows of the whole head."""
        return head[0].shape[0] * (1 if self.mesh_axis is None else lax.axis_size(self.mesh_axis))

    def fold(self, step: Any, init: Any, head: list) -> tuple[Any, Any]:
        """Fold `step(carry, (matrices, ids_U))` over tiles of the head's rows and their ids."""
        ids_V = self.first_id(head) + jnp.arange(head[0].shape[0])
        return fold_tiles(step, init, (head, ids_V), self.count, align=_ALIGN, devices=self.devices)


class _Sums(NamedTuple):
    """What one sweep over the vocabulary adds up for each token; None where it is not wanted."""

    max_N: Array
    exp_N: Array  # exp(z - max)
    exp_logit_N: Array | None  # exp(z - max) z
    exp_head_ND: Array | None  # exp(z - max) dz/dx
    target_N: Array


class _Residuals(NamedTuple):
    """What the backward pass starts from."""

    x_ND: Array
    head: list
    targets_N: Array
    sums: _Sums
    gradients: WantedGradients  # of hidden, and of the head's matrices

    @property
    def wanted(self) -> tuple[bool, list[bool]]:
        """Whether hidden's gradient is asked for, and whether those of the head's matrices are."""
        (x_ND, head), _ = self.gradients.partition((self.x_ND, self.head))
        return x_ND is not None, [matrix is not None for matrix in head]


def summary_over_tiles(
    softmax: Softmax, tiles: Tiles, x_ND: Array, head: list[Array], targets_N: Array
) -> LogitSummary:
    """Return the summary of all tokens' logits, differentiable for hidden and head.

    A token without a cotangent adds nothing to a gradient.
    """
    x_ND, head = vary((x_ND, head), axes_of((x_ND, head, targets_N)))
    return _summary(softmax, tiles, x_ND, head, targets_N)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summary(softmax: Softmax, tiles: Tiles, x_ND: Array, head: list, targets_N: Array) -> LogitSummary:
    return _summary_of_sums(_sweep(softmax, tiles, x_ND, head, targets_N))


def _sweep(
    softmax: Softmax, tiles: Tiles, x_ND: Array, head: list, targets_N: Array, *, with_gradient: bool = False
) -> _Sums:
    """Sum over the vocabulary, of all devices but for what is `[N, D]`. One product, two with hidden's gradient."""

    def step(old: _Sums, tile: tuple) -> tuple[_Sums, tuple]:
        matrices, ids_U = tile
        z_NU, pull = jax.vjp(lambda x: make_logits(softmax, x, matrices), x_ND.astype(softmax.wide))
        max_N = jnp.maximum(old.max_N, jnp.max(z_NU, -1))
        exp_NU, shrink_N = jnp.exp(z_NU - max_N[..., None]), jnp.exp(old.max_N - max_N)
        exp_logit_N, exp_head_ND = old.exp_logit_N, old.exp_head_ND
        if exp_logit_N is not None:
            exp_logit_N = exp_logit_N * shrink_N + jnp.sum(exp_NU * z_NU, -1)
        if exp_head_ND is not None:
            exp_head_ND = exp_head_ND * shrink_N[..., None] + pull(exp_NU)[0]
        exp_N = old.exp_N * shrink_N + jnp.sum(exp_NU, -1)
        target_N = old.target_N + jnp.sum(jnp.where(ids_U == targets_N[..., None], z_NU, 0), -1)
        return _Sums(max_N, exp_N, exp_logit_N, exp_head_ND, target_N), ()

    zero_N = jnp.zeros(x_ND.shape[:-1], softmax.wide)
    start = _Sums(
        jnp.full_like(zero_N, -jnp.inf),
        zero_N,
        zero_N if softmax.with_entropy else None,
        jnp.zeros(x_ND.shape, softmax.wide) if with_gradient else None,
        zero_N,
    )
    sums, _ = tiles.fold(step, start, head)
    return sums if tiles.mesh_axis is None else _join_devices(sums, tiles.mesh_axis)


def _join_devices(own: _Sums, mesh_axis: str) -> _Sums:
    """Return the sums of all devices, each of which swept over its own rows of the head; `[N, D]` stay its own."""
    max_N = lax.pmax(own.max_N, mesh_axis)
    shrink_N = jnp.exp(own.max_N - max_N)
    exp_N, target_N = lax.psum((own.exp_N * shrink_N, own.target_N), mesh_axis)
    exp_logit_N = None if own.exp_logit_N is None else lax.psum(own.exp_logit_N * shrink_N, mesh_axis)
    exp_head_ND = None if own.exp_head_ND is None else own.exp_head_ND * shrink_N[..., None]
    return _Sums(max_N, exp_N, exp_logit_N, exp_head_ND, target_N)


def _summary_of_sums(sums: _Sums) -> LogitSummary:
    logsumexp_N = sums.max_N + jnp.log(sums.exp_N)
    entropy_N = None if sums.exp_logit_N is None else logsumexp_N - sums.exp_logit_N / sums.exp_N
    return LogitSummary(logsumexp_N, sums.target_N, entropy_N)


def _forward(softmax, tiles, x, head, targets):
    # With symbolic_zeros a forward rule is told which arguments are being differentiated.
    matrices = [matrix.value for matrix in head]
    gradients = WantedGradients.of([x.perturbed, *(matrix.perturbed for matrix in head)])
    frozen = not any(matrix.perturbed for matrix in head)  # else the logits are made again, which give both gradients
    sums = _sweep(softmax, tiles, x.value, matrices, targets.value, with_gradient=frozen)
    summary = _summary_of_sums(sums)
    if not frozen:  # a place that is empty: see `WantedGradients`
        sums = sums._replace(exp_head_ND=jnp.zeros(0))
    return summary, _Residuals(x.value, matrices, targets.value, sums, gradients)


def _backward(softmax, tiles, residuals, d_summary):
    cotangents = {name: g_N for name, g_N in d_summary._asdict().items() if g_N is not None}
    cotangents = {name: g_N for name, g_N in cotangents.items() if not isinstance(g_N, SymbolicZero)}
    if not cotangents:
        return with_zeros((None, None, None), residuals[:3])
    silent_N = jnp.all(jnp.stack([g_N == 0 for g_N in cotangents.values()]), 0)  # tokens without a cotangent
    _, head_wanted = residuals.wanted
    if any(head_wanted) or "entropy" in cotangents:
        dx_ND, d_head = _gradients(softmax, tiles, residuals, cotangents, silent_N)
    else:
        dx_ND, d_head = _scaled_gradients(softmax, tiles, residuals, cotangents), None
        dx_ND = jnp.where(silent_N[..., None], 0, dx_ND).astype(residuals.x_ND.dtype)
    return with_zeros((_over_devices(tiles, dx_ND), d_head, None), residuals[:3])


def _scaled_gradients(softmax: Softmax, tiles: Tiles, residuals: _Residuals, cotangents: dict) -> Array:
    """Return hidden's gradient from the sums of the forward pass."""
    head, targets_N, sums = residuals.head, residuals.targets_N, residuals.sums
    dx_ND = jnp.zeros((), softmax.wide)
    if "logsumexp" in cotangents:
        dx_ND += (cotangents["logsumexp"] / sums.exp_N)[..., None] * sums.exp_head_ND
    if "target" in cotangents:
        own_N = targets_N - tiles.first_id(head)
        here_N = (own_N >= 0) & (own_N < head[0].shape[0])
        g_N = jnp.where(here_N, cotangents["target"] * slope(softmax, sums.target_N), 0)
        of_target_ND = jnp.concatenate([matrix[jnp.where(here_N, own_N, 0)] for matrix in head], axis=-1)
        dx_ND += g_N[..., None] * of_target_ND
    return dx_ND


def _gradients(
    softmax: Softmax, tiles: Tiles, residuals: _Residuals, cotangents: dict, silent_N: Array
) -> tuple[Array | None, list]:
    """Return the wanted gradients: one product each, and one for the logits, which are made again.

    A tile holds all tokens, so its rows of the head's gradient are complete: written once, nothing accumulates.
    """
    (x_wanted, head_wanted), sums = residuals.wanted, residuals.sums
    head, targets_N = residuals.head, residuals.targets_N
    # Else XLA sees that a remainder tile outside the loops was computed before, and keeps its logits until now.
    x_ND = lax.optimization_barrier(residuals.x_ND)
    scale = scale_for_float16(softmax, *cotangents.values())
    cotangents = {name: g_N * scale for name, g_N in cotangents.items()}
    entropy_N = _summary_of_sums(sums).entropy
    log_N = jnp.log(sums.exp_N)

    def step(dx_ND: Array | None, tile: tuple) -> tuple[Any, list]:
        matrices, ids_U = tile

        def logits_of(x: Array | None, trained: list) -> Array:
            own = [matrix if t is None else t for matrix, t in zip(matrices, trained, strict=True)]
            # Masked in the loop, where it is fused; a masked copy before the loop would take hidden's size.
            return make_logits(softmax, _zero_silent(x_ND if x is None else x, silent_N), own)

        trained = [m.astype(softmax.wide) if wanted else None for m, wanted in zip(matrices, head_wanted, strict=True)]
        z_NU, pull = jax.vjp(logits_of, x_ND.astype(softmax.wide) if x_wanted else None, trained)
        below_NU = z_NU - sums.max_N[..., None]
        p_NU = jnp.exp(below_NU) / sums.exp_N[..., None]  # not exp(z - logsumexp): a large logsumexp has lost bits
        d_NU = jnp.zeros((), softmax.wide)
        if "logsumexp" in cotangents:
            d_NU += p_NU * cotangents["logsumexp"][..., None]
        if entropy_N is not None and "entropy" in cotangents:
            surprise_NU = below_NU + (entropy_N - log_N)[..., None]
            d_NU -= p_NU * surprise_NU * cotangents["entropy"][..., None]
        if "target" in cotangents:
            d_NU += jnp.where(ids_U == targets_N[..., None], cotangents["target"][..., None], 0)
        d_NU = jnp.where(silent_N[..., None], 0, d_NU)
        dx_tile_ND, d_tile = pull(jnp.broadcast_to(d_NU, z_NU.shape))
        d_rows = [None if d is None else (d / scale).astype(m.dtype) for d, m in zip(d_tile, head, strict=True)]
        return dx_ND if dx_ND is None else dx_ND + dx_tile_ND, d_rows

    dx_ND = jnp.zeros(x_ND.shape, softmax.wide) if x_wanted else None
    dx_ND, d_head = tiles.fold(step, dx_ND, head)
    return None if dx_ND is None else (dx_ND / scale).astype(x_ND.dtype), d_head


@jax.custom_jvp
def _zero_silent(x_ND: Array, silent_N: Array) -> Array:
    """Return x with zeros for silent tokens."""
    return jnp.where(silent_N[..., None], 0, x_ND)


# Their cotangents are zeros already; a mask would be a second f32 array of hidden's size, on a GPU.
_zero_silent.defjvp(lambda primals, tangents: (_zero_silent(*primals), tangents[0]))


def _over_devices(tiles: Tiles, dx_ND: Array | None) -> Array | None:
    """Return hidden's gradient, the sum of what devices find that hold some rows of the head each.

    With `check_vma=True` JAX takes the sum: hidden is said to differ over that axis, which it does not.
    """
    if dx_ND is None or tiles.mesh_axis is None or tiles.mesh_axis in varying_axes(dx_ND):
        return dx_ND
    return lax.psum(dx_ND, tiles.mesh_axis)


_summary.defvjp(_forward, _backward, symbolic_zeros=True)
