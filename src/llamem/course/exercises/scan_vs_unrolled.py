"""Checks of notebook 03's exercises: a line, a stack, groups, and keys for each layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.course.exercises import grade
from llamem.memory.jaxprs import equations
from llamem.memory.residuals import saved_residuals

_DEPTH, _TOKENS, _WIDTH = 6, 5, 3


def check_peak_at(fn: Callable[[int, dict[int, int]], float]) -> None:
    """Exercise 1: a line through two compiled peaks."""

    def body() -> str:
        for known in ({8: 100, 16: 180}, {16: 180, 8: 100}, {2: 50, 12: 70}):
            (first, low), (second, high) = sorted(known.items())
            slope, found = (high - low) / (second - first), fn(32, known)
            assert found is not None and np.ndim(found) == 0, "return one number, the bytes at that depth"
            if any(abs(found - 32 / depth * peak) < 1e-9 for depth, peak in known.items()):
                raise AssertionError("That is in proportion to depth. What does the line hold at depth 0?")
            if abs(found - (low + slope * 32)) < 1e-9 or abs(found - (high + slope * 32)) < 1e-9:
                raise AssertionError("You add 32 layers to a program that has some already. How many are missing?")
            assert abs(found - (low + slope * (32 - first))) < 1e-9, (
                f"{known}: first find what one layer adds, then go on from either of the two; {found} is not on the "
                "line through both"
            )
        return "Two small compilations stand for any depth."

    grade(1, body)


def check_remat_stack(fn: Callable[..., Any]) -> None:
    """Exercise 2: a scan with a checkpoint, run and looked into."""
    w, x_ND = _weights(_DEPTH), jax.random.normal(jax.random.key(2), (_TOKENS, _WIDTH))

    def body() -> str:
        out = fn(_layer, w, x_ND)
        assert getattr(out, "shape", None) == x_ND.shape, (
            "return x as the last layer leaves it, one array of x's shape; a scan returns a pair, (carry, outputs)"
        )
        assert np.allclose(out, _loop(_layer, w, x_ND), atol=1e-5), (
            "the result is not that of a Python loop over the layers: is each layer used once, and from first to last?"
        )
        assert _written(fn, _weights(4 * _DEPTH), x_ND) == _written(fn, w, x_ND), (
            "the program grows with depth: each layer is written into it. Which function of jax.lax writes one?"
        )
        kept = [row for row in saved_residuals(lambda w: jnp.sum(fn(_layer, w, x_ND)), w).rows if not row.argument]
        inputs = _DEPTH * x_ND.nbytes
        if sum(row.bytes for row in kept) > 1.5 * inputs:
            raise AssertionError(
                "more than the layers' inputs is kept for the backward pass: no checkpoint of the layer is at work"
            )
        if sum(row.bytes for row in kept) < inputs:
            raise AssertionError(
                "nothing is kept for each layer. So the backward pass starts by running the whole stack again; what is "
                "alive when that is done? Look at 'Inside or outside?'."
            )
        gradients = [jax.grad(lambda w, s=s: jnp.sum(s(_layer, w, x_ND) ** 2))(w) for s in (fn, _loop)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *gradients)
        return "One loop, one body, and of each layer its input alone."

    grade(2, body)


def check_best_groups(fn: Callable[[int, int, int], int]) -> None:
    """Exercise 3: groups of a nested scan, by the formula."""

    def held(n_layers: int, groups: int, x: int, w: int) -> int:
        return (groups + n_layers // groups) * x + 2 * (n_layers // groups) * w

    def body() -> str:
        for n_layers, x, w in ((64, 128, 116), (64, 8, 116), (36, 100, 1), (12, 7, 9), (80, 1000, 60), (7, 5, 5)):
            found = fn(n_layers, x, w)
            if not isinstance(found, int | np.integer) or found < 1 or n_layers % found:
                raise AssertionError(f"{found} does not divide {n_layers}: all groups need the same number of layers.")
            divisors = [g for g in range(1, n_layers + 1) if n_layers % g == 0]
            costs = {g: held(n_layers, g, x, w) for g in divisors}
            if costs[found] == min(costs.values()):
                continue
            case = f"{n_layers} layers, x of {x} and weights of {w} bytes"
            least = min(costs, key=lambda g: costs[g])
            if costs[n_layers // found] == costs[least]:
                raise AssertionError(f"{case}: {found} is the number of layers in a group. How many groups is that?")
            if found + n_layers // found == min(g + n_layers // g for g in divisors):
                raise AssertionError(f"{case}: {found} keeps fewest inputs. What else does a group at work hold twice?")
            raise AssertionError(f"{case}: by the formula {found} groups hold {costs[found]}; less is possible.")
        return "Not the square root: heavy weights want more groups, each of fewer layers."

    grade(3, body)


def check_dropout_stack(fn: Callable[..., Any]) -> None:
    """Exercise 4: a scanned, rematerialised stack in which every layer draws its own random numbers."""
    w, x_ND = _weights(_DEPTH), jnp.ones((40, _WIDTH))

    def mask(w: Any, x_ND: Any, key: Any) -> Any:
        return x_ND + jax.random.bernoulli(key, 0.5, x_ND.shape)

    def noisy(w: Any, x_ND: Any, key: Any) -> Any:
        return _layer(w, x_ND) * jax.random.bernoulli(key, 0.5, x_ND.shape)

    def body() -> str:
        out = fn(mask, w, x_ND, jax.random.key(3))
        assert getattr(out, "shape", None) == x_ND.shape, "return x as the last layer leaves it"
        drawn = set(np.unique(np.asarray(out) - 1).astype(int).tolist())
        assert not drawn <= {0, _DEPTH}, (
            f"{_DEPTH} layers drew the same mask: each number was dropped by all of them or by none. How does a scan "
            "hand something different to each turn of the loop?"
        )
        assert max(drawn) <= _DEPTH, "some layers ran more than once in a forward pass"
        other = fn(mask, w, x_ND, jax.random.key(4))
        assert not np.array_equal(out, other), "another key gives the same masks: your answer does not use its key"
        again = fn(mask, w, x_ND, jax.random.key(3))
        assert np.array_equal(out, again), "the same key must give the same masks, or nothing can be repeated"
        rows = saved_residuals(lambda w: jnp.sum(fn(noisy, w, x_ND, jax.random.key(3))), w).rows
        kept = sum(row.bytes for row in rows if not row.argument)
        assert kept <= 1.5 * _DEPTH * x_ND.nbytes, (
            "more than the layers' inputs is kept, masks among it: they can be drawn again from their keys"
        )
        assert kept >= _DEPTH * x_ND.nbytes, "the checkpoint stands around the loop, not around the layer"
        return "Keys are inputs of the scan; the recomputation draws the same masks from them."

    grade(4, body)


def _layer(w: Any, x_ND: Any) -> Any:
    return x_ND + jnp.sin(jnp.tanh(x_ND @ w["up"])) @ w["down"]


def _weights(depth: int) -> dict[str, Any]:
    up, down = (jax.random.normal(jax.random.key(i), (depth, _WIDTH, _WIDTH)) for i in (0, 1))
    return {"up": up, "down": down / 2}


def _loop(layer: Callable[..., Any], w: Any, x_ND: Any) -> Any:
    for i in range(len(w["up"])):
        x_ND = layer(jax.tree.map(lambda leaf, i=i: leaf[i], w), x_ND)
    return x_ND


def _written(fn: Callable[..., Any], w: Any, x_ND: Any) -> int:
    """How many operations the program of a stack has, those of a loop's body once."""
    return sum(1 for _ in equations(jax.make_jaxpr(lambda w: fn(_layer, w, x_ND))(w).jaxpr))
