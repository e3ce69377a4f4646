"""Losses of reinforcement learning and of preferences over tiles: policy gradients (GRPO, PPO's clip), and DPO."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxmem.common.checks import check_one_of, check_whole, show
from llamem.losses import loss_arguments as arguments
from llamem.losses.cross_entropy import Head, Scalar, tiled_logprobs
from llamem.losses.token_loss import Mask, tiled_token_loss
from llamem.losses.weighted_sum import known_targets

__all__ = ["PolicyObjective", "group_advantages", "tiled_dpo_loss", "tiled_policy_loss"]


@dataclasses.dataclass(frozen=True)
class PolicyObjective:
    """What a policy-gradient loss makes of each token: REINFORCE, importance weights, or the clip of PPO and GRPO.

    With `ratio = exp(logprob - old_logprob)` and a token's advantage A, a token's loss is

    | kind | | |
    |---|---|---|
    | "reinforce" | `-A * logprob` | Williams 1992 |
    | "importance" | `-A * ratio` | of tokens that another policy drew |
    | "clip" | `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)` | PPO, GRPO, DAPO |

    (PPO: arXiv 1707.06347; GRPO: 2402.03300; two bounds: DAPO, 2503.14476),
    plus `kl_weight` times `exp(r) - r - 1` with `r = ref_logprob - logprob`, the estimate of the KL divergence from the
    reference policy that is called k3 (Schulman 2020); minus `entropy_weight` times the entropy of the token's
    distribution.

    The four numbers are part of the compiled program: other values compile another one, traced ones are refused.
    Raises ValueError or TypeError for a kind or a number that cannot be.
    """

    kind: Literal["clip", "importance", "reinforce"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.0
    entropy_weight: float = 0.0

    def __post_init__(self):
        check_one_of("kind", self.kind, ("clip", "importance", "reinforce"))
        bounds = {"clip_low": {"at_least": 0, "at_most": 1}, "clip_high": {"at_least": 0}, "kl_weight": {"at_least": 0}}
        for name in ("clip_low", "clip_high", "kl_weight", "entropy_weight"):
            number = arguments.static_number(name, getattr(self, name), **bounds.get(name, {}))
            object.__setattr__(self, name, number)

    def __call__(self, logprob: Array, entropy: Array, extras: dict[str, Array]) -> Array:
        """Return one token's loss, from its "advantage" and, if there are any, "old" and "ref" log-probabilities."""
        advantage = extras["advantage"]
        ratio = jnp.exp(_bounded(logprob - extras.get("old", jax.lax.stop_gradient(logprob))))
        if self.kind == "reinforce":
            loss = -advantage * logprob
        elif self.kind == "importance":
            loss = -advantage * ratio
        else:
            clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
            loss = -jnp.minimum(ratio * advantage, clipped * advantage)
        if "ref" in extras:
            log_ratio = _bounded(extras["ref"] - logprob)
            loss += self.kl_weight * (jnp.expm1(log_ratio) - log_ratio)
        return loss - self.entropy_weight * entropy if self.entropy_weight else loss


def _bounded(log_ratio: Array) -> Array:
    """Return a logarithm whose exponential, and its gradient, is a number in f32: infinity times 0 would be none."""
    return jnp.minimum(log_ratio, 80.0)


def tiled_policy_loss(
    hidden: Float[Array, "*batch D"],
    head: Head,
    targets: Integer[Array, "*batch"],
    advantages: Float[Array, "*adv"],
    *,
    objective: PolicyObjective = PolicyObjective(),
    old_logprobs: Float[Array, "*batch"] | None = None,
    ref_logprobs: Float[Array, "*batch"] | None = None,
    mask: Mask | None = None,
    normalize: Literal["tokens", "sequences"] = "tokens",
    normalizer: Scalar | None = None,
    num_tiles: int | Literal["auto"] = "auto",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    temperature: Scalar = 1.0,
    logit_softcap: Scalar | None = None,
    ignore_index: int = -100,
) -> Float[Array, ""]:
    """Compute a policy-gradient loss of REINFORCE, PPO or GRPO: `tiled_token_loss`, with its products and memory.

    TRL's `loss_type`s (1.16) to the last digit, where masks are 0 and 1 (fractional ones it counts as at least 1 in a
    sequence):

    | TRL | here |
    |---|---|
    | "grpo" | `normalize="sequences"` |
    | "bnpo" | `normalize="tokens"` |
    | "dr_grpo" | `normalizer=B * max_completion_length` |
    | "dapo" | `normalizer=` the number of tokens of the whole batch, on all devices |

    `beta` is the objective's `kl_weight`, `epsilon` and `epsilon_high` are its clips. TRL's
    `importance_sampling_level="sequence"` (GSPO) needs whole sequences first: take `tiled_logprobs`.

    Args:
        hidden: `[..., D]`, at the positions that predict the targets.
        head: `[V, D]`, or a tuple of matrices as in `tiled_token_loss`.
        targets: `[..., T]`, the ids that were drawn, or `ignore_index`.
        advantages: `[..., T]`, or one for each sequence, `[...]`; `group_advantages` makes GRPO's.
        objective: a token's loss; by default the clip of PPO, without a reference policy.
        old_logprobs: `[..., T]`, of the policy that drew; None for this one, whose ratio is 1, and has a gradient.
        ref_logprobs: `[..., T]`, of the reference policy; needed where the objective's `kl_weight` is not 0.
        mask: `[..., T]`, 1 where a token was drawn, 0 for prompts and padding.
        normalize: "tokens" divides the sum by `normalizer`, default the sum of the mask; "sequences" takes the mean of
            each sequence's tokens, and divides their sum by `normalizer`, default the number of sequences, empty ones
            included.
        normalizer: give the count over all devices or micro-batches where these are parts of one batch.
        num_tiles: as `axis`, `temperature`, `logit_softcap` and `ignore_index`, of `tiled_token_loss`.

    Returns:
        A float32 scalar, with gradients for hidden and head: advantages, log-probabilities and the mask are data.
    """
    if not isinstance(objective, PolicyObjective):
        raise TypeError(
            f"objective={show(objective)}: expected a llamem.PolicyObjective, such as "
            'llamem.PolicyObjective("clip", clip_high=0.28).'
        )
    check_one_of("normalize", normalize, ("tokens", "sequences"))
    ignore_index = check_whole("ignore_index", ignore_index, at_least=-(2**31))
    if (ref_logprobs is None) != (objective.kl_weight == 0):
        raise ValueError(
            f"ref_logprobs and kl_weight belong together, got kl_weight={objective.kl_weight:g} and "
            f"{'no ' if ref_logprobs is None else ''}ref_logprobs."
        )
    if objective.kind == "reinforce" and old_logprobs is not None:
        raise ValueError(
            'PolicyObjective("reinforce") has no use for old_logprobs: it takes the tokens as drawn by this very '
            'policy. For tokens of another one take "importance" or "clip".'
        )
    batch = arguments.check_batch(hidden, targets, mask)
    tokens_shape = batch.targets.shape
    extras = {"advantage": _check_advantages(advantages, tokens_shape)}
    for name, logprobs in (("old", old_logprobs), ("ref", ref_logprobs)):
        if logprobs is not None:
            extras[name] = arguments.as_floats(f"{name}_logprobs", logprobs, "[...], one for each target")
            if extras[name].shape != tokens_shape:
                raise ValueError(
                    f"{name}_logprobs must have hidden's batch shape {tokens_shape}, got {extras[name].shape}."
                )
    weights = batch.weights
    if normalize == "sequences":
        weights = _weights_by_sequence(batch, ignore_index)
        normalizer = math.prod(tokens_shape[:-1]) if normalizer is None else normalizer
    extras, weights = jax.lax.stop_gradient((extras, weights))
    return tiled_token_loss(
        objective,
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


def _check_advantages(advantages: Any, shape: tuple[int, ...]) -> Array:
    advantages = arguments.as_floats("advantages", advantages, "[..., T], or [...], one for each sequence")
    if advantages.shape == shape:
        return advantages
    if not shape or advantages.shape != shape[:-1]:
        raise ValueError(
            f"advantages must be one for each target {shape}, or one for each sequence {shape[:-1]}, got "
            f"{advantages.shape}."
        )
    return jnp.broadcast_to(advantages[..., None], shape)


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
    rewards = arguments.as_floats("rewards", rewards, "[..., G], the G answers to one prompt side by side")
    if rewards.ndim == 0 or rewards.shape[-1] < 2:
        raise ValueError(
            f"rewards must be [..., G] with G of at least 2 answers to a prompt, got shape {rewards.shape}."
        )
    above_mean = rewards - jnp.mean(rewards, -1, keepdims=True)
    deviation = jnp.std(rewards, -1, ddof=1, keepdims=True) + epsilon if scale else 1.0
    return jax.lax.stop_gradient(above_mean / deviation)


def tiled_dpo_loss(
    hidden: Float[Array, "2 *pairs T D"],
    head: Head,
    targets: Integer[Array, "2 *pairs T"],
    ref_logprobs: Float[Array, "2 *pairs"],
    *,
    beta: Scalar = 0.1,
    mask: Mask | None = None,
    ignore_index: int = -100,
    num_tiles: int | Literal["auto"] = "auto",
    temperature: Scalar = 1.0,
    vocab_axis_name: str | None = None,
) -> Float[Array, ""]:
    """Compute the loss of direct preference optimisation (arXiv 2305.18290), a tile of logits at a time.

    With `r = beta * (sum of log-probabilities - the reference's)` of an answer, the mean over pairs of
    `-log sigmoid(r_chosen - r_rejected)`. A token's gradient waits for the sums of both answers, so its logits are
    computed twice: 4 matrix products, 2 with a frozen head. TRL calls this loss "sigmoid".

    Args:
        hidden: `[2, ..., T, D]`: the chosen answers, then the rejected ones.
        head: `[V, D]`, or a tuple of matrices, as `tiled_logprobs` takes it.
        targets: `[2, ..., T]`, ids or `ignore_index`.
        ref_logprobs: `[2, ...]`, of whole answers under the reference policy; no gradient.
        beta: the strength of the pull back to the reference.
        mask: `[2, ..., T]`, 1 where a token belongs to the answer.
        ignore_index: the id of targets that do not count.
        num_tiles: as `temperature` and `vocab_axis_name`, of `tiled_logprobs`.

    Returns:
        A float32 scalar.
    """
    beta = arguments.static_number("beta", beta, above=0)
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
    return -jnp.mean(jax.nn.log_sigmoid(margin))
