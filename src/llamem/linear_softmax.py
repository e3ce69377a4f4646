"""Softmax cross-entropy of `hidden @ head.T`, one tile of logits at a time: losses per token and hand-made gradients.

`token_tiled` sums weighted losses and makes all gradients in the forward pass (3 matrix products); `per_token`
returns one loss per token and computes the logits again for a trainable head (4), or keeps the gradient for `hidden`
made beside the loss when the head is frozen (2). Public functions with checks are in `losses.py`.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from llamem.tiling import fold_tiles, scale_gradient


@dataclasses.dataclass(frozen=True)
class Softmax:
    """What is done between the matrix product and the loss, and how it is tiled. Hashable: it keys the jit cache."""

    num_tiles: int
    axis: str = "tokens"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    accumulate_dtype: Any = jnp.float32
    with_stats: bool = False


def matmul(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Matrix product in the operands' common type, accumulated and returned in float32 (or wider)."""
    dtype = jnp.result_type(a, b)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=_wide(dtype))


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def logits_of(cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array | None) -> Array:
    """Scaled and soft-capped logits `[N, V]`, float32."""
    logits_NV = matmul(x_ND, head_VD, (1, 1))
    if bias_V is not None:
        logits_NV += bias_V
    if cfg.scale != 1.0:
        logits_NV *= cfg.scale
    if cfg.softcap is not None:
        logits_NV = cfg.softcap * jnp.tanh(logits_NV / cfg.softcap)
    return logits_NV


def _losses_and_slope(cfg: Softmax, z_NV: Array, targets_N: Array) -> tuple[dict, Any]:
    """Per-token rows `[N]`, and a function from per-token weights to the gradient of the raw product `[N, V]`."""
    vocab, eps = z_NV.shape[-1], cfg.label_smoothing
    max_N1 = lax.stop_gradient(jnp.max(z_NV, -1, keepdims=True))
    exp_NV = jnp.exp(z_NV - max_N1)
    sum_N1 = jnp.sum(exp_NV, -1, keepdims=True)
    lse_N = (max_N1 + jnp.log(sum_N1))[:, 0]
    target_N = jnp.take_along_axis(z_NV, targets_N[:, None], 1)[:, 0]
    loss_N = lse_N - (1 - eps) * target_N
    if eps:
        loss_N -= eps * jnp.mean(z_NV, -1)
    rows = {"loss": loss_N + cfg.z_loss * lse_N**2}
    if cfg.with_stats:
        rows |= {
            "logsumexp": lse_N,
            "entropy": lse_N - jnp.sum(exp_NV * z_NV, -1) / sum_N1[:, 0],
            "accuracy": (jnp.argmax(z_NV, -1) == targets_N).astype(lse_N.dtype),
        }

    def slope(weights_N: Array) -> Array:
        p_NV = exp_NV * ((weights_N * (1 + 2 * cfg.z_loss * lse_N))[:, None] / sum_N1)
        return through_logits(cfg, z_NV, _minus_labels(cfg, p_NV, targets_N, weights_N, vocab))

    return rows, slope


def _minus_labels(cfg: Softmax, p_NV: Array, targets_N: Array, weights_N: Array, vocab: int) -> Array:
    eps = cfg.label_smoothing
    hit_NV = jnp.arange(p_NV.shape[1]) == targets_N[:, None]
    w_N1 = weights_N[:, None]
    d_NV = p_NV - jnp.where(hit_NV, (1 - eps) * w_N1, 0)
    return d_NV - (eps / vocab) * w_N1 if eps else d_NV


def through_logits(cfg: Softmax, z_NV: Array, d_NV: Array) -> Array:
    """Chain rule from the soft-capped, scaled logits back to the raw product."""
    if cfg.softcap is not None:
        d_NV = d_NV * (1 - (z_NV / cfg.softcap) ** 2)
    return d_NV * cfg.scale if cfg.scale != 1.0 else d_NV


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_tiled(cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array, targets_N: Array, weights_N: Array) -> tuple:
    """`(sum_n weights[n] * loss[n], rows [N])`; the rows are not differentiable. Tiles of tokens, 3 products."""
    return _token_tiles(cfg, x_ND, head_VD, bias_V, targets_N, weights_N, ())[0]


def _token_tiles(cfg: Softmax, x_ND: Any, head_VD: Any, bias_V: Any, targets_N: Any, weights_N: Any, wanted: tuple):
    """Loss, rows, and the `wanted` gradients out of "x", "head", "bias", "weights", in one pass."""

    def tile_step(sums: dict, tile: tuple) -> tuple[dict, dict]:
        x_TD, targets_T, weights_T = tile
        z_TV = logits_of(cfg, x_TD, head_VD, bias_V)
        rows, slope = _losses_and_slope(cfg, z_TV, targets_T)
        grads = {}
        if set(wanted) & {"x", "head", "bias"}:
            d_TV = slope(weights_T)
            if "bias" in wanted:
                sums = sums | {"bias": sums["bias"] + jnp.sum(d_TV, 0).astype(sums["bias"].dtype)}
            d_TV = d_TV.astype(jnp.result_type(x_TD, head_VD))
            if "x" in wanted:
                grads["x"] = matmul(d_TV, head_VD, (1, 0)).astype(x_TD.dtype)
            if "head" in wanted:
                sums = sums | {"head": sums["head"] + matmul(d_TV, x_TD, (0, 0)).astype(sums["head"].dtype)}
        total = sums["total"] + jnp.sum(jnp.where(weights_T == 0, 0, weights_T * rows["loss"]))
        return sums | {"total": total}, {"rows": rows, "grads": grads}

    shapes = {"head": head_VD, "bias": bias_V}
    sums = {k: jnp.zeros(shapes[k].shape, cfg.accumulate_dtype) for k in ("head", "bias") if k in wanted}
    sums["total"] = jnp.zeros((), jnp.result_type(_wide(x_ND.dtype), weights_N))
    sums, out = fold_tiles(tile_step, sums, (x_ND, targets_N, weights_N), cfg.num_tiles)
    grads = out["grads"] | {k: sums[k].astype(shapes[k].dtype) for k in ("head", "bias") if k in sums}
    if "weights" in wanted:
        grads["weights"] = out["rows"]["loss"].astype(weights_N.dtype)
    return (sums["total"], out["rows"]), grads


def _wanted(**args: Any) -> tuple[str, ...]:
    return tuple(name for name, arg in args.items() if arg is not None and arg.perturbed)


def _token_tiled_forward(cfg, x, head, bias, targets, weights):
    wanted = _wanted(x=x, head=head, bias=bias, weights=weights)
    bias_V = None if bias is None else bias.value
    return _token_tiles(cfg, x.value, head.value, bias_V, targets.value, weights.value, wanted)


def _token_tiled_backward(cfg, grads, cotangents):
    scaled = {name: scale_gradient(g, cotangents[0]) for name, g in grads.items()}
    return scaled.get("x"), scaled.get("head"), scaled.get("bias"), None, scaled.get("weights")


token_tiled.defvjp(_token_tiled_forward, _token_tiled_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def per_token(cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array | None, targets_N: Array) -> dict:
    """Rows `[N]`: "loss" is differentiable, statistics are not. Trainable head: 4 products; frozen: 2."""
    return _token_tiles(cfg, x_ND, head_VD, bias_V, targets_N, _ones(x_ND), ())[0][1]


def _ones(x_ND: Array) -> Array:
    return jnp.ones(x_ND.shape[0], _wide(x_ND.dtype))


def _per_token_forward(cfg, x, head, bias, targets):
    wanted = _wanted(x=x, head=head, bias=bias)
    operands = (x.value, head.value, None if bias is None else bias.value, targets.value)
    if wanted == ("x",):  # its gradient is the cotangent times something known now
        (_, rows), grads = _token_tiles(cfg, *operands, _ones(x.value), wanted)
        return rows, (grads["x"], None)
    return per_token(cfg, *operands), (None, (operands, dict.fromkeys(wanted, ())))  # names, as a tree without leaves


def _per_token_backward(cfg, residuals, cotangents):
    unit_dx_ND, again = residuals
    cotangent_N = cotangents["loss"]
    if isinstance(cotangent_N, jax.custom_derivatives.SymbolicZero):
        return (None,) * 4
    if again is None:
        return scale_gradient(unit_dx_ND, cotangent_N[:, None]), None, None, None
    operands, wanted = again
    grads = _token_tiles(cfg, *operands, cotangent_N, tuple(wanted))[1]
    return grads.get("x"), grads.get("head"), grads.get("bias"), None


per_token.defvjp(_per_token_forward, _per_token_backward, symbolic_zeros=True)
