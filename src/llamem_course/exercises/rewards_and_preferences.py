"""Checks of the exercises of notebook 13."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jaxmem import saved_residuals
from jaxmem.tracing.jaxprs import differentiation_pass, equations
from llamem_course.exercises import grade, largest_array, operations_written


def check_advantages_of(fn: Callable[..., Any]) -> None:
    """Exercise 1: rewards, measured by their own group."""

    def right(rewards_GB: Any) -> np.ndarray:
        rewards_GB = np.asarray(rewards_GB, np.float64)
        spread = rewards_GB.std(axis=1, ddof=1, keepdims=True)
        return (rewards_GB - rewards_GB.mean(axis=1, keepdims=True)) / np.where(spread == 0, 1, spread)

    def body() -> str:
        one = jnp.array([[1.0, 0.0, 0.0, 0.5, 0.0]])
        found = fn(one)
        shape = getattr(found, "shape", None)
        assert shape == one.shape, f"one advantage for each reward, {one.shape}; got {shape}"
        found = np.asarray(found)
        assert abs(found.sum()) < 1e-4, (
            f"the advantages of a group sum to {found.sum():.2f}. What must they sum to, if an answer is measured by "
            "the mean of its own group?"
        )
        assert not np.allclose(found, one - one.mean(), atol=1e-4), (
            "these are rewards less their mean. A judge who gives 0 to 100 and one who gives 0 to 1 should push alike: "
            "what else is divided out?"
        )
        population = (np.asarray(one) - one.mean()) / np.asarray(one).std()
        assert not np.allclose(found, population, rtol=1e-3), (
            "the numbers are too large by a factor that depends on the number of answers: what stands in the "
            "denominator of the standard deviation here?"
        )
        _close(found, right(one), "one group alone is not right yet: by what is each difference divided?")
        groups = jnp.array([[0.0, 1.0, 2.0, 3.0], [10.0, 10.0, 10.0, 14.0], [5.0, 4.0, 5.0, 4.0]])
        _close(
            fn(groups),
            right(groups),
            "one group is right, three together are not: an easy question earns more for any answer. Along which axis "
            "lie the answers to one prompt?",
        )
        small = 1e-2 * groups
        found, spread = np.asarray(fn(small)), np.asarray(small).std(axis=1, ddof=1, keepdims=True)
        assert not np.allclose(found, right(small) * spread / (spread + 1e-4), rtol=1e-3, atol=1e-4), (
            "with 1e-4 added to the deviation, as TRL and llamem.group_advantages do, the advantages depend on how "
            "large the rewards are: a hundredth of them is pushed less. Here nothing is added. How else is a group of "
            "equals kept from dividing by zero?"
        )
        _close(
            found,
            right(small),
            "right for rewards around one, not for a hundredth of them: what have you added to the deviation?",
        )
        equal = fn(jnp.array([[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 1.0]]))
        assert np.isfinite(np.asarray(equal)).all(), "in a group of equals the deviation is zero, and you divide by it"
        assert np.abs(np.asarray(equal)[0]).max() == 0, "in a group of equals nobody has an advantage"
        _close(equal, right([[0.25] * 4, [0.0, 1.0, 0.0, 1.0]]), "beside a group of equals the other one is wrong")
        rewards_G = np.arange(1, 12, dtype=np.float32)[:, None] / np.array([10, 12, 0.099], np.float32)
        alike_GB = jnp.repeat(rewards_G.reshape(-1, 1), 8, axis=1)
        found_G = np.abs(np.asarray(fn(alike_GB))).max(axis=1)
        worst = int(found_G.argmax())
        assert found_G[worst] == 0, (
            f"eight answers with the reward {alike_GB[worst, 0]:.3f} each get an advantage of {found_G[worst]:.2g}. In "
            "float32 the mean of equal numbers may be off by a rounding, and then so is the deviation: what else says "
            "that all are equal?"
        )
        few, many = (operations_written(fn, jnp.ones((size, 4))) for size in (3, 12))
        assert many < 1.5 * few, (
            f"right, but {few} operations for 3 prompts become {many} for 12: which argument of a mean works on all "
            "rows at once?"
        )
        return "No second model had to guess what was to be expected: the group says it."

    grade(1, body)


def check_clipped_gradient(fn: Callable[..., Any]) -> None:
    """Exercise 2: the gradient of PPO's clipped loss for the logits."""
    z_NV = jax.random.normal(jax.random.key(1), (6, 5))
    targets_N = jnp.array([0, 4, 2, 2, 1, 3])
    advantages_N = jnp.array([1.5, -0.7, 2.0, -1.0, 0.8, -1.2])
    logp_N = jnp.take_along_axis(jax.nn.log_softmax(z_NV), targets_N[:, None], 1)[:, 0]
    # Ratios: inside, inside, above (good), above (bad), below (good), below (bad).
    ratios_N = jnp.array([1.1, 0.9, 1.5, 1.5, 0.5, 0.5])
    epsilon = 0.2

    def loss_of(targets_N: Any, advantages_N: Any) -> Callable[..., Any]:
        def loss(z_NV: Any, old_N: Any, clip: bool, epsilon: float = epsilon) -> Any:
            logp_N = jnp.take_along_axis(jax.nn.log_softmax(z_NV), targets_N[:, None], 1)[:, 0]
            ratio_N = jnp.exp(logp_N - old_N)
            bounded_N = jnp.clip(ratio_N, 1 - epsilon, 1 + epsilon)
            least_N = jnp.minimum(ratio_N * advantages_N, bounded_N * advantages_N)
            return -jnp.sum(least_N if clip else ratio_N * advantages_N)

        return loss

    losses = loss_of(targets_N, advantages_N)

    def body() -> str:
        on_policy = fn(z_NV, targets_N, advantages_N, logp_N, epsilon)
        exact = np.asarray(jax.grad(losses)(z_NV, logp_N, True))
        shape = getattr(on_policy, "shape", None)
        assert shape == z_NV.shape, f"return a gradient for each logit, {z_NV.shape}; got {shape}"
        assert not np.allclose(on_policy, -exact, atol=1e-5), "the sign: a loss falls where a good token gains"
        rows_N = np.asarray(on_policy).sum(1)
        far = rows_N[np.abs(rows_N).argmax()]
        assert np.allclose(rows_N, 0, atol=1e-5), (
            f"a row sums to {far:.3f}. What happens to the loss when all logits of a token grow by the same, "
            "and what must a row of the gradient then sum to?"
        )
        assert not np.allclose(on_policy * len(z_NV), exact, rtol=1e-3, atol=1e-4), (
            f"with {len(z_NV)} tokens each number is {len(z_NV)} times too small: what does the loss do with its terms?"
        )
        _close(on_policy, exact, "where old and new policy are one nothing is clipped, and already there it is wrong")
        old_N = logp_N - jnp.log(ratios_N)
        found = np.asarray(fn(z_NV, targets_N, advantages_N, old_N, epsilon))
        exact = np.asarray(jax.grad(losses)(z_NV, old_N, True))
        _close(
            found[:2],
            exact[:2],
            "where the ratio is 1 you are right, at 1.1 and 0.9 not: is d ratio / d logp really 1?",
        )
        free = np.asarray(jax.grad(losses)(z_NV, old_N, False))
        assert not np.allclose(found, free, atol=1e-5), (
            "nothing is clipped in your answer: what is the derivative of a loss that stands at its bound?"
        )
        assert np.abs(found[3]).max() > 0 and np.abs(found[4]).max() > 0, (
            "a bad token whose ratio rose, or a good one whose ratio fell, went the wrong way, and the minimum lets it "
            "come back. Your answer holds it still: which of the two terms is the smaller one there?"
        )
        assert np.abs(found[2]).max() == 0 and np.abs(found[5]).max() == 0, (
            "a good token above the bound, or a bad one below, must stand still. Compare the two terms of the minimum"
        )
        _close(found, exact, "the right tokens are clipped, but the others are wrong")
        near_N = logp_N - jnp.log(jnp.array([1.05, 0.95, 1.105, 1.101, 0.899, 0.902]))
        found = np.asarray(fn(z_NV, targets_N, advantages_N, near_N, 0.1))
        exact = np.asarray(jax.grad(losses)(z_NV, near_N, True, 0.1))
        _close(found, exact, "with epsilon 0.2 you are right, with 0.1 not: where exactly do the two bounds lie?")
        few_NV = 30 * jax.random.normal(jax.random.key(2), (3, 7)) + 100
        few = few_NV, jnp.array([6, 0, 3]), jnp.array([0.5, -1.5, 2.5])
        old_N = jnp.take_along_axis(jax.nn.log_softmax(few_NV), few[1][:, None], 1)[:, 0] + 0.1
        found, exact = fn(*few, old_N, epsilon), jax.grad(loss_of(*few[1:]))(few_NV, old_N, True)
        _close(
            found,
            exact,
            "with small logits you are right, with logits of a hundred and more not: what is exp(100) in float32, and "
            "the logarithm of a probability that was rounded to zero?",
        )
        program = jax.make_jaxpr(lambda z_NV: fn(z_NV, targets_N, advantages_N, logp_N, epsilon))(z_NV).jaxpr
        assert not any(_differentiated(equation) for equation, _ in equations(program)), (
            "these are the right numbers, and autodiff found them. Write them yourself: where the loss stands at a "
            "bound its gradient is known, and everywhere else the notebook has a formula for any loss of a token's "
            "log-probability"
        )
        return "The clip is one-sided: it stops what went far enough in the wanted direction, and nothing else."

    grade(2, body)


def check_sequence_policy_loss(fn: Callable[..., Any]) -> None:
    """Exercise 3: a clipped loss of whole sequences' ratios, without the logits."""
    B, T, D, V = 4, 16, 8, 640
    keys = jax.random.split(jax.random.key(5), 4)
    x_BTD, head_VD = jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (V, D)) / D**0.5
    drawn_BT = jax.random.randint(keys[2], (B, T), 0, V)
    own_BT = _own_logprobs(x_BTD, head_VD, drawn_BT)
    # The mean differences of the four sequences: inside, above, above, below.
    wanted_B1 = jnp.log(jnp.array([1.05, 1.5, 1.5, 0.6]))[:, None]
    noise_BT = jax.random.normal(keys[3], (B, T))
    old_BT = own_BT - wanted_B1 - 0.3 * (noise_BT - noise_BT.mean(1, keepdims=True))
    advantages_B = jnp.array([1.0, 0.7, -2.3, -0.9])
    whole_BT = jnp.ones((B, T))

    def right(x_BTD: Any, old_BT: Any, mask_BT: Any, epsilon: float, clip: bool = True, head: Any = head_VD) -> Any:
        logp_BT = _own_logprobs(x_BTD, head, drawn_BT)
        ratio_B = jnp.exp(jnp.sum(mask_BT * (logp_BT - old_BT), 1) / jnp.sum(mask_BT, 1))
        bounded_B = jnp.clip(ratio_B, 1 - epsilon, 1 + epsilon) if clip else ratio_B
        return -jnp.mean(jnp.minimum(ratio_B * advantages_B, bounded_B * advantages_B))

    def ask(x_BTD: Any, old_BT: Any, mask_BT: Any, epsilon: float, head: Any = head_VD) -> Any:
        return fn(x_BTD, head, drawn_BT, advantages_B, old_BT, mask_BT, epsilon)

    def body() -> str:
        found = ask(x_BTD, own_BT, whole_BT, 0.2)
        assert getattr(found, "shape", None) == (), f"a loss is one number; got {getattr(found, 'shape', found)}"
        _close(
            found,
            right(x_BTD, own_BT, whole_BT, 0.2),
            "where old and new policy are one all ratios are 1, and the loss is minus the mean of the advantages",
        )
        found, exact = ask(x_BTD, old_BT, whole_BT, 0.2), right(x_BTD, old_BT, whole_BT, 0.2)
        ratio_BT = jnp.exp(own_BT - old_BT)
        a_B1 = advantages_B[:, None]
        tokens = -jnp.mean(jnp.minimum(ratio_BT * a_B1, jnp.clip(ratio_BT, 0.8, 1.2) * a_B1))
        assert not np.allclose(found, tokens, rtol=1e-4), (
            "this is the loss of tokens, each with a ratio of its own. Here a sequence has one: what is averaged first?"
        )
        assert not np.allclose(found, right(x_BTD, old_BT, whole_BT, 0.2, clip=False), rtol=1e-4), (
            "nothing is clipped in your answer: two of these sequences went far enough in the wanted direction"
        )
        _close(
            found,
            exact,
            "the ratio of a sequence is wrong, or its clip: the exponential of a mean is not the mean of exponentials, "
            "nor the exponential of a sum",
        )
        _close(
            ask(x_BTD, old_BT, whole_BT, 0.1),
            right(x_BTD, old_BT, whole_BT, 0.1),
            "with epsilon 0.2 you are right, with 0.1 not: which number have you written down?",
        )
        mask_BT = (jnp.arange(T) < jnp.array([[16], [9], [4], [1]])).astype(jnp.float32)
        _close(
            ask(x_BTD, old_BT, mask_BT, 0.2),
            right(x_BTD, old_BT, mask_BT, 0.2),
            "right for whole sequences, not for shorter ones: which tokens count, and by how many is the sum divided?",
        )
        slope = jax.grad(lambda x_BTD: ask(x_BTD, old_BT, mask_BT, 0.2))(x_BTD)
        exact = jax.grad(lambda x_BTD: right(x_BTD, old_BT, mask_BT, 0.2))(x_BTD)
        _close(
            slope, exact, "the number is right, its gradient for the hidden states is not: what is stopped on the way?"
        )
        slope = jax.grad(lambda head: ask(x_BTD, old_BT, mask_BT, 0.2, head))(head_VD)
        exact = jax.grad(lambda head: right(x_BTD, old_BT, mask_BT, 0.2, head=head))(head_VD)
        _close(slope, exact, "the hidden states get their gradient, the head does not: what is stopped on its way?")

        def loss(x_BTD: Any) -> Any:
            return ask(x_BTD, old_BT, whole_BT, 0.2)

        largest = largest_array(jax.make_jaxpr(loss)(x_BTD).jaxpr)
        assert largest < B * T * V, (
            f"right, but an array of {largest} numbers appears on the way, and tokens times words are {B * T * V}: "
            "which function of the library gives log-probabilities without the logits?"
        )
        largest = largest_array(jax.make_jaxpr(jax.grad(loss))(x_BTD).jaxpr)
        assert largest < B * T * V, (
            f"right, but its gradient has an array of {largest} numbers, and tokens times words are {B * T * V}: each "
            "tile is small, and all of them are kept. What makes the backward pass compute a tile again?"
        )
        rows = saved_residuals(loss, x_BTD).rows
        kept = sum(row.bytes for row in rows if not row.argument)
        assert kept < 4 * B * T * V / 2, (
            f"right, but {kept:,} bytes wait for the backward pass, where all logits are {4 * B * T * V:,}: each tile "
            "is small, and all of them are kept. What makes the backward pass compute a tile again?"
        )
        return "One ratio a sequence, and no gradient was made before its last token was read."

    grade(3, body)


def _own_logprobs(x_BTD: Any, head_VD: Any, drawn_BT: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(x_BTD @ head_VD.T), drawn_BT[..., None], 2)[..., 0]


def _differentiated(equation: jex_core.JaxprEqn) -> bool:
    """Whether autodiff made the operation: JAX writes into its name how it was derived."""
    return differentiation_pass(str(equation.source_info.name_stack)) != ""


def _close(actual: Any, expected: Any, hint: str) -> None:
    shape = getattr(actual, "shape", None)
    assert shape == expected.shape, f"the shape must be {expected.shape}, not {shape}; {hint}"
    assert np.allclose(actual, expected, rtol=1e-3, atol=1e-4), hint
