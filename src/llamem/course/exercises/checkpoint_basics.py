"""Checks of the exercises of notebook 01."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.course.exercises import grade
from llamem.memory.compiling import matmul_flops
from llamem.memory.residuals import saved_residuals

# Many rows, so that copies of the weights weigh little beside one layer's input.
ROWS, WIDTH = 70, 12


def layer(w_DD: Any, x_ND: Any) -> Any:
    """The layer that both stacks apply: one product and two elementwise functions."""
    return jnp.sin(jnp.tanh(x_ND @ w_DD)) + x_ND


def check_rematerialised_stack(fn: Callable[..., Any]) -> None:
    """Exercise 1: a stack that keeps one array per layer."""
    depth = 8

    def body() -> str:
        inputs, products = _measure(lambda w, x: fn(layer, w, x), depth)
        # The first input is an argument; a last layer without a checkpoint keeps a few arrays more.
        assert inputs < depth + 3, (
            f"The backward pass keeps {inputs:.1f} arrays of the size of x for {depth} layers. What is the least that "
            "a layer must have to run again?"
        )
        assert inputs > depth - 1.5, (
            f"The backward pass keeps {inputs:.1f} arrays of the size of x for {depth} layers, less than one for each. "
            "Then a checkpoint holds several layers: when it runs them again it keeps everything of all of them at "
            "once. Where does the notebook put its boundary?"
        )
        assert products <= 4 * depth, (
            f"{products:.0f} products for {depth} layers: somewhere a layer runs forward more than twice."
        )
        _check_values(lambda w, x: fn(layer, w, x), depth)
        return "One array per layer, whatever the layer computes inside."

    grade(1, body)


def check_step_flops(fn: Callable[..., Any]) -> None:
    """Exercise 2: the price of rematerialisation in products."""

    def body() -> str:
        for forward, remat, want in ((10, False, 30), (10, True, 40), (7, True, 28), (7, False, 21)):
            got = fn(forward, remat)
            assert got == want, (
                f"With {forward} FLOPs forward and remat={remat} it is not {got}. Take one product, y = x @ w: which "
                "products does its backward pass need? And what does a checkpoint run again, if nothing can be dropped?"
            )
        return "A third more arithmetic at most; what it takes in time depends on what the chip waits for."

    grade(2, body)


def check_grouped_stack(fn: Callable[..., Any]) -> None:
    """Exercise 3: a stack that keeps one array per group, and later one per layer of one group."""
    depth = 12

    def body() -> str:
        for size in (3, 2):
            groups = depth // size
            inputs, products = _measure(lambda w, x, size=size: fn(layer, w, x, size), depth)
            assert groups - 1.5 < inputs < groups + 0.5, (
                f"{depth} layers in groups of {size}: the backward pass keeps {inputs:.1f} arrays of the size of x. "
                "How many groups are there, and what does each of them need to run again?"
            )
            # The group runs again, then each of its layers: 2 backward and up to 3 forward. More than 4 tells it from
            # groups that keep everything when they run again.
            assert products > 4 * depth, (
                f"{products:.0f} products for {depth} layers in groups of {size}: a group that runs again keeps "
                "everything of all its layers. What would make it keep their inputs only?"
            )
            assert products <= 5 * depth, (
                f"{products:.0f} products for {depth} layers in groups of {size}: a layer runs forward more than three "
                "times."
            )
            _check_values(lambda w, x, size=size: fn(layer, w, x, size), depth)
        return "An input per group while the model runs, and for a while those of one group."

    grade(3, body)


def _stack_inputs(depth: int) -> tuple[jax.Array, jax.Array]:
    w_LDD = 0.3 * jax.random.normal(jax.random.key(0), (depth, WIDTH, WIDTH))
    return w_LDD, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def _gradients(stack: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda w, x: (stack(w, x) ** 2).sum(), argnums=(0, 1))


def _measure(stack: Callable[..., Any], depth: int) -> tuple[float, float]:
    """What a stack keeps, in arrays of the size of x, and its products; traced, not computed."""
    w_LDD, x_ND = _stack_inputs(depth)
    got = jax.eval_shape(stack, w_LDD, x_ND)
    assert getattr(got, "shape", None) == x_ND.shape, f"Return the last layer's output, {x_ND.shape}."
    # Slices of the weights are copies, which a loop over layers keeps and a scan does not: not counted here.
    rows = saved_residuals(lambda w, x: stack(w, x).sum(), w_LDD, x_ND).rows
    kept = sum(row.bytes for row in rows if not row.argument and row.shape[-2:] != (WIDTH, WIDTH))
    flops = matmul_flops(jax.make_jaxpr(_gradients(stack))(w_LDD, x_ND).jaxpr)
    return kept / x_ND.nbytes, flops / (2 * ROWS * WIDTH * WIDTH)


def _check_values(stack: Callable[..., Any], depth: int) -> None:
    """Asserts that a stack applies every layer, and that its gradients are right."""
    w_LDD, x_ND = _stack_inputs(depth)

    def plain(w_LDD: Any, x_ND: Any) -> Any:
        return jax.lax.scan(lambda x_ND, w_DD: (layer(w_DD, x_ND), None), x_ND, w_LDD)[0]

    (mine, my_grads), (right, right_grads) = (jax.jit(_gradients(f))(w_LDD, x_ND) for f in (stack, plain))
    assert np.allclose(mine, right, rtol=1e-3), (
        "The output differs from that of the plain stack: is every layer applied?"
    )
    assert all(np.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(my_grads, right_grads, strict=True)), (
        "The output is right and its gradients are not. Does every value still depend on the weights?"
    )
