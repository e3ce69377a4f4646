"""Checks of the exercises of notebook 01."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.compiling import matmul_flops
from jaxmem.tracing.residuals import saved_residuals
from jaxmem.verify.checkpoints import operations
from llamem_course.exercises import grade
from llamem_course.grid_figure import play

# Many rows, so that copies of the weights weigh little beside one layer's input.
ROWS, WIDTH = 70, 12


def sine_layer(w_DD: Any, x_ND: Any) -> Any:
    """Return the layer that stacks apply: one product and two elementwise functions."""
    return jnp.sin(jnp.tanh(x_ND @ w_DD)) + x_ND


def cosine_layer(w_DD: Any, x_ND: Any) -> Any:
    """Return a layer of another function, for answers that know only the first."""
    return jnp.cos(jnp.tanh(x_ND @ w_DD)) - x_ND


def check_rematerialised_stack(fn: Callable[..., Any]) -> None:
    """Exercise 1: a stack that keeps one array per layer."""

    def body() -> str:
        praise = "One array per layer, whatever the layer computes inside."
        for depth, layer in ((8, sine_layer), (11, cosine_layer)):
            _check_values(lambda w, x, layer=layer: fn(layer, w, x), depth, layer)
            inputs, products = _measure(lambda w, x, layer=layer: fn(layer, w, x), depth)
            program = jax.make_jaxpr(lambda w, x, layer=layer: fn(layer, w, x))(*_stack_inputs(depth)).jaxpr
            assert not any(eqn.params.get("prevent_cse") is False for eqn in program.eqns), (
                "A checkpoint that stands in no loop of JAX's has prevent_cse=False. What does a compiler do with a "
                "second pass that is a copy of the first, where no barrier stands between them?"
            )
            # The first input may be an argument, so that one array less is kept than there are layers.
            told = f"The backward pass keeps {inputs:.1f} arrays of the size of x for {depth} layers"
            around = _checkpoints_around_products(lambda w, x, layer=layer: fn(layer, w, x), depth)
            if products == 4 * depth - 1 and all(around[:-1]) and not around[-1]:  # it runs backward at once
                praise = (
                    "One array per layer, and of the last one, which has no checkpoint, all that it computes. That "
                    "costs little: it runs backward at once."
                )
                assert inputs < depth + 3, f"{told}: more than the last layer keeps more than its input."
                continue
            assert inputs < depth + 0.5, f"{told}. What is the least that a layer must have to run again?"
            assert inputs > depth - 1.5, (
                f"{told}, less than one for each. Then a checkpoint holds several layers, and what they need when it "
                "runs them again comes on top of this. Where must boundaries be to leave one array for each layer?"
            )
            assert products >= 4 * depth, (
                f"{told}, and does {products:.0f} products. A layer that runs twice does four: one forward, the same "
                "again, and two for its gradients. Which of yours runs once, and what does it keep instead?"
            )
            assert products <= 4 * depth, (
                f"{products:.0f} products for {depth} layers: somewhere a layer runs forward more than twice."
            )
        return praise

    grade(1, body)


def check_best_group(fn: Callable[..., Any]) -> None:
    """Exercise 2: the size of nested groups with the lowest peak, refereed by playing every size."""

    def body() -> str:
        cases = itertools.product((16, 12, 20, 30, 28, 36, 64, 90, 7, 1), (1, 2, 3))
        for n_layers, kept in (*cases, (44, 5)):  # the last: the divisor nearest to the root is not the best
            sizes = [size for size in range(1, n_layers + 1) if n_layers % size == 0]
            peaks = {size: play("nested", n_layers, size).live(kept=kept, everything=11).max() for size in sizes}
            got = fn(n_layers, kept)
            assert got in sizes, (
                f"{n_layers} layers in groups of {got!r}: the groups must be equal. Which sizes divide {n_layers}?"
            )
            question = ""
            if peaks[n_layers // got] == min(peaks.values()):
                question = f"Is {got} the size of a group, or how many groups there are? "
            elif got == min(sizes, key=lambda size: n_layers // size + size):
                question = f"{got} would be best if each of these layers kept 1. "
            assert peaks[got] == min(peaks.values()), (
                f"{n_layers} layers in groups of {got}, each layer of a group at work keeping {kept}: the peak is "
                f"{peaks[got]:.0f} inputs, and another size has a lower one. {question}Count what waits while the "
                "group that is first in the backward pass runs: what is there once per group, and what for each layer "
                "of that group?"
            )
        return "What groups keep and what the layers of one group keep balance: near the root of n_layers / kept."

    grade(2, body)


def check_grouped_stack(fn: Callable[..., Any]) -> None:
    """Exercise 3: a stack that keeps one array per group, and later one per layer of one group."""

    def body() -> str:
        for depth, size, layer in ((12, 3, sine_layer), (12, 2, cosine_layer), (20, 4, sine_layer)):
            groups = depth // size

            def stack(w: Any, x: Any, layer: Any = layer, size: int = size) -> Any:
                return fn(layer, w, x, size)

            inputs, products = _measure(stack, depth)
            assert groups - 1.5 < inputs < groups + 0.5, (
                f"{depth} layers in groups of {size}: the backward pass keeps {inputs:.1f} arrays of the size of x. "
                "How many groups are there, and what does each of them need to run again?"
            )
            # A group runs again, all of it but perhaps its last layer, and then each of its layers.
            assert products >= 5 * depth - groups, (
                f"{products:.0f} products for {depth} layers in groups of {size}: somewhere a group that runs again "
                "keeps everything of its layers. What would make each of its layers keep its input only?"
            )
            assert products <= 5 * depth, (
                f"{products:.0f} products for {depth} layers in groups of {size}: a layer runs forward more than three "
                "times."
            )
            around = _checkpoints_around_products(stack, depth)
            for _, group in itertools.groupby(around, key=lambda checkpoints: checkpoints[:1]):
                # The last layer of a group runs backward at once.
                assert all(len(checkpoints) > 1 for checkpoints in list(group)[:-1]), (
                    f"{depth} layers in groups of {size}: a layer stands under its group's checkpoint alone. While "
                    "that group runs backward, what is kept of this layer, and what of the others?"
                )
            _check_values(stack, depth, layer)
        return "An input per group while the model runs, and for a while those of one group."

    grade(3, body)


def _stack_inputs(depth: int) -> tuple[jax.Array, jax.Array]:
    w_LDD = 0.3 * jax.random.normal(jax.random.key(0), (depth, WIDTH, WIDTH))
    return w_LDD, jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def _gradients(stack: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda w, x: (stack(w, x) ** 2).sum(), argnums=(0, 1))


def _measure(stack: Callable[..., Any], depth: int) -> tuple[float, float]:
    """Return what a stack keeps, in arrays of the size of x, and its products; traced, not computed."""
    w_LDD, x_ND = _stack_inputs(depth)
    got = jax.eval_shape(stack, w_LDD, x_ND)
    assert getattr(got, "shape", None) == x_ND.shape, f"Return the last layer's output, {x_ND.shape}."
    # Slices of the weights are copies, which a loop over layers keeps and a scan does not: not counted here.
    rows = saved_residuals(lambda w, x: stack(w, x).sum(), w_LDD, x_ND).rows
    kept = sum(row.bytes for row in rows if not row.argument and row.shape[-2:] != (WIDTH, WIDTH))
    flops = matmul_flops(jax.make_jaxpr(_gradients(stack))(w_LDD, x_ND).jaxpr)
    return kept / x_ND.nbytes, flops / (2 * ROWS * WIDTH * WIDTH)


def _checkpoints_around_products(stack: Callable[..., Any], depth: int) -> list[tuple[Any, ...]]:
    """Return the checkpoints around each product of a traced stack, outermost first; products in loops once."""
    program = jax.make_jaxpr(stack)(*_stack_inputs(depth)).jaxpr
    return [one.under for one in operations(program) if one.eqn.primitive.name == "dot_general"]


def _check_values(stack: Callable[..., Any], depth: int, layer: Callable[..., Any]) -> None:
    """Assert that a stack applies every layer, and that its gradients are right."""
    w_LDD, x_ND = _stack_inputs(depth)

    def plain(w_LDD: Any, x_ND: Any) -> Any:
        return jax.lax.scan(lambda x_ND, w_DD: (layer(w_DD, x_ND), None), x_ND, w_LDD)[0]

    (mine, my_grads), (right, right_grads) = (jax.jit(_gradients(f))(w_LDD, x_ND) for f in (stack, plain))
    assert np.allclose(mine, right, rtol=1e-3), (
        "The output differs from that of the plain stack: is every layer applied, and is it the layer that was given?"
    )
    assert all(np.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(my_grads, right_grads, strict=True)), (
        "The output is right and its gradients are not. Does every value still depend on the weights?"
    )
