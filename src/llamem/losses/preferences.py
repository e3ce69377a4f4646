"""Losses of preferences between two answers, from hidden states."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from llamem.losses import arguments
from llamem.losses.cross_entropy import tiled_logprobs
from llamem.losses.per_token import Mask, Scalar

__all__ = ["tiled_dpo_loss"]


def tiled_dpo_loss(
    hidden: Float[Array, "2 *pairs T D"],
    head: Any,
    targets: Integer[Array, "2 *pairs T"],
    ref_logprobs: Float[Array, "2 *pairs"],
    *,
    beta: Scalar = 0.1,
    mask: Mask | None = None,
    label_smoothing: Scalar = 0.0,
    ignore_index: int = -100,
    return_rows: bool = False,
    **options: Any,
) -> Any:
    """Direct preference optimisation (arXiv 2305.18290), a tile of logits at a time.

    With `r = beta * (sum of log-probabilities - the reference's)` of an answer, the mean over pairs of
    `-log sigmoid(r_chosen - r_rejected)`. A token's gradient waits for the sums of both answers, so its logits are
    computed twice: 4 matrix products, 2 with a frozen head (TRL's "sigmoid"; `label_smoothing` as TRL's and cDPO's).

    Args:
        hidden: `[2, ..., T, D]`: the chosen answers, then the rejected ones.
        head: `[V, D]`, or a callable, as `tiled_logprobs` takes it.
        targets: `[2, ..., T]`, ids or `ignore_index`.
        ref_logprobs: `[2, ...]`, of whole answers under the reference policy; no gradient.
        beta: how dear it is to leave the reference.
        mask: `[2, ..., T]`, 1 where a token belongs to the answer.
        label_smoothing: in [0, 0.5), the share of pairs that are labelled the wrong way round.
        ignore_index: the id of targets that do not count.
        return_rows: also return a dict without gradients: logprobs and rewards (r), `[2, ...]`.
        options: `num_tiles`, `axis`, `temperature` and `vocab_axis_name` of `tiled_logprobs`.

    Returns:
        A float32 scalar, and with `return_rows` the dict.
    """
    arguments.flag("return_rows", return_rows)
    beta = arguments.number("beta", beta, "a positive, finite number", lambda x: 0 < x < math.inf)
    eps = arguments.number(
        "label_smoothing", label_smoothing, "a number of at least 0 and below 0.5", lambda x: 0 <= x < 0.5
    )
    ignore_index = arguments.whole("ignore_index", ignore_index, "a whole number")
    batch = arguments.batch(hidden, targets, mask)
    shape = batch.targets.shape
    if len(shape) < 2 or shape[0] != 2:
        raise ValueError(
            f"targets must be [2, ..., T], the chosen answers and the rejected ones, got shape {shape}. Put both side "
            "by side with jnp.stack([chosen, rejected])."
        )
    reference = arguments.floats("ref_logprobs", ref_logprobs, "[2, ...], one for each answer")
    if reference.shape != shape[:-1]:
        raise ValueError(
            f"ref_logprobs must be one sum for each answer {shape[:-1]}, got {reference.shape}. Sum those of tokens "
            "over the answer."
        )
    logprobs = tiled_logprobs(batch.hidden, head, batch.targets, ignore_index=ignore_index, **options)
    if batch.weights is not None:
        logprobs = jnp.where(batch.weights == 0, 0, logprobs * batch.weights)
    logprobs = jnp.sum(logprobs, -1)
    rewards = beta * (logprobs - jax.lax.stop_gradient(reference))
    margin = rewards[0] - rewards[1]
    loss = -jnp.mean((1 - eps) * jax.nn.log_sigmoid(margin) + eps * jax.nn.log_sigmoid(-margin))
    return (loss, jax.lax.stop_gradient({"logprobs": logprobs, "rewards": rewards})) if return_rows else loss
