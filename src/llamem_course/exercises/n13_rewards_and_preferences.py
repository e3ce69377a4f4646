"""The exercises of notebook 13: advantages within a group, the clipped gradient, a loss of sequences in tiles."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import llamem
from jaxmem import saved_residuals
from jaxmem.tracing.jaxprs import differentiation_pass, equations
from llamem_course.exercises import largest_array, operations_written
from llamem_course.exercises.exercise import Answer, Exercise


def _advantages(rewards_GB: Any, axis: Any = 1, ddof: int = 1, add: float = 0.0) -> Any:
    above_GB = rewards_GB - jnp.mean(rewards_GB, axis, keepdims=True)
    deviation = jnp.std(rewards_GB, axis, ddof=ddof, keepdims=True) + add
    # A mean of equals is rounded, so that their deviation need not be zero.
    equal = jnp.max(rewards_GB, axis, keepdims=True) == jnp.min(rewards_GB, axis, keepdims=True)
    return jnp.where(equal, 0, above_GB / jnp.where(equal, 1, deviation))


def _over(rewards_GB: Any, divided: Answer) -> Any:
    return divided(rewards_GB - rewards_GB.mean(1, keepdims=True), rewards_GB.std(1, ddof=1, keepdims=True))


def _one_for_each(answer: Answer, rewards_GB: Any) -> Any:
    found = answer(rewards_GB)
    shape = getattr(found, "shape", None)
    assert shape == rewards_GB.shape, f"one advantage for each reward, {rewards_GB.shape}; got {shape}."
    return found


def _all_rows_at_once(answer: Answer) -> None:
    few, many = (operations_written(answer, jnp.ones((size, 4))) for size in (3, 12))
    assert many < 1.5 * few, (
        f"right, but {few} operations for 3 prompts become {many} for 12: which argument of a mean works on all rows "
        "at once?"
    )


_GROUPS_GB = jnp.array([[0.0, 1.0, 2.0, 3.0], [10.0, 10.0, 10.0, 14.0], [5.0, 4.0, 5.0, 4.0]])

check_advantages_of = Exercise(
    1,
    _advantages,
    {
        "Five answers to one prompt": (jnp.array([[1.0, 0.0, 0.0, 0.5, 0.0]]),),
        "Answers to three prompts": (_GROUPS_GB,),
        "A hundredth of those rewards": (_GROUPS_GB / 100,),
        "A group of equals beside another": (jnp.array([[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 1.0]]),),
        "A group that hardly differs": (jnp.array([[0.5, 0.5 + 2**-11, 0.5 - 2**-11, 0.5]]),),
        "Groups of eight equals": (jnp.repeat(1 - jnp.arange(12.0)[:, None] / 12, 8, axis=1),),
        "A billionth of the rewards": (_GROUPS_GB / 1e9,),
    },
    "No second model had to guess what was to be expected: the group says it.",
    {
        "one advantage for each reward": lambda rewards: _advantages(rewards).mean(1),
        "What must the advantages of a group sum to, if an answer is measured by the mean of its own group?": (
            lambda rewards: rewards
        ),
        "These are rewards less their mean. A judge who gives 0 to 100 and one who gives 0 to 1 should push alike: "
        "what else is divided out?": lambda rewards: rewards - rewards.mean(1, keepdims=True),
        "They are too large by a factor that depends on the number of answers: what stands in the denominator of the "
        "standard deviation here?": partial(_advantages, ddof=0),
        "One group is right, three together are not. Along which axis lie the answers to one prompt?": (
            partial(_advantages, axis=None)
        ),
        "By what is each difference divided?": [partial(_advantages, axis=0), partial(_advantages, add=0.1)],
        "With 1e-4 added to the deviation, as TRL and llamem.group_advantages do, a hundredth of the rewards is pushed "
        "less. Here nothing is added.": llamem.group_advantages,
        "In a group of equals the deviation is zero, and you divide by it.": (
            lambda rewards: _over(rewards, lambda above, spread: above / spread)
        ),
        "The mean of equals is rounded, so that their deviation is tiny and not zero. How do you see that they are "
        "equal?": [
            lambda rewards: _over(rewards, lambda above, spread: above / jnp.where(spread == 0, 1, spread)),
            lambda rewards: _over(rewards, lambda above, spread: jnp.nan_to_num(above / spread)),
        ],
        "These rewards are not equal, and yours takes them as equal. How small may a deviation be?": [
            lambda rewards: _over(rewards, lambda above, spread: jnp.where(spread > 1e-3, above / spread, 0)),
            lambda rewards: _over(rewards, lambda above, spread: jnp.where(spread > 1e-6, above / spread, 0)),
        ],
    },
    {
        _all_rows_at_once: {
            "all rows at once": lambda rewards: jnp.concatenate([_advantages(row[None]) for row in rewards])
        }
    },
    otherwise="By what is each difference divided?",
    ask=_one_for_each,
    rtol=2e-5,
)


def _clipped_loss(z_NV: Any, targets_N: Any, advantages_N: Any, old_N: Any, epsilon: float) -> Any:
    logp_N = jnp.take_along_axis(jax.nn.log_softmax(z_NV), targets_N[:, None], 1)[:, 0]
    ratio_N = jnp.exp(logp_N - old_N)
    bounded_N = jnp.clip(ratio_N, 1 - epsilon, 1 + epsilon)
    return -jnp.sum(jnp.minimum(ratio_N * advantages_N, bounded_N * advantages_N))


_by_autodiff = jax.grad(_clipped_loss)


def _stops(ratio_N: Any, advantages_N: Any, epsilon: float) -> Any:
    return jnp.where(advantages_N > 0, ratio_N > 1 + epsilon, ratio_N < 1 - epsilon)


def _by_hand(
    z_NV: Any,
    targets_N: Any,
    advantages_N: Any,
    old_N: Any,
    epsilon: float,
    *,
    stops: Answer = _stops,
    g: Answer = lambda ratio, a: -ratio * a,
    softmax: Answer = jax.nn.softmax,
) -> Any:
    """Return the gradient of the clipped loss, right but for what is given."""
    hit_NV = jax.nn.one_hot(targets_N, z_NV.shape[1])
    ratio_N = jnp.exp(jnp.sum(jax.nn.log_softmax(z_NV) * hit_NV, 1) - old_N)
    g_N = jnp.where(stops(ratio_N, advantages_N, epsilon), 0, g(ratio_N, advantages_N))
    return g_N[:, None] * (hit_NV - softmax(z_NV))


def _unbounded(z_NV: Any) -> Any:
    return jnp.exp(z_NV) / jnp.exp(z_NV).sum(1, keepdims=True)


def _taken(of_NV: Any, targets_N: Any) -> Any:
    return jnp.take_along_axis(of_NV, targets_N[:, None], 1)[:, 0]


def _of_ratio(p_NV: Any, targets_N: Any, advantages_N: Any, ratio_N: Any, epsilon: float) -> Any:
    bounded_N = jnp.clip(ratio_N, 1 - epsilon, 1 + epsilon)
    moves_N = ratio_N * advantages_N <= bounded_N * advantages_N
    g_N = jnp.where(moves_N, -ratio_N * advantages_N, 0)
    return g_N[:, None] * (jax.nn.one_hot(targets_N, p_NV.shape[1]) - p_NV)


def _of_logprobs(logp_NV: Any, targets_N: Any, advantages_N: Any, old_N: Any, epsilon: float) -> Any:
    ratio_N = jnp.exp(_taken(logp_NV, targets_N) - old_N)
    return _of_ratio(jnp.exp(logp_NV), targets_N, advantages_N, ratio_N, epsilon)


def _but(**mistake: Answer) -> Answer:
    return partial(_by_hand, **mistake)


def _for_each_logit(answer: Answer, z_NV: Any, *given: Any) -> Any:
    found = answer(z_NV, *given)
    shape = getattr(found, "shape", None)
    assert shape == z_NV.shape, f"return a gradient for each logit, {z_NV.shape}; got {shape}."
    return found


def _without_autodiff(answer: Answer) -> None:
    z_NV, *given = _TOKENS
    program = jax.make_jaxpr(lambda z_NV: answer(z_NV, *given, _LOGP_N, 0.2))(z_NV).jaxpr
    assert not any(differentiation_pass(str(eqn.source_info.name_stack)) for eqn, _ in equations(program)), (
        "these are the right numbers, and autodiff found them. Write them yourself: where the loss stands at a bound "
        "its gradient is known, and everywhere else the notebook has a formula"
    )


_TOKENS = (
    jax.random.normal(jax.random.key(1), (6, 5)),
    jnp.array([0, 4, 2, 2, 1, 3]),
    jnp.array([1.5, -0.7, 2.0, -1.0, 0.8, -1.2]),
)
_LOGP_N = jnp.take_along_axis(jax.nn.log_softmax(_TOKENS[0]), _TOKENS[1][:, None], 1)[:, 0]
_LARGE_NV = 30 * jax.random.normal(jax.random.key(2), (3, 7)) + 100
_LARGE = _LARGE_NV, jnp.array([6, 0, 3]), jnp.array([0.5, -1.5, 2.5])


def _old(*ratios: float) -> Any:
    return _LOGP_N - jnp.log(jnp.array(ratios))


check_clipped_gradient = Exercise(
    2,
    _by_autodiff,
    {
        "Where old and new policy are one": (*_TOKENS, _LOGP_N, 0.2),
        "With ratios of 1.1 and 0.9, then 1.5 and 0.5 of good tokens and bad": (
            *_TOKENS,
            _old(1.1, 0.9, 1.5, 1.5, 0.5, 0.5),
            0.2,
        ),
        "With an epsilon of 0.1": (*_TOKENS, _old(1.05, 0.95, 1.105, 1.101, 0.899, 0.902), 0.1),
        "With logits of a hundred and more": (
            *_LARGE,
            jnp.take_along_axis(jax.nn.log_softmax(_LARGE_NV), _LARGE[1][:, None], 1)[:, 0] + 0.1,
            0.2,
        ),
    },
    "The clip is one-sided: it stops what went far enough in the wanted direction, and nothing else.",
    {
        "for each logit": lambda *given: _by_autodiff(*given).sum(0),
        "The sign: a loss falls where a good token gains.": lambda *given: -_by_autodiff(*given),
        "What happens to the loss when all logits of a token grow by the same, and what must a row of the gradient "
        "then sum to?": _but(softmax=jnp.zeros_like),
        "Each number is too small, by the number of tokens: what does the loss do with its terms?": (
            lambda z, *given: _by_autodiff(z, *given) / len(z)
        ),
        "Nothing is clipped yet, and already here it is wrong: what is g, and which word was drawn?": [
            _but(g=lambda ratio, a: -ratio * jnp.sign(a)),
            lambda z, targets, *given: _by_hand(z, z.argmax(1), *given),
        ],
        "Where the ratio is 1 you are right, at 1.1 and 0.9 not: is d ratio / d logp really 1?": (
            _but(g=lambda ratio, a: -a)
        ),
        "Nothing is clipped in your answer: what is the derivative of a loss that stands at its bound?": (
            _but(stops=lambda ratio, a, epsilon: jnp.zeros(len(a), bool))
        ),
        "A bad token whose ratio rose, or a good one whose ratio fell, went the wrong way, and the minimum lets it "
        "come back. Your answer holds it still: which of the two terms is the smaller one there?": [
            _but(stops=lambda ratio, a, epsilon: abs(ratio - 1) > epsilon),
            _but(stops=lambda ratio, a, epsilon: ratio > 1 + epsilon),
        ],
        "A good token above the bound, or a bad one below, must stand still. Compare the two terms of the minimum.": [
            _but(stops=lambda ratio, a, epsilon: (a > 0) & (ratio > 1 + epsilon)),
            _but(stops=lambda ratio, a, epsilon: (a < 0) & (ratio < 1 - epsilon)),
        ],
        "With 0.2 you are right: where exactly do the two bounds lie?": [
            lambda *given: _by_autodiff(*given[:-1], 0.2),
            _but(stops=lambda ratio, a, eps: jnp.where(a > 0, jnp.log(ratio) > eps, jnp.log(ratio) < -eps)),
        ],
        "With small logits you are right. What is exp(100) in float32, and the logarithm of a probability that was "
        "rounded to zero?": [
            _but(softmax=_unbounded),
            lambda z, *given: _of_logprobs(jnp.log(_unbounded(z)), *given),
            lambda z, *given: _of_logprobs(z - jnp.log(jnp.exp(z).sum(1, keepdims=True)), *given),
            lambda z, targets, a, old, eps: _of_ratio(
                _unbounded(z), targets, a, _taken(_unbounded(z), targets) / jnp.exp(old), eps
            ),
        ],
    },
    {_without_autodiff: {"autodiff found them": [lambda *given: _by_autodiff(*given)]}},
    otherwise="Which tokens stand still, and what is g for the others?",
    ask=_for_each_logit,
    rtol=1e-4,
)


def _own_logprobs(x_BTD: Any, head_VD: Any, drawn_BT: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(x_BTD @ head_VD.T), drawn_BT[..., None], -1)[..., 0]


def _tiled(x_BTD: Any, head_VD: Any, drawn_BT: Any) -> Any:
    return llamem.tiled_logprobs(x_BTD, head_VD, drawn_BT, num_tiles=4)


def _ratio(difference_BT: Any, mask_BT: Any) -> Any:
    return jnp.exp(jnp.sum(mask_BT * difference_BT, 1) / jnp.sum(mask_BT, 1))


def _sequences(
    x_BTD: Any,
    head_VD: Any,
    drawn_BT: Any,
    advantages_B: Any,
    old_BT: Any,
    mask_BT: Any,
    epsilon: float,
    *,
    logprobs: Answer = _own_logprobs,
    ratio: Answer = _ratio,
    clip: Answer = lambda ratio, epsilon: jnp.clip(ratio, 1 - epsilon, 1 + epsilon),
    mean: Answer = jnp.mean,
) -> Any:
    """Return the loss of sequences, right but for what is given."""
    of = ratio(logprobs(x_BTD, head_VD, drawn_BT) - old_BT, mask_BT)
    a = advantages_B.reshape(-1, *[1] * (of.ndim - 1))
    return -mean(jnp.minimum(of * a, clip(of, epsilon) * a))


_B, _T, _D, _V = 4, 16, 8, 768  # two tiles of words are halves: a tile is a multiple of 128
_KEYS = jax.random.split(jax.random.key(5), 4)
_X_BTD = jax.random.normal(_KEYS[0], (_B, _T, _D))
_HEAD_VD = jax.random.normal(_KEYS[1], (_V, _D)) / _D**0.5
_DRAWN_BT = jax.random.randint(_KEYS[2], (_B, _T), 0, _V)
_OWN_BT = _own_logprobs(_X_BTD, _HEAD_VD, _DRAWN_BT)
_WHOLE_BT = jnp.ones((_B, _T))


def _older() -> Any:
    """Return old log-probabilities: the four sequences' ratios are inside, above, above, below."""
    wanted_B1 = jnp.log(jnp.array([1.05, 1.5, 1.5, 0.6]))[:, None]
    noise_BT = jax.random.normal(_KEYS[3], (_B, _T))
    return _OWN_BT - wanted_B1 - 0.3 * (noise_BT - noise_BT.mean(1, keepdims=True))


def _loss(answer: Answer, x_BTD: Any, head_VD: Any, old_BT: Any, mask_BT: Any, epsilon: float) -> Any:
    loss = answer(x_BTD, head_VD, _DRAWN_BT, jnp.array([1.0, 0.7, -2.3, -0.9]), old_BT, mask_BT, epsilon)
    assert getattr(loss, "shape", None) == (), f"a loss is one number; got {getattr(loss, 'shape', loss)}."
    return loss


def _with_gradients(answer: Answer, *given: Any) -> Any:
    return jax.value_and_grad(partial(_loss, answer), (0, 1))(_X_BTD, _HEAD_VD, *given)


def _what_is_off(got: Any, expected: Any, *_: Any) -> str:
    (loss, (x, _)), (right, (exact, _)) = got, expected
    if not np.allclose(loss, right, rtol=1e-4):
        return f"the loss is {loss:.4f}."
    which = "head" if np.allclose(x, exact, atol=1e-5) else "hidden states"
    return f"the number is right, the gradient of the {which} is not."


def _without_logits(answer: Answer) -> None:
    def loss(x_BTD: Any) -> Any:
        return _loss(answer, x_BTD, _HEAD_VD, _OWN_BT, _WHOLE_BT, 0.2)

    largest = largest_array(jax.make_jaxpr(loss)(_X_BTD).jaxpr)
    assert largest <= _B * _T * _V // 2, (
        f"right, but an array of {largest} numbers appears on the way, and half of tokens times words is "
        f"{_B * _T * _V // 2}: which function of the library gives log-probabilities in tiles, and in how many here "
        "(`num_tiles=`)?"
    )
    largest = largest_array(jax.make_jaxpr(jax.grad(loss))(_X_BTD).jaxpr)
    kept = sum(row.bytes for row in saved_residuals(loss, _X_BTD).rows if not row.argument)
    assert largest <= _B * _T * _V // 2 and kept < 2 * _B * _T * _V, (
        f"right, but {kept:,} bytes wait for the backward pass, where all logits are {4 * _B * _T * _V:,}: each tile "
        "is small, and all of them are kept. What makes the backward pass compute a tile again?"
    )


def _three_and_one(x_BTD: Any, head_VD: Any, drawn_BT: Any) -> Any:
    logprobs = jax.checkpoint(_own_logprobs)
    parts = [logprobs(x_BTD[part], head_VD, drawn_BT[part]) for part in (slice(3), slice(3, None))]
    return jnp.concatenate(parts)


def _in_turn(x_BTD: Any, head_VD: Any, drawn_BT: Any) -> Any:
    return jnp.stack([_own_logprobs(x, head_VD, drawn) for x, drawn in zip(x_BTD, drawn_BT, strict=True)])


def _other(**mistake: Answer) -> Answer:
    return partial(_sequences, **{"logprobs": _tiled, **mistake})


check_sequence_policy_loss = Exercise(
    3,
    _sequences,
    {
        "Where old and new policy are one": (_OWN_BT, _WHOLE_BT, 0.2),
        "With ratios of 1.05, 1.5, 1.5 and 0.6": (_older(), _WHOLE_BT, 0.2),
        "With an epsilon of 0.1": (_older(), _WHOLE_BT, 0.1),
        "With 16, 9, 4 and 1 tokens": (
            _older(),
            (jnp.arange(_T) < jnp.array([[16], [9], [4], [1]])).astype(jnp.float32),
            0.2,
        ),
    },
    "One ratio a sequence, and no gradient was made before its last token was read.",
    {
        "a loss is one number": _other(mean=lambda terms: terms),
        "All ratios are 1 here, so the loss is minus the mean of the advantages.": _other(mean=jnp.sum),
        "What is stopped on the way to the hidden states?": (
            _other(logprobs=lambda *given: jax.lax.stop_gradient(_tiled(*given)))
        ),
        "What is stopped on the way to the head?": (
            _other(logprobs=lambda x, head, drawn: _tiled(x, jax.lax.stop_gradient(head), drawn))
        ),
        "This is the loss of tokens, each with a ratio of its own. Here a sequence has one: what is averaged first?": (
            _other(ratio=lambda difference, mask: jnp.exp(difference))
        ),
        "Nothing is clipped in your answer: two of these sequences went far enough in the wanted direction.": (
            _other(clip=lambda ratio, epsilon: ratio)
        ),
        "The exponential of a mean is not the mean of exponentials, nor the exponential of a sum.": [
            _other(ratio=lambda difference, mask: jnp.exp(difference).mean(1)),
            _other(ratio=lambda difference, mask: jnp.exp(jnp.sum(difference, 1))),
        ],
        "With 0.2 you are right: which number have you written down?": (
            _other(clip=lambda ratio, epsilon: jnp.clip(ratio, 0.8, 1.2))
        ),
        "Right for whole sequences. Which tokens count, and by how many is the sum divided?": [
            _other(ratio=lambda difference, mask: jnp.exp(jnp.mean(difference, 1))),
            _other(ratio=lambda difference, mask: jnp.exp(jnp.sum(mask * difference, 1) / mask.shape[1])),
        ],
    },
    {
        _without_logits: {
            "in how many here": [
                _sequences,
                _other(logprobs=_three_and_one),
                _other(logprobs=partial(llamem.tiled_logprobs, num_tiles=1)),
            ],
            "all of them are kept": _other(logprobs=_in_turn),
        }
    },
    otherwise="What is a sequence's ratio, and how is it clipped?",
    ask=_with_gradients,
    told=_what_is_off,
    rtol=1e-3,
)
