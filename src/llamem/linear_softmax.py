"""Differentiation rules of the tiled losses: which pass of `softmax_tiles.py` runs when.

| | forward | backward | matrix products |
|---|---|---|---|
| not differentiated | losses | - | 1 |
| `summed_loss` (tiles of tokens) | losses and all gradients | scaling | 3; 2 where head or hidden is frozen |
| `loss_rows`, head trained | losses | logits again, gradients | 4 |
| `loss_rows`, head frozen | losses and unit gradients of `hidden` | scaling | 2 |
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llamem.softmax_tiles import Softmax, token_pass, vocab_frozen, vocab_gradients, vocab_losses, wide
from llamem.tiling import scale_gradient

# With symbolic_zeros a forward rule is told which arguments are being differentiated.


def _wanted(**args: Any) -> tuple[str, ...]:
    return tuple(name for name, arg in args.items() if arg is not None and arg.perturbed)


def _ones(x_ND: Array, head_VD: Array) -> Array:
    return jnp.ones(x_ND.shape[0], wide(x_ND, head_VD))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed_loss(
    cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array | None, targets_N: Array, weights_N: Array
) -> tuple[Array, dict]:
    """`sum_n weights[n] * loss[n]`, differentiable, and the rows `[N]`, which are not. Tiles of tokens."""
    return token_pass(cfg, x_ND, head_VD, bias_V, targets_N, weights_N)[:2]


def _summed_forward(cfg, x, head, bias, targets, weights):
    wanted = _wanted(x=x, head=head, bias=bias, weights=weights)
    bias_V = None if bias is None else bias.value
    total, rows, grads = token_pass(cfg, x.value, head.value, bias_V, targets.value, weights.value, wanted)
    return (total, rows), grads


def _summed_backward(cfg, grads, cotangents):
    cotangent, _ = cotangents
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return (None,) * 5
    grads = {name: scale_gradient(g, cotangent) for name, g in grads.items()}
    return grads.get("x"), grads.get("head"), grads.get("bias"), None, grads.get("weights")


summed_loss.defvjp(_summed_forward, _summed_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss_rows(cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array | None, targets_N: Array) -> dict:
    """Rows `[N]`: "loss" is differentiable, statistics are not. Tiles along `cfg.axis`."""
    return _rows_and_lse(cfg, x_ND, head_VD, bias_V, targets_N)[0]


def _rows_and_lse(cfg, x_ND, head_VD, bias_V, targets_N):
    if cfg.axis == "vocab":
        return vocab_losses(cfg, x_ND, head_VD, bias_V, targets_N)
    return token_pass(cfg, x_ND, head_VD, bias_V, targets_N, _ones(x_ND, head_VD))[1], None


def _rows_forward(cfg, x, head, bias, targets):
    wanted = _wanted(x=x, head=head, bias=bias)
    operands = (x.value, head.value, None if bias is None else bias.value, targets.value)
    if wanted != ("x",):
        rows, lse_N = _rows_and_lse(cfg, *operands)
        return rows, (operands, lse_N, dict.fromkeys(wanted, ()))  # names, as a tree without leaves
    if cfg.axis == "vocab":
        return vocab_frozen(cfg, *operands)
    _, rows, grads = token_pass(cfg, *operands, _ones(x.value, head.value), wanted)
    return rows, grads["x"]


def _rows_backward(cfg, residuals, cotangents):
    cotangent_N = cotangents["loss"]
    if isinstance(cotangent_N, jax.custom_derivatives.SymbolicZero):
        return (None,) * 4
    if not isinstance(residuals, tuple):  # head frozen: the gradient for cotangent 1
        return scale_gradient(residuals, cotangent_N[:, None]), None, None, None
    operands, lse_N, wanted = residuals
    if cfg.axis == "vocab":
        grads = vocab_gradients(cfg, *operands, lse_N, cotangent_N, tuple(wanted))
    else:
        grads = token_pass(cfg, *operands, cotangent_N, tuple(wanted))[2]
    return grads.get("x"), grads.get("head"), grads.get("bias"), None


loss_rows.defvjp(_rows_forward, _rows_backward, symbolic_zeros=True)
