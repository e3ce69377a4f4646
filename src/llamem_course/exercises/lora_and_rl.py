"""Checks of the exercises of notebook 09."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jaxmem import matmul_flops
from jaxmem.jaxprs import differentiation_pass, equations
from llamem_course.exercises import grade, largest_array, operations_written


def check_adapted(fn: Callable[..., Any]) -> None:
    """Exercise 1: a linear layer whose examples bring an adapter each."""

    def inputs(B: int, T: int, D: int, F: int, R: int, A: int) -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = (B, T, D), (D, F), (A, D, R), (A, R, F)
        return tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))

    B, T, D, F, R, A = 5, 6, 16, 24, 3, 4
    x_BTD, w_DF, down_ADR, up_ARF = inputs(B, T, D, F, R, A)
    scale_A = jnp.array([1.0, 0.5, 3.0, -2.0])
    adapter_B = jnp.array([2, 0, 3, 3, 1])

    def layer(x_BTD: Any, w_DF: Any, down_ADR: Any, up_ARF: Any, scale_A: Any, adapter_B: Any) -> Any:
        rows = [x @ w_DF + scale_A[a] * (x @ down_ADR[a]) @ up_ARF[a] for x, a in zip(x_BTD, adapter_B, strict=True)]
        return jnp.stack(rows)

    def right(scale_A: Any, adapter_B: Any) -> Any:
        return layer(x_BTD, w_DF, down_ADR, up_ARF, scale_A, adapter_B)

    def gradients(of: Callable[..., Any]) -> Any:
        def summed(x_BTD: Any, down_ADR: Any, up_ARF: Any) -> Any:
            return jnp.sum(jnp.sin(of(x_BTD, w_DF, down_ADR, up_ARF, scale_A, adapter_B)))

        return jax.grad(summed, (0, 1, 2))(x_BTD, down_ADR, up_ARF)

    def body() -> str:
        ones_A, same_B = jnp.ones(A), jnp.full(B, 1)
        found = fn(x_BTD, w_DF, down_ADR, up_ARF, ones_A, same_B)
        hint = "with adapter 1 for every example and a scale of 1 it must be the LoRA that you built above"
        _close(found, right(ones_A, same_B), hint)
        found = fn(x_BTD, w_DF, down_ADR, up_ARF, ones_A, adapter_B)
        hint = (
            "one adapter for all is right, one for each example is not: which axis of `down` and `up` does it choose?"
        )
        _close(found, right(ones_A, adapter_B), hint)
        found = fn(x_BTD, w_DF, down_ADR, up_ARF, scale_A, adapter_B)
        hint = (
            "with scales of 1 you are right. Each adapter has a scale of its own: what does it multiply, once, and "
            "along which axis must it lie?"
        )
        _close(found, right(scale_A, adapter_B), hint)
        other = *inputs(3, 2, 12, 8, 5, 7), jnp.arange(1.0, 8.0), jnp.array([6, 1, 4])
        hint = "with 4 adapters of rank 3 you are right, with 7 of rank 5 not: which number have you written down?"
        _close(fn(*other), layer(*other), hint)
        program = jax.make_jaxpr(fn)(x_BTD, w_DF, down_ADR, up_ARF, scale_A, adapter_B).jaxpr
        largest = largest_array(program)
        assert largest < 2 * D * F, (
            f"right, but an array of {largest} numbers appears on the way, where the layer's weight has {D * F}: you "
            "merge weights, or copy an adapter for each token. In which order must three matrices be multiplied so "
            "that the narrow side stays in between, and how often must an adapter be fetched for one sequence?"
        )
        needed = 2 * B * T * (D * F + R * (D + F))
        flops = matmul_flops(program)
        assert flops < 1.05 * needed, (
            f"right, but the products take {flops} FLOPs where {needed} are enough: every example meets adapters that "
            "are not its own, or weights are merged one by one"
        )
        sizes = f"{B} sequences of {T} tokens", f"{B + 3} of {T + 2}"
        more = *inputs(B + 3, T + 2, D, F, R, A), scale_A, jnp.arange(B + 3) % A
        both = (x_BTD, w_DF, down_ADR, up_ARF, scale_A, adapter_B), more
        few, many = (_products_run(fn, (D, F), *of) for of in both)
        assert few == many, (
            f"right, but the product with the whole weight runs {few} times for {sizes[0]}, and {many} times for "
            f"{sizes[1]}. Nobody's adapter changes that weight: can the large product not run once for all?"
        )
        few, many = (operations_written(fn, *of) for of in both)
        assert many < 1.2 * few, (
            f"right, but the program has {few} operations for {sizes[0]}, and {many} for {sizes[1]}. It grows with the "
            "sequences, as Python's loops do, and so does the time to compile it: what works on all of them at once?"
        )
        reasons = {"x": "layers below must still learn"}
        reasons |= dict.fromkeys(("down_ADR", "up_ARF"), "it is what a fine-tune trains")
        slopes = [*zip(reasons.items(), gradients(fn), gradients(layer), strict=True)]
        for (name, why), given, wanted in slopes[::-1]:  # what is not trained leaves x without its part as well
            _close(given, wanted, f"the numbers are right, the gradient of {name} is not: {why}")
        return "Nothing of the weight's size was made but the weight, and no example met a foreign adapter."

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


def check_dequantized(fn: Callable[..., Any]) -> None:
    """Exercise 3: a matrix out of blocks of four bits and a scale."""

    def blocks(n_out: int, n_in: int, seed: int) -> tuple[Any, Any, np.ndarray]:
        draw = np.random.default_rng(seed)
        q = draw.integers(0, 16, (n_out, n_in))
        scale = draw.uniform(0.01, 0.1, (n_out, n_in // 32)).astype(np.float16)
        parts = q.reshape(n_out, -1, 2, 16)
        numbers = (q - 8) * np.repeat(scale.astype(np.float64), 32, axis=1)
        return jnp.asarray(parts[:, :, 0] | parts[:, :, 1] << 4, jnp.uint8), jnp.asarray(scale), numbers

    def body() -> str:
        for n_out, n_in, seed in ((3, 64, 0), (5, 96, 1)):
            values, scale, exact = blocks(n_out, n_in, seed)
            found = fn(values, scale, jnp.float32)
            shape = getattr(found, "shape", None)
            assert shape == (n_out, n_in), (
                f"return a row of {n_in} numbers for each of {n_out} outputs, {(n_out, n_in)}; got {shape}"
            )
            assert found.dtype == jnp.float32, f"numbers of the dtype that was asked for, float32; got {found.dtype}"
            found = np.asarray(found, np.float64)
            scales = np.repeat(np.asarray(scale, np.float64), 32, 1)
            off = np.round(np.abs(found - exact) / scales, 2)  # in scales
            assert off.min() == 0 or np.ptp(off) > 0, (
                f"every number is off by {off.max():g} scales: four bits count from 0, and weights have two signs. "
                "Which q stands for zero?"
            )
            assert not np.isclose(found * scales, exact, rtol=1e-6, atol=1e-9).all(), (
                "these are whole numbers, and the same in each block. What does a block bring along to stretch them?"
            )
            assert set(np.unique(off)) != {0, 256}, (
                "some numbers are right, the others off by 256 scales: of which type is `values`, and what does it "
                "hold when you take 8 from 3?"
            )
            assert np.abs(found).max() < 1.0, (
                f"values as far from zero as {np.abs(found).max():.0f}, where 8 scales are below 1: a byte holds two "
                "numbers, how do you get at one alone? And what comes first, the 8 or the scale?"
            )
            right = np.asarray(np.isclose(found, exact, rtol=1e-6, atol=1e-9))
            sixteens = np.all(right.reshape(n_out, -1, 16), axis=2)
            assert right.all() or not np.all(sixteens[:, 0]) or np.all(sixteens[:, 1]), (
                f"the first 16 numbers of each row are right, others are not. A row of {n_in} has {n_in // 32} blocks, "
                "and the two halves of each stand side by side: which axis do you join them along?"
            )
            assert np.allclose(np.sort(found, 1), np.sort(exact, 1), rtol=1e-6) <= right.all(), (
                "all numbers are there, in another order: the high bits of a byte are not the neighbour of its low "
                "bits, but the number 16 further on"
            )
            assert right.all(), (
                f"{right.mean():.0%} of the numbers are right. Do you compute in float32, and does each block of 32 "
                "meet its own scale?"
            )
            rounded = fn(values, scale, jnp.bfloat16)
            assert rounded.dtype == jnp.bfloat16, f"asked for bfloat16, you returned {rounded.dtype}"
            assert (np.asarray(rounded) == np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16))).all(), (
                "in float32 you are right, in bfloat16 some numbers are rounded twice: where does the type change?"
            )
        try:
            jitted = jax.jit(fn, static_argnums=2)(values, scale, jnp.float32)
        except TypeError:  # what JAX raises where a traced array is asked for its numbers
            raise AssertionError(
                "right, but not inside `jit`, where arrays have a shape and no numbers yet: what in your answer asks "
                "for a number, or for an array of NumPy's?"
            ) from None
        _close(jitted, exact, "right, but other numbers come out inside `jit`")
        sizes = (3, 64), (12, 256)
        few, many = (operations_written(lambda v, s: fn(v, s, jnp.float32), *blocks(*of, 2)[:2]) for of in sizes)
        assert many < 1.5 * few, (
            f"right, but the program has {few} operations for a matrix of {sizes[0]}, and {many} for one of "
            f"{sizes[1]}: a loop of Python's leaves every turn in it. A matrix of the 8B model has half a million "
            "blocks; which operations work on all of them at once?"
        )
        return "These are the numbers that llama.cpp reads from a file of Q4_0, to the last bit."

    grade(3, body)


def _products_run(fn: Callable[..., Any], shape: tuple[int, ...], *arguments: Any) -> int:
    """How often products with a matrix of that shape run, those of loops as often as the loops turn."""
    found = equations(jax.make_jaxpr(fn)(*arguments).jaxpr)
    products = ((one, times) for one, times in found if one.primitive.name == "dot_general")
    return sum(times for one, times in products if any(getattr(v.aval, "shape", ()) == shape for v in one.invars))


def _differentiated(equation: jex_core.JaxprEqn) -> bool:
    """Whether autodiff made the operation: JAX writes into its name how it was derived."""
    return differentiation_pass(str(equation.source_info.name_stack)) != ""


def _close(actual: Any, expected: Any, hint: str) -> None:
    shape = getattr(actual, "shape", None)
    assert shape == expected.shape, f"the shape must be {expected.shape}, not {shape}; {hint}"
    assert np.allclose(actual, expected, rtol=1e-3, atol=1e-4), hint
