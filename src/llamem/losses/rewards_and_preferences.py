"""Losses of reinforcement learning and of preferences over tiles: policy gradients (GRPO, PPO's clip), and DPO."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxmem.checks import check_one_of, check_whole
from llamem.losses import arguments
from llamem.losses.cross_entropy import Head, Scalar, tiled_logprobs
from llamem.losses.token_loss import Mask, tiled_token_loss
from llamem.losses.weighted_sum import known_targets

__all__ = ["group_advantages", "tiled_policy_loss"]


@dataclasses.dataclass(frozen=True)
class PolicyObjective:
    """One token's part of a policy-gradient loss. Hashable: it keys the jit cache."""

    objective: str
    clip_low: float
    clip_high: float
    kl: str
    kl_weight: float
    entropy_weight: float

    def __call__(self, logprob: Array, entropy: Array, extras: dict) -> Array:
        """Return this token's loss, from its "advantage" and, if there are any, "old" and "ref" log-probabilities."""
        advantage = extras["advantage"]
        ratio = jnp.exp(logprob - extras.get("old", jax.lax.stop_gradient(logprob)))
        if self.objective == "reinforce":
            loss = -advantage * logprob
        elif self.objective == "importance":
            loss = -advantage * ratio
        else:
            clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
            loss = -jnp.minimum(ratio * advantage, clipped * advantage)
        if "ref" in extras:
            further = extras["ref"] - logprob
            estimates = {"k1": -further, "k2": further**2 / 2, "k3": jnp.expm1(further) - further}
            loss += self.kl_weight * estimates[self.kl]
        return loss - self.entropy_weight * entropy if self.entropy_weight else loss


def tiled_policy_loss(
    hidden: Float[Array, "*batch D"],
    head: Head,
    targets: Integer[Array, "*batch"],
    advantages: Float[Array, "*adv"],
    *,
    objective: Literal["clip", "importance", "reinforce"] = "clip",
    old_logprobs: Float[Array, "*batch"] | None = None,
    ref_logprobs: Float[Array, "*batch"] | None = None,
    mask: Mask | None = None,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    kl: Literal["k1", "k2", "k3"] = "k3",
    kl_weight: Scalar = 0.0,
    entropy_weight: Scalar = 0.0,
    normalize: Literal["tokens", "sequences"] = "tokens",
    normalizer: Scalar | None = None,
    num_tiles: int | Literal["auto"] = "auto",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    temperature: Scalar = 1.0,
    logit_softcap: Scalar | None = None,
    ignore_index: int = -100,
) -> Float[Array, ""]:
    """Compute a policy-gradient loss of REINFORCE, PPO or GRPO: `tiled_token_loss`, with its products and memory.

    With `ratio = exp(logprob - old_logprob)` and a token's advantage A, a token's loss is

    | objective | | |
    |---|---|---|
    | "reinforce" | `-A * logprob` | Williams 1992 |
    | "importance" | `-A * ratio` | of tokens that another policy drew |
    | "clip" | `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)` | PPO, GRPO, DAPO |

    (PPO: arXiv 1707.06347; GRPO: 2402.03300; two bounds: DAPO, 2503.14476),
    plus `kl_weight` times an estimate of the KL divergence from the reference, with `r = ref_logprob - logprob`: k1 is
    `-r`, k2 `r ** 2 / 2`, k3 `exp(r) - r - 1` (Schulman 2020); minus `entropy_weight` times the entropy of the token's
    distribution. They are estimates of a value: differentiated, k1 has an expected gradient of 0 on tokens that the
    policy itself drew, k2 that of the KL divergence, k3 another one.

    TRL's `loss_type`s (1.16) to the last digit, where masks are 0 and 1 (fractional ones it counts as at least 1 in a
    sequence):

    | TRL | here |
    |---|---|
    | "grpo" | `normalize="sequences"` |
    | "bnpo" | `normalize="tokens"` |
    | "dr_grpo" | `normalizer=B * max_completion_length` |
    | "dapo" | `normalizer=` the number of tokens of the whole batch, on all devices |

    `beta` is `kl_weight` with k3, `epsilon` and `epsilon_high` are the clips. Its
    `importance_sampling_level="sequence"` (GSPO) needs whole sequences first: take `tiled_logprobs`.

    Args:
        hidden: `[..., D]`, at the positions that predict the targets.
        head: `[V, D]`, or a tuple of matrices as in `tiled_token_loss`.
        targets: `[..., T]`, the ids that were drawn, or `ignore_index`.
        advantages: `[..., T]`, or one for each sequence, `[...]`; `group_advantages` makes GRPO's.
        objective: see above.
        old_logprobs: `[..., T]`, of the policy that drew; None for this one, whose ratio is 1, and has a gradient.
        ref_logprobs: `[..., T]`, of the reference policy; needed where `kl_weight` is not 0.
        mask: `[..., T]`, 1 where a token was drawn, 0 for prompts and padding.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise.
        kl: which estimate.
        kl_weight: at least 0.
        entropy_weight: of the bonus.
        normalize: "tokens" divides the sum by `normalizer`, default the sum of the mask; "sequences" takes the mean of
            each sequence's tokens, and divides their sum by `normalizer`, default the number of sequences, empty ones
            included.
        normalizer: give the count over all devices or micro-batches where these are parts of one batch.
        num_tiles: as `axis`, `temperature`, `logit_softcap` and `ignore_index`, of `tiled_token_loss`.

    Returns:
        A float32 scalar, with gradients for hidden and head: advantages, log-probabilities and the mask are data.
    """
    chosen = PolicyObjective(
        check_one_of("objective", objective, ("clip", "importance", "reinforce")),
        arguments.static_number("clip_low", clip_low, at_least=0, at_most=1),
        arguments.static_number("clip_high", clip_high, at_least=0),
        check_one_of("kl", kl, ("k1", "k2", "k3")),
        arguments.static_number("kl_weight", kl_weight, at_least=0),
        arguments.static_number("entropy_weight", entropy_weight),
    )
    check_one_of("normalize", normalize, ("tokens", "sequences"))
    ignore_index = check_whole("ignore_index", ignore_index, at_least=-(2**31))
    if (ref_logprobs is None) != (chosen.kl_weight == 0):
        raise ValueError(
            f"ref_logprobs and kl_weight belong together, got kl_weight={chosen.kl_weight:g} and "
            f"{'no ' if ref_logprobs is None else ''}ref_logprobs."
        )
    if objective == "reinforce" and old_logprobs is not None:
        raise ValueError(
            'objective="reinforce" has no use for old_logprobs: it takes the tokens as drawn by this very policy. For '
            'tokens of another one take "importance" or "clip".'
        )
    batch = arguments.check_batch(hidden, targets, mask)
    rows = batch.targets.shape
    extras = {"advantage": _check_advantages(advantages, rows)}
    for name, value in (("old", old_logprobs), ("ref", ref_logprobs)):
        if value is not None:
            extras[name] = arguments.as_floats(f"{name}_logprobs", value, "[...], one for each target")
            if extras[name].shape != rows:
                raise ValueError(f"{name}_logprobs must have hidden's batch shape {rows}, got {extras[name].shape}.")
    weights = batch.weights
    if normalize == "sequences":
        weights = _weights_by_sequence(batch, ignore_index)
        normalizer = math.prod(rows[:-1]) if normalizer is None else normalizer
    extras, weights = jax.lax.stop_gradient((extras, weights))
    return tiled_token_loss(
        chosen,
        batch.hidden,
        head,
        batch.targets,
        extras,
        weights=weights,
        normalizer=normalizer,
        num_tiles=num_tiles,
        axis=axis,
        temperature=temperature,
        logit_softcap=logit_softcap,
        ignore_index=ignore_index,
    )


def _check_advantages(value: Any, rows: tuple[int, ...]) -> Array:
    found = arguments.as_floats("advantages", value, "[..., T], or [...], one for each sequence")
    if found.shape == rows:
        return found
    if not rows or found.shape != rows[:-1]:
        raise ValueError(
            f"advantages must be one for each target {rows}, or one for each sequence {rows[:-1]}, got {found.shape}."
        )
    return jnp.broadcast_to(found[..., None], rows)


def _weights_by_sequence(batch: arguments.Batch, ignore_index: int) -> Array:
    """Return the mask, divided by its sum over each sequence."""
    if batch.targets.ndim == 0:
        raise ValueError('normalize="sequences" needs sequences: targets [..., T], got a single id.')
    _, counts, _ = known_targets(batch.targets, ignore_index, 1)
    mask = counts.astype(jnp.float32)
    if batch.weights is not None:
        mask = jnp.where(counts, batch.weights.astype(jnp.float32), 0)
    length = jnp.sum(mask, -1, keepdims=True)
    return mask / jnp.where(length == 0, 1, length)


def group_advantages(
    rewards: Float[Array, "*groups G"], *, scale: bool = True, epsilon: float = 1e-4
) -> Float[Array, "*groups G"]:
    """Return GRPO's advantages: each reward less the mean of its group, over the group's standard deviation.

    The deviation is that of TRL and PyTorch, with `G - 1` in its denominator, plus `epsilon`; `scale=False` leaves it
    out (Dr. GRPO, arXiv 2503.20783). No gradient.
    """
    check_one_of("scale", scale, (True, False))
    found = arguments.as_floats("rewards", rewards, "[..., G], the G answers to one prompt side by side")
    if found.ndim == 0 or found.shape[-1] < 2:
        raise ValueError(f"rewards must be [..., G] with G of at least 2 answers to a prompt, got shape {found.shape}.")
    above = found - jnp.mean(found, -1, keepdims=True)
    spread = jnp.std(found, -1, ddof=1, keepdims=True) + epsilon if scale else 1.0
    return jax.lax.stop_gradient(above / spread)


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
