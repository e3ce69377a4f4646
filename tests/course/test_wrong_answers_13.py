"""Wrong answers to the exercises of notebook 13: each is refused, with a hint that leads on and does not tell."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from answers import Answers, refuse

import llamem
from llamem_course.exercises import rewards_and_preferences as rl


def advantages(rewards, axis=1, ddof=1, add=0.0, spread=True):
    above = rewards - jnp.mean(rewards, axis, keepdims=True)
    deviation = jnp.std(rewards, axis, ddof=ddof, keepdims=True) + add
    equal = jnp.max(rewards, axis, keepdims=True) == jnp.min(rewards, axis, keepdims=True)
    return jnp.where(equal, 0, above / jnp.where(equal, 1, deviation)) if spread else above


def guarded_by_its_deviation(rewards, add=0.0):
    """Wrong for eight times 0.1, whose mean in float32 is not 0.1."""
    deviation = jnp.std(rewards, axis=1, ddof=1, keepdims=True) + add
    return (rewards - rewards.mean(1, keepdims=True)) / jnp.where(deviation == 0, 1, deviation)


def with_a_least_deviation(rewards):
    deviation = jnp.std(rewards, axis=1, ddof=1, keepdims=True)
    above = rewards - rewards.mean(1, keepdims=True)
    return jnp.where(deviation < 1e-6, 0, above / jnp.maximum(deviation, 1e-6))


def divided_by_nothing(rewards):
    return (rewards - rewards.mean(1, keepdims=True)) / jnp.std(rewards, axis=1, ddof=1, keepdims=True)


def row_after_row(rewards):
    return jnp.concatenate([advantages(row[None]) for row in rewards])


def logprobs(x, head, drawn):
    return jnp.take_along_axis(jax.nn.log_softmax(x @ head.T), drawn[..., None], -1)[..., 0]


def sequence_loss(x, head, drawn, a, old, mask, epsilon, way="right"):
    logp = llamem.tiled_logprobs(x, head, drawn, num_tiles=4)
    if way == "logits":
        logp = logprobs(x, head, drawn)
    if way == "the head stopped":
        logp = llamem.tiled_logprobs(x, jax.lax.stop_gradient(head), drawn)
    if way == "sequence by sequence":
        logp = jnp.stack([logprobs(x[i], head, drawn[i]) for i in range(len(x))])
    if way == "sequence by sequence, made again":
        one = jax.checkpoint(lambda rows: logprobs(rows[0], head, rows[1]))
        logp = jax.lax.map(one, (x, drawn))
    if way == "stopped":
        logp = jax.lax.stop_gradient(logp)
    difference = logp - old
    mean = jnp.sum(mask * difference, 1) / jnp.sum(mask, 1)
    if way == "sum":
        mean = jnp.sum(mask * difference, 1)
    if way == "no mask":
        mean = jnp.mean(difference, 1)
    if way == "whole length":
        mean = jnp.sum(mask * difference, 1) / mask.shape[1]
    ratio = jnp.exp(mean)
    if way == "mean of ratios":
        ratio = jnp.sum(mask * jnp.exp(difference), 1) / jnp.sum(mask, 1)
    if way == "tokens":
        ratio, a = jnp.exp(difference), a[:, None]
    bounded = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
    if way == "no clip":
        bounded = ratio
    least = jnp.maximum(ratio * a, bounded * a) if way == "maximum" else jnp.minimum(ratio * a, bounded * a)
    return -(jnp.sum if way == "sum of sequences" else jnp.mean)(least)


def sequence_loss_of(way):
    return rl.check_sequence_policy_loss, partial(sequence_loss, way=way)


def by_ratio_of_geometric_means(x, head, drawn, a, old, mask, epsilon):
    logp = llamem.tiled_logprobs(x, head, drawn)
    weights = mask / mask.sum(axis=1, keepdims=True)
    ratio = jnp.prod(jnp.exp(weights * (logp - old)), axis=1)
    good = jnp.minimum(ratio, 1 + epsilon) * a
    bad = jnp.maximum(ratio, 1 - epsilon) * a
    return -jnp.where(a > 0, good, bad).mean()


def clipped(z, targets, advantages, old, epsilon, way="right"):
    p = jnp.exp(z) / jnp.exp(z).sum(1, keepdims=True) if way == "unstable" else jax.nn.softmax(z)
    hit = jax.nn.one_hot(targets, z.shape[1])
    ratio = jnp.exp(jnp.sum(jax.nn.log_softmax(z) * hit, 1) - old)
    bounded = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
    free = ratio * advantages <= bounded * advantages
    if way == "log":
        bounded = jnp.exp(jnp.clip(jnp.log(ratio), -epsilon, epsilon))
        free = ratio * advantages <= bounded * advantages
    if way == "both sides":
        free = ratio == bounded
    if way == "the wrong side":
        free = ratio * advantages >= bounded * advantages
    if way == "never":
        free = jnp.ones(len(z), bool)
    g = -advantages * (1.0 if way == "no ratio" else ratio) * free
    if way == "sign":
        g = -g
    if way == "only the target":
        return g[:, None] * hit
    if way == "sum":
        return (g[:, None] * (hit - p)).sum(0)
    if way == "mean":
        g = g / len(g)
    return g[:, None] * (hit - p)


def stopped_where(stops):
    """The gradient of the clipped loss, but that a token stands still where `stops(ratio, advantage, epsilon)`."""

    def answer(z, targets, advantages, old, epsilon):
        hit = jax.nn.one_hot(targets, z.shape[1])
        ratio = jnp.exp(jnp.sum(jax.nn.log_softmax(z) * hit, 1) - old)
        g = jnp.where(stops(ratio, advantages, epsilon), 0, -advantages * ratio)
        return g[:, None] * (hit - jax.nn.softmax(z))

    return answer


def by_autodiff(z, targets, advantages, old, epsilon):
    def loss(z):
        hit = jax.nn.one_hot(targets, z.shape[1])
        ratio = jnp.exp(jnp.sum(jax.nn.log_softmax(z) * hit, 1) - old)
        return -jnp.sum(jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages))

    return jax.grad(loss)(z)


def by_autodiff_of_each_token(z, targets, advantages, old, epsilon):
    def loss(logp, old, a):
        ratio = jnp.exp(logp - old)
        return -jnp.minimum(ratio * a, jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * a)

    hit = jax.nn.one_hot(targets, z.shape[1])
    logp = jnp.sum(jax.nn.log_softmax(z) * hit, 1)
    return jax.vmap(jax.grad(loss))(logp, old, advantages)[:, None] * (hit - jax.nn.softmax(z))


WRONG: Answers = {
    "rewards as they are": (rl.check_advantages_of, lambda r: r, "sum to"),
    "less the mean alone": (rl.check_advantages_of, partial(advantages, spread=False), "what else is divided out"),
    "the population's deviation": (rl.check_advantages_of, partial(advantages, ddof=0), "in the denominator"),
    "one mean for all": (rl.check_advantages_of, partial(advantages, axis=None), "Along which axis"),
    "down the columns": (rl.check_advantages_of, partial(advantages, axis=0), "not right yet|divide by it|sum to"),
    "a tenth added": (rl.check_advantages_of, partial(advantages, add=0.1), "not right yet"),
    "a thousandth added": (
        rl.check_advantages_of,
        partial(advantages, add=1e-3),
        "added to the deviation|not right yet",
    ),
    "1e-4 added, as TRL does": (rl.check_advantages_of, partial(advantages, add=1e-4), "as TRL and llamem"),
    "the library's own": (rl.check_advantages_of, llamem.group_advantages, "as TRL and llamem"),
    "the deviation compared with zero": (rl.check_advantages_of, guarded_by_its_deviation, "what else says that all"),
    "1e-8 added": (rl.check_advantages_of, partial(guarded_by_its_deviation, add=1e-8), "what else says that all"),
    "1e-6 added": (rl.check_advantages_of, partial(guarded_by_its_deviation, add=1e-6), "what else says that all"),
    "zero for no number": (
        rl.check_advantages_of,
        lambda rewards: jnp.nan_to_num(divided_by_nothing(rewards)),
        "what else says that all",
    ),
    "a least deviation": (rl.check_advantages_of, with_a_least_deviation, "what else says that all"),
    "nothing for equals": (rl.check_advantages_of, divided_by_nothing, "group of equals"),
    "row after row": (rl.check_advantages_of, row_after_row, "all rows|all "),
    "one number a group": (rl.check_advantages_of, lambda r: advantages(r).mean(1), "for each reward"),
    "the loss of tokens": (*sequence_loss_of("tokens"), "what is averaged first"),
    "never clipped, sequences": (*sequence_loss_of("no clip"), "nothing is clipped"),
    "the sum of logarithms": (*sequence_loss_of("sum"), "exponential of a sum"),
    "the mean of ratios": (*sequence_loss_of("mean of ratios"), "mean of exponentials"),
    "the larger of both": (*sequence_loss_of("maximum"), "or its clip"),
    "every token counted": (*sequence_loss_of("no mask"), "which tokens count"),
    "divided by the longest": (*sequence_loss_of("whole length"), "which tokens count"),
    "a sum over sequences": (*sequence_loss_of("sum of sequences"), "the mean of the advantages"),
    "no gradient": (*sequence_loss_of("stopped"), "stopped on the way"),
    "no gradient for the head": (*sequence_loss_of("the head stopped"), "the head does not"),
    "all tiles kept": (*sequence_loss_of("sequence by sequence"), "all of them are kept"),
    "with all logits": (*sequence_loss_of("logits"), "tokens times words"),
    "epsilon of 0.2": (
        rl.check_sequence_policy_loss,
        lambda x, head, drawn, a, old, mask, epsilon: sequence_loss(x, head, drawn, a, old, mask, 0.2),
        "with 0.1 not",
    ),
    "clipped above alone": (
        rl.check_clipped_gradient,
        stopped_where(lambda r, a, epsilon: r > 1 + epsilon),
        "holds it still",
    ),
    "good tokens clipped alone": (
        rl.check_clipped_gradient,
        stopped_where(lambda r, a, epsilon: (a > 0) & (r > 1 + epsilon)),
        "must stand still",
    ),
    "bad tokens clipped alone": (
        rl.check_clipped_gradient,
        stopped_where(lambda r, a, epsilon: (a < 0) & (r < 1 - epsilon)),
        "must stand still",
    ),
    "a bound of 1 / (1 + epsilon)": (
        rl.check_clipped_gradient,
        stopped_where(lambda r, a, epsilon: jnp.where(a > 0, r > 1 + epsilon, r < 1 / (1 + epsilon))),
        "two bounds",
    ),
    "the likeliest token": (
        rl.check_clipped_gradient,
        lambda z, y, *rest: clipped(z, z.argmax(1), *rest),
        "already there it is wrong",
    ),
    "the advantage's sign": (
        rl.check_clipped_gradient,
        lambda z, y, a, *rest: clipped(z, y, jnp.sign(a), *rest),
        "already there it is wrong",
    ),
    "upwards": (rl.check_clipped_gradient, partial(clipped, way="sign"), "the sign"),
    "only the target": (rl.check_clipped_gradient, partial(clipped, way="only the target"), "a row sums to"),
    "a mean": (rl.check_clipped_gradient, partial(clipped, way="mean"), "6 times too small"),
    "no ratio": (rl.check_clipped_gradient, partial(clipped, way="no ratio"), "at 1.1 and 0.9 not"),
    "never clipped": (rl.check_clipped_gradient, partial(clipped, way="never"), "nothing is clipped"),
    "clipped on both sides": (rl.check_clipped_gradient, partial(clipped, way="both sides"), "holds it still"),
    "clipped on the wrong side": (rl.check_clipped_gradient, partial(clipped, way="the wrong side"), "holds it still"),
    "one row": (rl.check_clipped_gradient, partial(clipped, way="sum"), "for each logit"),
    "by autodiff": (rl.check_clipped_gradient, by_autodiff, "autodiff found them"),
    "by autodiff, token by token": (rl.check_clipped_gradient, by_autodiff_of_each_token, "autodiff found them"),
    "epsilon fixed": (
        rl.check_clipped_gradient,
        lambda z, y, a, old, epsilon: clipped(z, y, a, old, 0.2),
        "with 0.1 not",
    ),
    "two epsilons": (
        rl.check_clipped_gradient,
        lambda z, y, a, old, epsilon: clipped(z, y, a, old, 2 * epsilon),
        "with 0.1 not|stand still|is clipped",
    ),
    "clipped in log space": (rl.check_clipped_gradient, partial(clipped, way="log"), "with 0.1 not"),
    "exponentials of large logits": (rl.check_clipped_gradient, partial(clipped, way="unstable"), "with small logits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_refused_with_its_hint(name):
    refuse(WRONG[name], "einsum", "softmax", "maximum(")


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (rl.check_advantages_of, advantages),
        (rl.check_advantages_of, jax.vmap(lambda row: advantages(row[None])[0])),
        (rl.check_clipped_gradient, clipped),
        (rl.check_sequence_policy_loss, sequence_loss),
        (rl.check_sequence_policy_loss, partial(sequence_loss, way="sequence by sequence, made again")),
        (rl.check_sequence_policy_loss, by_ratio_of_geometric_means),
    ],
)
def test_a_right_answer_is_accepted(check, answer, capsys):
    check(answer)
    assert "correct" in capsys.readouterr().out
