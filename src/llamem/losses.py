"""Cross-entropy and log-probabilities of `hidden @ head.T` that never hold the `[tokens, vocab]` array."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Float, Int

from llamem.linear_softmax import loss_rows, summed_loss
from llamem.softmax_tiles import Softmax

__all__ = ["tiled_cross_entropy", "tiled_logprobs"]


def tiled_cross_entropy(
    hidden: Float[Array, "*batch D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "*batch"],
    *,
    weights: Float[Array, "*batch"] | None = None,
    bias: Float[Array, " V"] | None = None,
    num_tiles: int | Literal["auto"] = "auto",
    axis: str = "tokens",
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate_dtype: Any = jnp.float32,
) -> Array:
    """Softmax cross-entropy of `hidden @ head.T` against `targets`, tile by tile."""
    if num_tiles == "auto":
        num_tiles = max(1, -(-targets.size // 1024))
    cfg = Softmax(
        num_tiles=num_tiles,
        axis=axis,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=logit_softcap,
        scale=logit_scale,
        accumulate_dtype=accumulate_dtype,
    )
    return _reduced(cfg, reduction, ignore_index, hidden, head, bias, targets, weights)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _reduced(cfg, reduction, ignore_index, hidden, head, bias, targets, weights):
    x_ND = hidden.reshape(-1, hidden.shape[-1])
    targets_N, weights_N = _mask(x_ND, targets, weights, ignore_index, head.shape[0])
    if reduction == "mean":
        total = jnp.sum(weights_N)
        weights_N = weights_N / jnp.where(total == 0, 1, total)
    if reduction == "none" or cfg.axis == "vocab":
        loss_N = loss_rows(cfg, x_ND, head, bias, targets_N)["loss"]
        loss_N = jnp.where(weights_N == 0, 0, weights_N * loss_N)
        return loss_N.reshape(targets.shape) if reduction == "none" else jnp.sum(loss_N)
    return summed_loss(cfg, x_ND, head, bias, targets_N, weights_N)[0]


def _mask(x_ND, targets, weights, ignore_index, vocab):
    """Targets safe to look up, and weights that are 0 where ignored and NaN where the id is not in the vocabulary."""
    targets_N = targets.reshape(-1)
    ignored_N = targets_N == ignore_index
    inside_N = (targets_N >= 0) & (targets_N < vocab)
    checkify.debug_check(jnp.all(ignored_N | inside_N), f"A target is outside the vocabulary of {vocab} ids.")
    dtype = jnp.promote_types(x_ND.dtype, jnp.float32)
    weights_N = jnp.ones(targets_N.shape, dtype) if weights is None else weights.reshape(-1).astype(dtype)
    weights_N = jnp.where(ignored_N, 0, jnp.where(inside_N, weights_N, jnp.nan))
    return jnp.where(inside_N, targets_N, 0), weights_N


def tiled_logprobs(
    hidden: Float[Array, "*batch D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "*batch"],
    *,
    num_tiles: int | Literal["auto"] = "auto",
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> Float[Array, "*batch"]:
    """Log-probability of each target under `softmax(hidden @ head.T / temperature)`, differentiable per token."""
    loss = tiled_cross_entropy(
        hidden,
        head,
        targets,
        num_tiles=num_tiles,
        reduction="none",
        ignore_index=ignore_index,
        logit_scale=1 / temperature,
    )
    return -loss
