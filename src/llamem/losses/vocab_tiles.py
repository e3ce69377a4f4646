"""The rows of all tokens over tiles of the vocabulary, joined by the online softmax.

The online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) carries a maximum and a sum of exponentials per token.
The gradient needs the finished sum, so a trained head makes its logits twice:

| | forward | backward | matrix products |
|---|---|---|---|
| not differentiated | rows | - | 1 |
| head trained | rows | logits again, gradients | 4 |
| head frozen | rows, gradient of logsumexp | scaling | 2; 3 where the entropy is differentiated |

This is the whole computation on the token side, where a tile of tokens sees all of the vocabulary, and what
`vocab_tiles.py` computes a tile of the vocabulary at a time.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from llamem.layers.tiling import fold_tiles
from llamem.layers.trees import flags_of, mark, with_zeros
from llamem.layers.varying import axes_of, vary, vary_together, varying_axes


@dataclasses.dataclass(frozen=True)
class Softmax:
    """How logits are made, and which rows a loss needs. Hashable: it keys the jit cache."""

    dtype: Any  # of the factors of matrix products
    scale: float = 1.0
    softcap: float | None = None
    smoothing: float = 0.0  # the share of a target that is spread over all ids
    with_entropy: bool = False

    @property
    def wide(self) -> Any:
        """The type of logits, losses and sums: float32, or wider where the factors are."""
        return jnp.promote_types(jnp.float32, self.dtype)


class Rows(NamedTuple):
    """What a loss needs to know of each token's logits, `[N]` each."""

    logsumexp: Array
    target: Array  # the logit of the token's target, or where labels are smoothed the mean logit of the targets
    entropy: Array | None = None  # of the softmax, in nats; None where it was not asked for

    @property
    def logprob(self) -> Array:
        """The target's log-probability, in nats."""
        return self.target - self.logsumexp


def matrices_of(head: list) -> list:
    """Return the head's matrices `[V, D_i]`, which side by side are one `[V, D]`; a bias `[V]` may follow them."""
    return [leaf for leaf in head if leaf.ndim == 2]


def make_logits(softmax: Softmax, x_TD: Array, head: list) -> Array:
    """Return the logits `[T, V]`: the product with each part of the head, bias, scale and soft-cap."""
    matrices = matrices_of(head)
    parts = jnp.split(x_TD, np.cumsum([m.shape[1] for m in matrices])[:-1].tolist(), axis=1)
    with jax.named_scope("logits"):  # the timeline knows them by this name
        products = [
            _product(*vary_together(x.astype(softmax.wide), m.astype(softmax.wide)), softmax.dtype)
            for x, m in zip(parts, matrices, strict=True)
        ]
        z_TV = functools.reduce(operator.add, products)
    for bias_V in head[len(matrices) :]:
        z_TV = z_TV + bias_V
    if softmax.scale != 1.0:
        z_TV = z_TV * softmax.scale
    return z_TV if softmax.softcap is None else softmax.softcap * jnp.tanh(z_TV / softmax.softcap)


def slope(softmax: Softmax, z: Array) -> Array | float:
    """Return the derivative of a logit `z` for its raw product."""
    return softmax.scale if softmax.softcap is None else softmax.scale * (1 - (z / softmax.softcap) ** 2)


def rows_of(softmax: Softmax, z_TV: Array, targets_T: Array) -> Rows:
    """Return the rows of whole logits."""
    hit_TV = jnp.arange(z_TV.shape[1]) == targets_T[:, None]
    target_T = jnp.sum(target_logits(softmax, z_TV, hit_TV, z_TV.shape[1]), -1)
    logsumexp_T = jax.nn.logsumexp(z_TV, -1)
    entropy_T = None
    if softmax.with_entropy:
        finite_TV = jnp.where(jnp.isneginf(z_TV), 0, z_TV)  # an id that a bias took out has a probability of 0
        entropy_T = logsumexp_T - jnp.sum(jax.nn.softmax(z_TV) * finite_TV, -1)
    return Rows(logsumexp_T, target_T, entropy_T)


def target_logits(softmax: Softmax, z_TV: Array, hit_TV: Array, vocab: int) -> Array:
    """Return logits times the target distribution, of whose ids `hit_TV` says which is the label."""
    of_label_TV = jnp.where(hit_TV, z_TV, 0)
    if not softmax.smoothing:
        return of_label_TV
    return (1 - softmax.smoothing) * of_label_TV + softmax.smoothing / vocab * z_TV


def quiet(rows: Rows, weights_N: Array) -> Rows:
    """Return the rows with 0 for those that are not finite and have a weight of 0, which add nothing to a sum."""
    return jax.tree.map(lambda r_N: jnp.where((weights_N == 0) & ~jnp.isfinite(r_N), 0, r_N), rows)


def power_of_two(softmax: Softmax, *weights_N: Array) -> Array | float:
    """Return what brings the largest weight near 1 without rounding it, in float16; 1.0 for other types.

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
    # What no gradient needs is not kept. Its place is: see `llamem.layers.trees.mark`.
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


# A TPU's compiler lays the whole head out anew, in a copy, where tiles are no multiple of this.
_ALIGN = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What is tiled, into how many tiles, and the mesh axis whose devices hold some rows of the head each.

    Hashable: it keys the jit cache.
    """

    axis: Literal["tokens", "vocab"]
    count: int
    mesh_axis: str | None = None

    def first_id(self, head: list) -> Any:
        """Return the id of the first of the head's rows that are here."""
        return 0 if self.mesh_axis is None else lax.axis_index(self.mesh_axis) * head[0].shape[0]

    def vocab(self, head: list) -> int:
        """Return the number of rows of the whole head."""
        return head[0].shape[0] * (1 if self.mesh_axis is None else lax.axis_size(self.mesh_axis))

    def fold(self, step: Any, init: Any, head: list) -> tuple[Any, Any]:
        """Fold `step(carry, (leaves, ids_U))` over tiles of the head's rows and their ids."""
        ids_V = self.first_id(head) + jnp.arange(head[0].shape[0])
        return fold_tiles(step, init, (head, ids_V), self.count, align=_ALIGN)


class _Sums(NamedTuple):
    """What one sweep over the vocabulary adds up for each token; None where it is not wanted."""

    max_N: Array
    exp_N: Array  # exp(z - max)
    exp_logit_N: Array | None  # exp(z - max) z
    exp_head_ND: Array | None  # exp(z - max) dz/dx
    target_N: Array


class _Residuals(NamedTuple):
    """What the backward pass starts from, and the mark of whose gradients are asked for: hidden's, the head's."""

    x_ND: Array
    head: list
    targets_N: Array
    sums: _Sums
    asked: Array

    @property
    def x_wanted(self) -> bool:
        """Whether hidden's gradient is asked for."""
        return flags_of(self.asked, 1)[0]

    @property
    def head_wanted(self) -> list[bool]:
        """Whether the head's gradient is asked for, leaf by leaf."""
        return flags_of(self.asked, 1 + len(self.head))[1:]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rows(softmax: Softmax, tiles: Tiles, x_ND: Array, head: list, targets_N: Array) -> Rows:
    return _rows_of_sums(_sweep(softmax, tiles, x_ND, head, targets_N))


def vocab_rows(softmax: Softmax, tiles: Tiles, x_ND: Array, head: list, targets_N: Array) -> Rows:
    """Return the rows of all tokens, differentiable for hidden and head. A row without cotangent adds nothing."""
    x_ND, head = vary((x_ND, head), axes_of((x_ND, head, targets_N)))
    return _rows(softmax, tiles, x_ND, head, targets_N)


def _sweep(
    softmax: Softmax, tiles: Tiles, x_ND: Array, head: list, targets_N: Array, *, with_gradient: bool = False
) -> _Sums:
    """Sum over the vocabulary, of all devices but for what is `[N, D]`. One product, two with hidden's gradient."""

    def step(old: _Sums, tile: tuple) -> tuple[_Sums, tuple]:
        leaves, ids_U = tile
        z_NU, pull = jax.vjp(lambda x: make_logits(softmax, x, leaves), x_ND.astype(softmax.wide))
        max_N = jnp.maximum(old.max_N, jnp.max(z_NU, -1))
        finite_N = jnp.where(jnp.isneginf(max_N), 0, max_N)  # -inf before the first id that a bias leaves in
        exp_NU, shrink_N = jnp.exp(z_NU - finite_N[:, None]), jnp.exp(old.max_N - finite_N)
        exp_logit_N, exp_head_ND = old.exp_logit_N, old.exp_head_ND
        if exp_logit_N is not None:
            exp_logit_N = exp_logit_N * shrink_N + jnp.sum(jnp.where(exp_NU == 0, 0, exp_NU * z_NU), -1)
        if exp_head_ND is not None:
            exp_head_ND = exp_head_ND * shrink_N[:, None] + pull(exp_NU)[0]
        exp_N = old.exp_N * shrink_N + jnp.sum(exp_NU, -1)
        target_NU = target_logits(softmax, z_NU, ids_U == targets_N[:, None], tiles.vocab(head))
        return _Sums(max_N, exp_N, exp_logit_N, exp_head_ND, old.target_N + jnp.sum(target_NU, -1)), ()

    zero_N = jnp.zeros(len(x_ND), softmax.wide)
    start = _Sums(
        jnp.full_like(zero_N, -jnp.inf),
        zero_N,
        zero_N if softmax.with_entropy else None,
        jnp.zeros(x_ND.shape, softmax.wide) if with_gradient else None,
        zero_N,
    )
    sums, _ = tiles.fold(step, start, head)
    return sums if tiles.mesh_axis is None else _joined(sums, tiles.mesh_axis)


def _joined(own: _Sums, mesh_axis: str) -> _Sums:
    """Return the sums of all devices, each of which swept over its own rows of the head; `[N, D]` stay its own."""
    max_N = lax.pmax(own.max_N, mesh_axis)
    shrink_N = jnp.exp(own.max_N - max_N)
    exp_N, target_N = lax.psum((own.exp_N * shrink_N, own.target_N), mesh_axis)
    exp_logit_N = None if own.exp_logit_N is None else lax.psum(own.exp_logit_N * shrink_N, mesh_axis)
    exp_head_ND = None if own.exp_head_ND is None else own.exp_head_ND * shrink_N[:, None]
    return _Sums(max_N, exp_N, exp_logit_N, exp_head_ND, target_N)


def _rows_of_sums(sums: _Sums) -> Rows:
    logsumexp_N = sums.max_N + jnp.log(sums.exp_N)
    entropy_N = None if sums.exp_logit_N is None else logsumexp_N - sums.exp_logit_N / sums.exp_N
    return Rows(logsumexp_N, sums.target_N, entropy_N)


def _forward(softmax, tiles, x, head, targets):
    # With symbolic_zeros a forward rule is told which arguments are being differentiated.
    leaves, head_wanted = [leaf.value for leaf in head], tuple(leaf.perturbed for leaf in head)
    sums_up = _sums_up_gradient(softmax, head_wanted)
    sums = _sweep(softmax, tiles, x.value, leaves, targets.value, with_gradient=sums_up)
    rows = _rows_of_sums(sums)
    if not sums_up:  # a place that is empty: see `mark`
        sums = sums._replace(exp_head_ND=jnp.zeros(0))
    return rows, _Residuals(x.value, leaves, targets.value, sums, mark((x.perturbed, *head_wanted)))


def _backward(softmax, tiles, residuals, cotangents):
    given = {name: g for name, g in cotangents._asdict().items() if g is not None and not isinstance(g, SymbolicZero)}
    if not given:
        return with_zeros((None, None, None), residuals[:3])
    silent_N = jnp.all(jnp.stack([g == 0 for g in given.values()]), 0)
    if _sums_up_gradient(softmax, residuals.head_wanted) and "entropy" not in given:
        dx_ND, d_head = _scaled_gradients(softmax, tiles, residuals, given), None
        dx_ND = jnp.where(silent_N[:, None], 0, dx_ND).astype(residuals.x_ND.dtype)
    else:
        dx_ND, d_head = _gradients(softmax, tiles, residuals, given, silent_N)
    return with_zeros((_over_devices(tiles, dx_ND), d_head, None), residuals[:3])


def _sums_up_gradient(softmax: Softmax, head_wanted: Sequence[bool]) -> bool:
    """Whether the forward pass sums up hidden's gradient: one for the head needs the logits again, which give both.

    So does the gradient of a mean over all logits that a soft-cap has bent.
    """
    return not any(head_wanted) and (softmax.softcap is None or not softmax.smoothing)


def _scaled_gradients(softmax: Softmax, tiles: Tiles, residuals: _Residuals, given: dict) -> Array:
    """Return hidden's gradient from those of the rows that the forward pass summed up."""
    head, targets_N, sums = residuals.head, residuals.targets_N, residuals.sums
    dx_ND = jnp.zeros((), softmax.wide)
    if "logsumexp" in given:
        dx_ND += (given["logsumexp"] / sums.exp_N)[:, None] * sums.exp_head_ND
    if "target" in given:
        own_N = targets_N - tiles.first_id(head)
        here_N = (own_N >= 0) & (own_N < head[0].shape[0])
        g_N = jnp.where(here_N, given["target"] * slope(softmax, sums.target_N), 0)
        of_label_ND = _side_by_side([leaf[jnp.where(here_N, own_N, 0)] for leaf in matrices_of(head)])
        dx_ND += (1 - softmax.smoothing) * g_N[:, None] * of_label_ND
        if softmax.smoothing:
            sum_D = _side_by_side([jnp.sum(leaf, 0, dtype=softmax.wide) for leaf in matrices_of(head)], axis=0)
            dx_ND += (softmax.smoothing * softmax.scale / tiles.vocab(head) * given["target"])[:, None] * sum_D
    return dx_ND


def _gradients(
    softmax: Softmax, tiles: Tiles, residuals: _Residuals, given: dict, silent_N: Array
) -> tuple[Array | None, list]:
    """Return the wanted gradients: one product each, and one for the logits, which are made again.

    A tile holds all tokens, so its rows of the head's gradient are complete: written once, nothing accumulates.
    """
    head, targets_N, sums = residuals.head, residuals.targets_N, residuals.sums
    # Else XLA sees that a remainder tile outside the loops was computed before, and keeps its logits until now.
    x_ND = lax.optimization_barrier(residuals.x_ND)
    scale = power_of_two(softmax, *given.values())
    given = {name: g_N * scale for name, g_N in given.items()}
    entropy_N = _rows_of_sums(sums).entropy
    log_N = jnp.log(sums.exp_N)

    def step(dx_ND: Array | None, tile: tuple) -> tuple[Any, list]:
        leaves, ids_U = tile

        def of_wanted(x: Array | None, chosen: list) -> Array:
            own = [leaf if c is None else c for leaf, c in zip(leaves, chosen, strict=True)]
            # Masked in the loop, where it is fused; a masked copy before the loop would take hidden's size.
            return make_logits(softmax, _silence(x_ND if x is None else x, silent_N), own)

        is_wanted = zip(leaves, residuals.head_wanted, strict=True)
        chosen = [leaf.astype(softmax.wide) if wanted else None for leaf, wanted in is_wanted]
        z_NU, pull = jax.vjp(of_wanted, x_ND.astype(softmax.wide) if residuals.x_wanted else None, chosen)
        below_NU = z_NU - sums.max_N[:, None]
        p_NU = jnp.exp(below_NU) / sums.exp_N[:, None]  # not exp(z - logsumexp): a large logsumexp has lost bits
        d_NU = jnp.zeros((), softmax.wide)
        if "logsumexp" in given:
            d_NU += p_NU * given["logsumexp"][:, None]
        if entropy_N is not None and "entropy" in given:
            surprise_NU = jnp.where(p_NU == 0, 0, below_NU + (entropy_N - log_N)[:, None])
            d_NU -= p_NU * surprise_NU * given["entropy"][:, None]
        if "target" in given:
            g_NU = jnp.broadcast_to(given["target"][:, None], z_NU.shape)
            d_NU += target_logits(softmax, g_NU, ids_U == targets_N[:, None], tiles.vocab(head))
        d_NU = jnp.where(silent_N[:, None], 0, d_NU)
        dx_tile_ND, d_leaves = pull(jnp.broadcast_to(d_NU, z_NU.shape))
        rows = [None if d is None else (d / scale).astype(leaf.dtype) for d, leaf in zip(d_leaves, head, strict=True)]
        return dx_ND if dx_ND is None else dx_ND + dx_tile_ND, rows

    dx_ND = jnp.zeros(x_ND.shape, softmax.wide) if residuals.x_wanted else None
    dx_ND, d_head = tiles.fold(step, dx_ND, head)
    return None if dx_ND is None else (dx_ND / scale).astype(x_ND.dtype), d_head


@jax.custom_jvp
def _silence(x_ND: Array, silent_N: Array) -> Array:
    """Return x with zeros for silent tokens."""
    return jnp.where(silent_N[:, None], 0, x_ND)


# Their cotangents are zeros already; a mask would be a second f32 array of hidden's size, on a GPU.
_silence.defjvp(lambda primals, tangents: (_silence(*primals), tangents[0]))


def _over_devices(tiles: Tiles, dx_ND: Array | None) -> Array | None:
    """Return hidden's gradient, the sum of what devices find that hold some rows of the head each.

    With `check_vma=True` JAX takes the sum: hidden is said to differ over that axis, which it does not.
    """
    if dx_ND is None or tiles.mesh_axis is None or tiles.mesh_axis in varying_axes(dx_ND):
        return dx_ND
    return lax.psum(dx_ND, tiles.mesh_axis)


def _side_by_side(parts: list, axis: int = 1) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


_rows.defvjp(_forward, _backward, symbolic_zeros=True)
