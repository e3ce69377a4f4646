"""Losses of preferences between two answers, from hidden states."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from llamem.losses import arguments
from llamem.losses.cross_entropy import Head, Scalar, tiled_logprobs
from llamem.losses.token_loss import Mask

__all__ = ["tiled_dpo_loss"]


def tiled_dpo_loss(
    hidden: Float[Array, "2 *pairs T D"],
    head: Head,
    targets: Integer[Array, "2 *pairs T"],
    ref_logprobs: Float[Array, "2 *pairs"],
    *,
    beta: Scalar = 0.1,
    mask: Mask | None = None,
    label_smoothing: Scalar = 0.0,
    ignore_index: int = -100,
    num_tiles: int | Literal["auto"] = "auto",
    temperature: Scalar = 1.0,
    vocab_axis_name: str | None = None,
) -> Float[Array, ""]:
    """Compute the loss of direct preference optimisation (arXiv 2305.18290), a tile of logits at a time.

    With `r = beta * (sum of log-probabilities - the reference's)` of an answer, the mean over pairs of
    `-log sigmoid(r_chosen - r_rejected)`. A token's gradient waits for the sums of both answers, so its logits are
    computed twice: 4 matrix products, 2 with a frozen head (TRL's "sigmoid"; `label_smoothing` as TRL's and cDPO's).

    Args:
        hidden: `[2, ..., T, D]`: the chosen answers, then the rejected ones.
        head: `[V, D]`, or a tuple of matrices, as `tiled_logprobs` takes it.
        targets: `[2, ..., T]`, ids or `ignore_index`.
        ref_logprobs: `[2, ...]`, of whole answers under the reference policy; no gradient.
        beta: the strength of the pull back to the reference.
        mask: `[2, ..., T]`, 1 where a token belongs to the answer.
        label_smoothing: in [0, 0.5), the share of pairs that are labelled the wrong way round.
        ignore_index: the id of targets that do not count.
        num_tiles: as `temperature` and `vocab_axis_name`, of `tiled_logprobs`.

    Returns:
        A float32 scalar.
    """
    beta = arguments.static_number("beta", beta, above=0)
    eps = arguments.static_number("label_smoothing", label_smoothing, at_least=0, below=0.5)
    batch = arguments.check_batch(hidden, targets, mask)
    shape = batch.targets.shape
    if len(shape) < 2 or shape[0] != 2:
        raise ValueError(
            f"targets must be [2, ..., T], the chosen answers and the rejected ones, got shape {shape}. Put both side "
            "by side with jnp.stack([chosen, rejected])."
        )
    reference = arguments.as_floats("ref_logprobs", ref_logprobs, "[2, ...], one for each answer")
    if reference.shape != shape[:-1]:
        raise ValueError(
            f"ref_logprobs must be one sum for each answer {shape[:-1]}, got {reference.shape}. Sum those of tokens "
            "over the answer."
        )
    logprobs = tiled_logprobs(
        batch.hidden,
        head,
        batch.targets,
        num_tiles=num_tiles,
        temperature=temperature,
        ignore_index=ignore_index,
        vocab_axis_name=vocab_axis_name,
    )
    if batch.weights is not None:
        logprobs = jnp.where(batch.weights == 0, 0, logprobs * batch.weights)
    rewards = beta * (jnp.sum(logprobs, -1) - jax.lax.stop_gradient(reference))
    margin = rewards[0] - rewards[1]
    return -jnp.mean((1 - eps) * jax.nn.log_sigmoid(margin) + eps * jax.nn.log_sigmoid(-margin))
