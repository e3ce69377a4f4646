"""Checks of notebook 10's exercises: programs that must pass the battery."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from llamem.course.exercises import grade
from llamem.memory.residuals import saved_residuals
from llamem.verify.verification import verify_remat

_UP, _DOWN, _X, _KEY = jax.random.split(jax.random.key(5), 4)
_W = {"up": jax.random.normal(_UP, (6, 16, 64)) / 4, "down": jax.random.normal(_DOWN, (6, 64, 16)) / 8}
_START = jax.random.normal(_X, (1024, 16))


def _layer(w: Any, x: Any) -> Any:
    return x + jnp.sin(jnp.tanh(checkpoint_name(x @ w["up"], "h"))) @ w["down"]


def _dropped(w: Any, x: Any, key: Any) -> Any:
    return _layer(w, x) * jax.random.bernoulli(key, 0.8, x.shape) / 0.8


def _battery(loss: Callable[[Any, Any, Any], Any], batch: Any) -> None:
    if loss(_W, batch, False) is None:
        raise AssertionError("Return the mean of the squares of what leaves the last layer.")
    verification = verify_remat(loss, _W, batch, with_=True, without=False)
    if not verification.holds:
        proof = verification.failed[0]
        raise AssertionError(f"{proof.name}: {proof.seen}. {proof.cause}")


def check_cured_loss(fn: Callable[..., Any]) -> None:
    """Exercise 1: a checkpoint inside the scan."""

    def body() -> str:
        _battery(lambda w, x, remat: fn(_layer, w, x, remat), _START)
        return "Around one layer, inside the loop."

    grade(1, body)


def check_cured_dropout(fn: Callable[..., Any]) -> None:
    """Exercise 2: one key per layer."""

    def body() -> str:
        _battery(lambda w, b, remat: fn(_dropped, w, b["x"], b["key"], remat), {"x": _START, "key": _KEY})
        return "Keys travel with the weights."

    grade(2, body)


def check_cured_policy(fn: Callable[..., Any]) -> None:
    """Exercise 3: `h` is kept, and what else is kept is one x per layer."""

    def body() -> str:
        _battery(lambda w, x, remat: fn(_layer, w, x, remat), _START)
        kept = saved_residuals(lambda w: fn(_layer, w, _START, True), _W)
        shapes = [row.shape for row in kept.rows if not row.argument]
        if (6, 1024, 64) not in shapes:
            raise AssertionError("h, 64 wide, is not among the residuals. Which policy keeps a name?")
        if shapes.count((6, 1024, 64)) > 1:
            raise AssertionError("More than h is kept at its width: save that name alone.")
        return "One product less in every backward layer."

    grade(3, body)
