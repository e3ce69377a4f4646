"""Checks of the exercises of notebook 04."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.course.exercises import grade


def check_smoothed_gradient(fn: Callable[..., Any]) -> None:
    """Exercise 1: the gradient of label-smoothed cross-entropy for the logits."""
    z_NV = jax.random.normal(jax.random.key(0), (6, 5))
    targets_N = jnp.array([0, 4, 2, 2, 1, 3])

    def losses(z_NV: Any, epsilon: float) -> Any:
        logp_NV = jax.nn.log_softmax(z_NV)
        picked_N = jnp.take_along_axis(logp_NV, targets_N[:, None], 1)[:, 0]
        return -jnp.sum((1 - epsilon) * picked_N + epsilon * logp_NV.mean(1))

    def body() -> str:
        for epsilon, hint in (
            (0.0, "with epsilon 0 it must be softmax minus one-hot: one row per token, summing to 0"),
            (0.3, "epsilon / V is subtracted from every word, the target's included; the target gives up epsilon"),
        ):
            _close(fn(z_NV, targets_N, epsilon), jax.grad(losses)(z_NV, epsilon), hint)
        return "Every row still sums to 0: a mixture of targets weighs 1, and so does softmax."

    grade(1, body)


def check_merge(fn: Callable[..., Any]) -> None:
    """Exercise 2: the maximum and the sum of exponentials of two halves."""
    z_NV = 50 * jax.random.normal(jax.random.key(1), (7, 8))
    z_NV = z_NV.at[0, :4].set(-jnp.inf)  # a half in which every word is masked

    def part(z_NV: Any) -> tuple[Any, Any]:
        top_N = z_NV.max(1)
        return top_N, jnp.exp(z_NV - jnp.where(jnp.isinf(top_N), 0, top_N)[:, None]).sum(1)

    def body() -> str:
        result = fn(*part(z_NV[:, :4]), *part(z_NV[:, 4:]))
        assert isinstance(result, tuple) and len(result) == 2, (
            "return two arrays, the maximum and the sum, in this order"
        )
        _close(result[0], part(z_NV)[0], "the first result is the larger of the two maxima, token by token")
        hint = "each sum counts from its own maximum: multiply it by exp(own maximum - new maximum) before adding"
        _close(result[1], part(z_NV)[1], hint)
        return "It is what a vocabulary split over devices needs: two numbers per token travel, not the logits."

    grade(2, body)


def check_smallest_tile(fn: Callable[..., Any]) -> None:
    """Exercise 3: from how many tokens on a tile is bound by compute."""

    def body() -> str:
        for d_model, balance in ((4096, 560), (4096, 153), (2048, 241)):
            rows = fn(d_model, balance)
            assert rows is not None and np.ndim(rows) == 0, "return one number, the tokens in a tile"
            intensity = 6 * float(rows) * d_model / (12 * d_model + 14 * float(rows))
            hint = f"with D = {d_model} and R = {balance} a tile of {rows} does {intensity:.1f} FLOPs per byte, not R"
            assert math.isclose(intensity, balance, rel_tol=0.01), hint
        assert fn(1024, 560) == math.inf, (
            "however large T, 6TD / (12D + 14T) stays below 6D / 14: too little when D = 1024"
        )
        return "A narrow model never gets there: its tiles are bound by the logits they write."

    grade(3, body)


def _close(actual: Any, expected: Any, hint: str) -> None:
    assert getattr(actual, "shape", None) == expected.shape, f"the shape must be {expected.shape}; {hint}"
    assert np.allclose(actual, expected, rtol=1e-4, atol=1e-5), hint
