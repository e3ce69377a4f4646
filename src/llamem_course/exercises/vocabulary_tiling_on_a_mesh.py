"""Checks of the exercises of notebook 05. The devices of a mesh are the rows of a `jax.vmap` with an axis name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.tracing.jaxprs import equations
from llamem_course.exercises import grade

DEVICES, AXIS = 8, "words"  # as many as the notebook has, along an axis of another name


def _share(operation: str, n: int) -> float:
    """Bytes that arrive at each of `n` devices of a ring, for each byte of the result."""
    return {"all-gather": (n - 1) / n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n}[operation]


# Bytes that arrive at a device of a ring, for each byte of a collective's result, by JAX's names.
ARRIVES = dict.fromkeys(("psum", "pmax", "pmin"), _share("all-reduce", DEVICES))
ARRIVES |= dict.fromkeys(("all_gather", "all_to_all"), _share("all-gather", DEVICES))
ARRIVES |= {"reduce_scatter": _share("reduce-scatter", DEVICES), "ppermute": 1.0}


def check_mean_over_devices(fn: Callable[..., Any]) -> None:
    """Exercise 1: the mean loss over all devices' tokens, where some tokens do not count."""
    losses_En = jnp.arange(1.0, 8 * 6 + 1).reshape(8, 6) ** 1.5
    counts_En = (jnp.arange(48).reshape(8, 6) % 7 < 4) & (jnp.arange(8)[:, None] != 5)  # device 5 has padding alone
    counts_En = counts_En.at[2].set(jnp.arange(6) == 1)

    def body() -> str:
        found_E = _on_devices(fn, losses_En, counts_En)
        assert getattr(found_E, "shape", None) == (DEVICES,), (
            f"return one number, the mean; yours has the shape {getattr(found_E, 'shape', None)} on {DEVICES} devices"
        )
        right = losses_En[counts_En].mean()
        own_E = jnp.sum(losses_En * counts_En, 1) / jnp.sum(counts_En, 1)
        told = (
            (own_E.mean(), "a device without a token that counts has 0 / 0, and it is in your mean"),
            (jnp.nan_to_num(own_E).mean(), "that is the mean of the devices' means: each weighs as much as another"),
            (jnp.nanmean(own_E), "that is the mean of the devices' means: each weighs as much as another"),
            (losses_En.mean(), "that is the mean over all tokens: which of them count?"),
            (jnp.mean(losses_En * counts_En), "you divide by all tokens; how many count?"),
            (jnp.sum(losses_En * counts_En), "that is the sum: divided by what?"),
            (jnp.sum(losses_En * counts_En) / DEVICES, "you divide by the devices; how many tokens count?"),
        )
        if not np.allclose(found_E, right, rtol=1e-5):
            assert np.allclose(found_E, found_E[0], rtol=1e-5, equal_nan=True), (
                f"the devices end with different numbers, {', '.join(f'{one:.2f}' for one in found_E[:3])} ...: the "
                "sum or the count is still a device's own"
            )
            hints = (hint for wrong, hint in told if np.allclose(found_E[0], wrong, rtol=1e-5, equal_nan=True))
            hint = next(hints, "which two numbers has each device to give, and when are they divided?")
            raise AssertionError(f"yours is {found_E[0]:.3f} where {right:.3f} is right; {hint}")
        with jax.disable_jit():  # compiled, NaN * False is 0: XLA makes a choice of such a product
            padded_E = _on_devices(fn, jnp.where(counts_En, losses_En, jnp.nan), counts_En)
        assert np.allclose(padded_E, right, rtol=1e-5), (
            f"right while every loss is a number, but it is {padded_E[0]:.3f} where the losses of tokens that do not "
            "count are NaN. What is NaN times 0, unless a compiler drops the product? Leave such a loss out"
        )
        hidden_E = _on_devices(fn, losses_En.at[2, 1].set(jnp.nan), counts_En)
        assert np.isnan(hidden_E).all(), (
            f"a token that counts has a loss of NaN, and your mean is {hidden_E[0]:.3f}: a run that fails goes on "
            f"unseen. Which losses may be left out, those that are NaN or those that do not count?"
        )
        few, counts_few = losses_En[:2, :3], jnp.array([[True, False, True], [False, True, False]])
        assert np.allclose(_on_devices(fn, few, counts_few), few[counts_few].mean(), rtol=1e-5), (
            "right on 8 devices with 6 tokens each, wrong on 2 with 3: is a number written into your answer?"
        )
        arriving = _arriving(_traced(fn, jnp.zeros(1000), jnp.ones(1000, bool)))
        assert arriving < 100, (
            f"right, but with 1,000 tokens on each device {arriving:,.0f} bytes arrive at each. Two numbers say all "
            "that others have to know of a device's tokens"
        )
        return "Sum and count travel, and are divided once, at the end."

    grade(1, body)


def check_merge_devices(fn: Callable[..., Any]) -> None:
    """Exercise 3: logsumexp and the softmax's mean of the head's rows, from what each device found in its own rows."""
    N, D = 16, 8  # multiples of the devices: who divides tokens or columns among them may do so
    z_ENU = 60 * jax.random.normal(jax.random.key(0), (DEVICES, N, 5))
    z_ENU = z_ENU.at[:, 1].divide(60.0)  # a token for which no word has all the weight
    # For others one device's maximum is far above or below the others', far below 0, or of masked words only.
    z_ENU = z_ENU.at[:, 2:4].add(-1000.0).at[2, 4].add(1000.0).at[0, 5].add(1000.0).at[1, 2].set(-jnp.inf)
    head_EUD = jax.random.normal(jax.random.key(1), (DEVICES, 5, D))

    def sweep(z_NU: Any, head_UD: Any) -> tuple[Any, Any, Any]:
        top_N = z_NU.max(1)
        exp_NU = jnp.exp(z_NU - jnp.where(jnp.isinf(top_N), 0, top_N)[:, None])
        return top_N, exp_NU.sum(1), exp_NU @ head_UD

    def body() -> str:
        found = jax.vmap(sweep)(z_ENU, head_EUD)
        z_NV, head_VD = jnp.concatenate(z_ENU, 1), jnp.concatenate(head_EUD)
        lse_N, mean_ND = jax.nn.logsumexp(z_NV, 1), jax.nn.softmax(z_NV) @ head_VD
        result = _on_devices(fn, *found)
        assert isinstance(result, tuple | list) and len(result) == 2, (
            "return two arrays, logsumexp and the mean, in this order"
        )
        lse_EN, mean_END = result
        assert jnp.shape(lse_EN) == (DEVICES, N), f"logsumexp is one number per token, not {jnp.shape(lse_EN)[1:]}"
        assert jnp.shape(mean_END) == (DEVICES, N, D), f"the mean is [N, D], not {jnp.shape(mean_END)[1:]}"
        others = np.arange(N) != 2
        right = np.allclose(mean_END[:, others], mean_ND[others], rtol=1e-4, atol=1e-5)
        assert not (right and np.isnan(mean_END[:, 2]).any()), (
            "right but where all words of one device are masked: its maximum is -inf there, and its sum 0. A number in "
            "place of -inf may lie far above all other maxima, and what is never divided by its own sum cannot be 0 / 0"
        )
        same = np.allclose(lse_EN, lse_EN[0], rtol=1e-5, equal_nan=True)
        assert same, "the devices end with different answers: somewhere each of them goes on with its own numbers"
        hint = (
            "each device counted its exponentials from a maximum of its own; from which one does the sum of all count?"
        )
        assert np.allclose(lse_EN[0], lse_N, rtol=1e-5), hint
        _, own_sum_EN, own_mix_END = found
        of_means_ND = (own_mix_END / own_sum_EN[..., None]).mean(0)
        assert not np.allclose(mean_END[0], of_means_ND, rtol=1e-4, atol=1e-5, equal_nan=True), (
            "logsumexp is right, and the mean is that of the devices' means: each weighs as much as another, however "
            "little of the softmax lies in its own rows. Which two sums make the mean of all rows?"
        )
        hint = "logsumexp is right, the mean is not: numerator and denominator of this quotient count from one maximum"
        assert np.allclose(mean_END[0], mean_ND, rtol=1e-4, atol=1e-5), hint
        arriving, enough = _arriving(_traced(fn, *(a[0] for a in found))), ARRIVES["psum"] * 4 * (2 * N + N * D)
        assert arriving <= enough, (
            f"right, but in a ring {arriving:.0f} bytes arrive at each device where {enough:.0f} are enough. To be "
            "added up or compared, numbers need not be collected first, nor sent twice"
        )
        two = _on_devices(fn, *(a[:2] for a in found))
        z_NV, head_VD = jnp.concatenate(z_ENU[:2], 1), jnp.concatenate(head_EUD[:2])
        exact = jax.nn.logsumexp(z_NV, 1), jax.nn.softmax(z_NV) @ head_VD
        assert all(np.allclose(a[0], b, rtol=1e-4, atol=1e-5) for a, b in zip(two, exact, strict=True)), (
            f"right on {DEVICES} devices, wrong on 2: is a number of devices written into your answer?"
        )
        return "Two numbers and one row per token travel, whatever the size of the vocabulary."

    grade(3, body)


def check_target_logit(fn: Callable[..., Any]) -> None:
    """Exercise 2: the logit of each token's target, of which one device alone has the row."""
    targets_N = jnp.array([0, 39, 7, 12, 5, 4, 16, 9, 10, 25, 31, 2, 22, 38, 19, 28])

    def body() -> str:
        for rows, ids_N in ((5, targets_N), (8, jnp.array([63, 7, 8, 0, 17, 23, 40, 55]))):
            x_ND = jax.random.normal(jax.random.key(rows), (len(ids_N), rows - 2))
            head_EUD = jax.random.normal(jax.random.key(4), (DEVICES, rows, rows - 2))
            _right_logits(fn, x_ND, head_EUD, ids_N)
        x_ND, head_UD = jnp.ones((len(targets_N), 3)), jnp.ones((5, 3))
        traced = partial(_traced, lambda head_UD, axis: fn(x_ND, head_UD, targets_N, axis))
        arriving, enough = _arriving(traced(head_UD)), ARRIVES["psum"] * len(targets_N) * 4
        assert arriving <= enough, (
            f"right, but in a ring {arriving:.0f} bytes arrive at each device, and one number per token, {enough:.0f} "
            "bytes, is enough"
        )
        while_loops = any(eqn.primitive.name == "while" for eqn, _ in equations(traced(head_UD).jaxpr))
        assert not while_loops, (
            "right, but in a loop of which nobody can say how often it runs: it may go through all words of a device. "
            "How many rows of the head does a token want?"
        )
        few, many = (_numbers_made(traced(jnp.zeros((rows, 3)))) for rows in (5, 50))
        assert many == few, (
            f"right, but with 50 words on a device it makes {many:,} numbers, and with 5 words {few:,}: one for every "
            "token and every word of its own, as its logits are. How many rows of the head does a token want?"
        )
        return "One message of [N]. The row of a target never leaves its device."

    grade(2, body)


def _right_logits(fn: Callable[..., Any], x_ND: Any, head_EUD: Any, targets_N: Any) -> None:
    """Raise AssertionError with a hint where the answer is wrong, for a head divided over the devices."""
    rows, head_VD = head_EUD.shape[1], jnp.concatenate(head_EUD)
    exact_N = jnp.sum(x_ND * head_VD[targets_N], 1)
    (alone_N,) = jnp.asarray(_on_devices(lambda head_VD, axis: fn(x_ND, head_VD, targets_N, axis), head_VD[None]))
    assert alone_N.shape == exact_N.shape, f"one number per token, not {alone_N.shape}"
    assert np.allclose(alone_N, exact_N, atol=1e-5), (
        "it is wrong already where one device holds all words: which row of the head belongs to an id, and what is "
        "the logit of a token for it?"
    )
    found_EN = jnp.asarray(_on_devices(lambda head_UD, axis: fn(x_ND, head_UD, targets_N, axis), head_EUD))
    held_EN = targets_N // rows == jnp.arange(DEVICES)[:, None]
    only_own = jnp.where(held_EN, exact_N, 0)
    assert not np.allclose(found_EN, only_own, atol=1e-5), (
        "each device has the logits whose row it holds, and 0 for the others. They have not told each other yet"
    )
    assert np.allclose(found_EN, found_EN[0], atol=1e-5, equal_nan=True), "the devices end with different answers"
    assert not np.allclose(found_EN[0], np.maximum(exact_N, 0), atol=1e-5), (
        "negative logits come out as 0: devices that do not hold the row bring 0, and 0 is larger. Which of the "
        "collectives leaves a number as it is when zeros join it?"
    )
    first_N = held_EN[0]
    assert np.allclose(found_EN[0][first_N], exact_N[first_N], atol=1e-5), (
        "for targets in the rows of the first device your answer is wrong: what do the devices add that do not "
        "hold the row? An id that a device does not hold still reads some row"
    )
    assert np.allclose(found_EN[0], exact_N, atol=1e-5), (
        "targets of the first device's rows are right, others are not. In which row of its own does a device find "
        "an id of the whole vocabulary, and how does it know that it has no such row?"
    )


def _on_devices(fn: Callable[..., Any], *parts: Any) -> Any:
    """`fn(*parts, axis)` on every device, each with its row of the parts; results `[devices, ..]`."""
    try:
        return jax.vmap(lambda *own: fn(*own, AXIS), axis_name=AXIS)(*parts)
    except NameError as error:  # JAX's for an axis that nobody has named, or Python's
        raise AssertionError(
            f"{str(error).split('.')[0]}. If that is an axis: devices stand along another one here, and its name is "
            "the last argument of your function"
        ) from None


def _traced(fn: Callable[..., Any], *own: Any) -> Any:
    """One device's program."""
    return jax.make_jaxpr(lambda *args: fn(*args, AXIS), axis_env=[(AXIS, DEVICES)])(*own)


def _arriving(program: Any) -> float:
    """Bytes that arrive at a device in all collectives of its program, loops multiplied out."""
    total = 0.0
    for eqn, times in equations(program.jaxpr):
        avals: list[Any] = [var.aval for var in eqn.outvars]
        factor = ARRIVES.get(eqn.primitive.name.removesuffix("_invariant"), 0)
        total += times * factor * sum(aval.size * aval.dtype.itemsize for aval in avals)
    return total


def _numbers_made(program: Any) -> int:
    """How many numbers one device's program computes, loops multiplied out."""
    return sum(
        times * sum(getattr(var.aval, "size", 0) for var in eqn.outvars) for eqn, times in equations(program.jaxpr)
    )
