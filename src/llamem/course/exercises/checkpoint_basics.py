"""Checks of the exercises of notebook 01."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.course.exercises import grade
from llamem.memory.residuals import saved_residuals


def check_rematerialised_stack(fn: Callable[..., Any]) -> None:
    """Exercise 1: a stack that keeps one array per layer."""

    def layer(w_DD: Any, x_ND: Any) -> Any:
        return jnp.sin(jnp.tanh(x_ND @ w_DD)) + x_ND

    w_LDD = 0.3 * jax.random.normal(jax.random.key(0), (5, 12, 12))
    x_ND = jax.random.normal(jax.random.key(1), (7, 12))

    def plain(w_LDD: Any, x_ND: Any) -> Any:
        for w_DD in w_LDD:
            x_ND = layer(w_DD, x_ND)
        return x_ND

    def body() -> str:
        got, want = fn(layer, w_LDD, x_ND), plain(w_LDD, x_ND)
        assert got is not None and np.shape(got) == want.shape, f"Return the last layer's output, {want.shape}."
        assert np.allclose(got, want, atol=1e-5), "The output differs from that of the plain stack: apply every layer."
        kept = saved_residuals(lambda w, x: fn(layer, w, x).sum(), w_LDD, x_ND).bytes
        weights = w_LDD.nbytes
        assert kept <= weights + 5 * x_ND.nbytes, (
            f"The backward pass keeps {kept:,} bytes. Wrap each layer in jax.checkpoint, not the stack as a whole: "
            f"one input per layer is {5 * x_ND.nbytes:,} bytes."
        )
        grads = jax.grad(lambda w: fn(layer, w, x_ND).sum())(w_LDD)
        assert np.allclose(grads, jax.grad(lambda w: plain(w, x_ND).sum())(w_LDD), atol=1e-4), "Wrong gradients."
        return "One array per layer, whatever the layer computes inside."

    grade(1, body)


def check_step_flops(fn: Callable[..., Any]) -> None:
    """Exercise 2: the price of rematerialisation in products."""

    def body() -> str:
        for forward, remat, want in ((10, False, 30), (10, True, 40), (7, True, 28)):
            got = fn(forward, remat)
            assert got == want, (
                f"With {forward} FLOPs forward and remat={remat} it is not {got}. Each product of the forward pass has "
                "two in the backward pass, one per factor; a rematerialised layer runs forward once more."
            )
        return "A third more arithmetic at most; what it takes in time depends on what the chip waits for."

    grade(2, body)
