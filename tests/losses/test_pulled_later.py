"""One traced program, differentiated for one argument, then for another, before the first gradient is pulled back.

JAX keeps one tree of residuals for a program. Where it depended on what is differentiated, gradients were zeros, or
there was a bare AssertionError, as late as when a cache of JAX's was full.
"""

import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import llamem
from llamem.layers.partial_sums import sum_parts

RNG = np.random.default_rng(0)


def numbers(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


IDS, EACH = jnp.asarray(RNG.integers(0, 53, 19)), numbers(19)
ROWS, HEAD = numbers(19, 8), numbers(53, 8)


def cross_entropy(axis, reduction: Literal["mean", "none"] = "mean"):
    def loss(x, w):
        losses = llamem.tiled_cross_entropy(x, w, IDS, axis=axis, num_tiles=3, reduction=reduction)
        return losses if reduction == "mean" else jnp.vdot(losses, EACH)

    return loss


PROGRAMS = {
    "cross-entropy over tokens": (cross_entropy("tokens"), ROWS, HEAD),
    "cross-entropy over the vocabulary": (cross_entropy("vocab"), ROWS, HEAD),
    "one for each token": (cross_entropy("vocab", "none"), ROWS, HEAD),
    "policy": (lambda x, w: llamem.tiled_policy_loss(x, w, IDS, EACH), ROWS, HEAD),
    "policy over the vocabulary": (
        lambda x, w: llamem.tiled_policy_loss(x, w, IDS, EACH, axis="vocab", num_tiles=3),
        ROWS,
        HEAD,
    ),
    "tiled_map": (lambda x, w: jnp.sum(llamem.tiled_map(lambda w, t: jnp.tanh(t @ w.T), w, x, 3) ** 2), ROWS, HEAD),
    "tiled_sum": (lambda x, w: llamem.tiled_sum(lambda w, t: jnp.sum(jnp.tanh(t @ w.T)), w, x, 3), ROWS, HEAD),
    "sum_parts": (
        lambda x, w: jnp.sum(sum_parts(lambda x, w, t: jnp.tanh(x @ w).astype(t), x, w, jnp.float32) ** 2),
        ROWS,
        numbers(3, 8, 5),
    ),
}


QUICK = "policy", "cross-entropy over the vocabulary"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.quick) if n in QUICK else n for n in PROGRAMS])
def test_gradients_are_those_of_the_arguments_that_were_asked_for(name):
    fn, *args = PROGRAMS[name]
    wanted = jax.grad(fn, (0, 1))(*args)
    for first, second in itertools.permutations([(0,), (1,), (0, 1)], 2):
        program = jax.jit(lambda *args: fn(*args))  # one of its own

        def pull_of(chosen, program=program):
            def of_chosen(*some):
                return program(*(dict(zip(chosen, some, strict=True)).get(i, arg) for i, arg in enumerate(args)))

            return jax.vjp(of_chosen, *(args[i] for i in chosen))[1]

        pulls = {chosen: pull_of(chosen) for chosen in (first, second)}
        for chosen in (second, first):
            for i, gradient in zip(chosen, pulls[chosen](jnp.float32(1)), strict=True):
                np.testing.assert_allclose(gradient, wanted[i], rtol=1e-4, atol=1e-5, err_msg=f"{first} {second} {i}")
