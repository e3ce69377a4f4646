"""Differentiation rules of the tiled losses: which pass of `passes.py` runs when.

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

from llamem.layers.tiling import scale_gradient
from llamem.losses.one_tile import Softmax, wide
from llamem.losses.passes import token_pass, vocab_frozen, vocab_gradients, vocab_losses

# With symbolic_zeros a forward rule is told which arguments are being differentiated.


def _wanted(x: Any, head: list) -> tuple:
    return (*(("x",) if x.perturbed else ()), *(str(i) for i, leaf in enumerate(head) if leaf.perturbed))


def _in_order(grads: dict, head_leaves: int) -> tuple[Array | None, list]:
    return grads.get("x"), [grads.get(str(i)) for i in range(head_leaves)]


def _ones(x_ND: Array, head: list) -> Array:
    return jnp.ones(x_ND.shape[0], wide(x_ND, *head))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed_loss(cfg: Softmax, x_ND: Array, head: list, targets_N: Array, weights_N: Array) -> tuple[Array, dict]:
    """`sum_n weights[n] * loss[n]`, differentiable, and the rows `[N]`, which are not. Tiles of tokens."""
    return token_pass(cfg, x_ND, head, targets_N, weights_N)[:2]


def _summed_forward(cfg, x, head, targets, weights):
    wanted = _wanted(x, head) + (("w",) if weights.perturbed else ())
    values = [leaf.value for leaf in head]
    total, rows, grads = token_pass(cfg, x.value, values, targets.value, weights.value, wanted)
    return (total, rows), (*_in_order(grads, len(head)), grads.get("w"))


def _summed_backward(cfg, grads, cotangents):
    cotangent, _ = cotangents
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return (None,) * 4
    x, head, weights = jax.tree.map(lambda g: scale_gradient(g, cotangent), grads)
    return x, head, None, weights


summed_loss.defvjp(_summed_forward, _summed_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss_rows(cfg: Softmax, x_ND: Array, head: list, targets_N: Array) -> dict:
    """Rows `[N]`: "loss" is differentiable, statistics are not. Tiles along `cfg.axis`."""
    return _rows_and_softmax(cfg, x_ND, head, targets_N)[0]


def _rows_and_softmax(cfg, x_ND, head, targets_N):
    if cfg.axis == "vocab":
        return vocab_losses(cfg, x_ND, head, targets_N)
    return token_pass(cfg, x_ND, head, targets_N, _ones(x_ND, head))[1], None


def _rows_forward(cfg, x, head, targets):
    wanted = _wanted(x, head)
    operands = (x.value, [leaf.value for leaf in head], targets.value)
    if wanted != ("x",):
        rows, softmax = _rows_and_softmax(cfg, *operands)
        return rows, (operands, softmax, dict.fromkeys(wanted, ()))  # names, as a tree without leaves
    if cfg.axis == "vocab":
        rows, dx_ND = vocab_frozen(cfg, *operands)
    else:
        _, rows, grads = token_pass(cfg, *operands, _ones(*operands[:2]), wanted)
        dx_ND = grads["x"]
    return rows, (dx_ND, [None] * len(head))


def _rows_backward(cfg, residuals, cotangents):
    cotangent_N = cotangents["loss"]
    if isinstance(cotangent_N, jax.custom_derivatives.SymbolicZero):
        return (None,) * 3
    if len(residuals) == 2:  # head frozen: gradients for cotangent 1
        unit_dx_ND, no_head = residuals
        return scale_gradient(unit_dx_ND, cotangent_N[:, None]), no_head, None
    (x_ND, head, targets_N), softmax, names = residuals
    # Else XLA sees that a remainder tile outside the loops was computed before, and keeps its logits until now.
    x_ND = jax.lax.optimization_barrier(x_ND)
    wanted = tuple(names)
    if cfg.axis == "vocab":
        grads = vocab_gradients(cfg, x_ND, head, targets_N, softmax, cotangent_N, wanted)
    else:
        grads = token_pass(cfg, x_ND, head, targets_N, cotangent_N, wanted)[2]
    return *_in_order(grads, len(head)), None


loss_rows.defvjp(_rows_forward, _rows_backward, symbolic_zeros=True)
