"""Checks of notebook 10's exercises: programs that must pass the battery, and compute what was asked."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from llamem.course.exercises import grade
from llamem.memory.residuals import saved_residuals
from llamem.verify.verification import verify_remat

_GATE, _UP, _DOWN, _X, _KEY = jax.random.split(jax.random.key(5), 5)
_W = {"up": jax.random.normal(_UP, (6, 16, 64)) / 4, "down": jax.random.normal(_DOWN, (6, 64, 16)) / 8}
_GATED = {**_W, "gate": jax.random.normal(_GATE, (6, 16, 64)) / 4}
_START = jax.random.normal(_X, (1024, 16))


def _layer(w: Any, x: Any) -> Any:
    return x + jnp.sin(jnp.tanh(checkpoint_name(x @ w["up"], "h"))) @ w["down"]


def _gated_layer(w: Any, x: Any) -> Any:
    """As wide a product as `h`, without a name."""
    h = checkpoint_name(x @ w["up"], "h")
    return x + (jnp.sin(jnp.tanh(h)) * jnp.sin(x @ w["gate"])) @ w["down"]


def _dropped(w: Any, x: Any, key: Any) -> Any:
    return _layer(w, x) * jax.random.bernoulli(key, 0.8, x.shape) / 0.8


def _gated_dropped(w: Any, x: Any, key: Any) -> Any:
    return _gated_layer(w, x) * jax.random.bernoulli(key, 0.8, x.shape) / 0.8


def _mean_square(layers: range) -> float:
    """What the loss should be, layer by layer in NumPy."""
    x = np.asarray(_START, np.float64)
    for i in layers:
        x = x + np.sin(np.tanh(x @ np.asarray(_W["up"][i], np.float64))) @ np.asarray(_W["down"][i], np.float64)
    return float(np.mean(x**2))


def _check_value(loss: Callable[[Any], Any]) -> None:
    """Raises AssertionError where `loss(remat)`, free of random numbers, is not that of all layers in order."""
    for remat in (False, True):
        if (found := loss(remat)) is None:
            raise AssertionError("Return the mean of the squares of what leaves the last layer.")
        if np.shape(found) != ():
            raise AssertionError(
                f"Return one number, not an array of shape {np.shape(found)}: the mean of the squares."
            )
        if np.isclose(found, expected := _mean_square(range(6)), rtol=1e-3):
            continue
        mistakes = {
            "the last layer is left out": range(5),
            "the first layer is left out": range(1, 6),
            "the layers run in reverse order": range(5, -1, -1),
            "no layer runs": range(0),
        }
        likely = [words for words, layers in mistakes.items() if np.isclose(found, _mean_square(layers), rtol=1e-3)]
        raise AssertionError(
            f"With remat={remat} the loss is {float(found):.4f}; layer by layer in NumPy it is {expected:.4f}. "
            + (
                f"It seems that {likely[0]}."
                if likely
                else "Run all layers, in order, then take the mean of the squares."
            )
        )


def _battery(loss: Callable[[Any, Any, Any], Any], batch: Any, w: Any = _W) -> None:
    verification = verify_remat(loss, w, batch, with_=True, without=False)
    if not verification.holds:
        proof = verification.failed[0]
        raise AssertionError(f"{proof.name}: {proof.seen}. {proof.cause}")


def check_cured_loss(fn: Callable[..., Any]) -> None:
    """Exercise 1: a checkpoint inside the scan."""

    def body() -> str:
        _check_value(lambda remat: fn(_layer, _W, _START, remat))
        _battery(lambda w, x, remat: fn(_layer, w, x, remat), _START)
        return "Around one layer, inside the loop."

    grade(1, body)


def check_cured_dropout(fn: Callable[..., Any]) -> None:
    """Exercise 2: one key per layer, made of the step's."""

    def body() -> str:
        _check_value(lambda remat: fn(lambda w, x, key: _layer(w, x), _W, _START, _KEY, remat))
        _battery(lambda w, b, remat: fn(_dropped, w, b["x"], b["key"], remat), {"x": _START, "key": _KEY})
        return "Keys travel with the weights."

    grade(2, body)


def check_cured_policy(fn: Callable[..., Any]) -> None:
    """Exercise 3: dropout as before; `h` is kept, and what else is kept is one x and one key per layer."""

    def body() -> str:
        _check_value(lambda remat: fn(lambda w, x, key: _layer(w, x), _W, _START, _KEY, remat))
        _battery(lambda w, b, remat: fn(_dropped, w, b["x"], b["key"], remat), {"x": _START, "key": _KEY})
        for layer, w in ((_dropped, _W), (_gated_dropped, _GATED)):
            kept = saved_residuals(lambda w, layer=layer: fn(layer, w, _START, _KEY, True), w)
            wide = [row.shape for row in kept.rows if not row.argument].count((6, 1024, 64))
            if not wide:
                raise AssertionError("h, 64 wide, is not among the residuals. Which policy keeps a name?")
            if wide > 1:
                raise AssertionError(
                    "In a layer with a second product as wide as h, that one is kept too. dots_saveable and its like "
                    "keep every product: save the name 'h' alone."
                )
        return "One product less in every backward layer, and every mask drawn again."

    grade(3, body)
