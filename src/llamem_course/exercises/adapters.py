"""Checks of the exercises of notebook 09."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import matmul_flops
from jaxmem.tracing.jaxprs import equations
from llamem_course.exercises import grade, largest_array, operations_written


def check_merged_weight(fn: Callable[..., Any]) -> None:
    """Exercise 1: an adapter added into the matrix that it stands beside."""
    D, F, R = 48, 40, 3
    keys = jax.random.split(jax.random.key(3), 3)
    w_DF, down_DR, up_RF = (jax.random.normal(k, s) for k, s in zip(keys, ((D, F), (D, R), (R, F)), strict=True))

    def right(w_DF: Any, down_DR: Any, up_RF: Any, scale: Any) -> Any:
        return (w_DF.astype(jnp.float32) + scale * (down_DR @ up_RF)).astype(w_DF.dtype)

    def body() -> str:
        arrays = w_DF, down_DR, up_RF
        found = fn(*arrays, 1.0)
        shape = getattr(found, "shape", None)
        assert shape == w_DF.shape, f"a matrix that takes the place of the old one has its shape, {(D, F)}; got {shape}"
        assert not np.allclose(found, down_DR @ up_RF, rtol=1e-3, atol=1e-4), (
            "this is what the adapter adds. What becomes of the weights that it is added to?"
        )
        assert not np.allclose(found, right(*arrays, 1 / R), rtol=1e-3, atol=1e-4), (
            f"what you add is divided by the rank, {R}. Is `scale` LoRA's alpha, or is it already alpha / r?"
        )
        _close(found, right(*arrays, 1.0), "with a scale of 1, x times your matrix must be x W + (x down) up")
        _close(
            fn(*arrays, 2.5),
            right(*arrays, 2.5),
            "right with a scale of 1, and not with 2.5: what is multiplied by it?",
        )
        _close(
            fn(0 * w_DF, down_DR, up_RF, -0.5),
            right(0 * w_DF, down_DR, up_RF, -0.5),
            "right with scales above zero, and not with one below: the scale is a factor, once",
        )
        half = w_DF.astype(jnp.bfloat16)
        found, exact = fn(half, down_DR, up_RF, 0.3), right(half, down_DR, up_RF, 0.3)
        assert getattr(found, "dtype", None) == jnp.bfloat16, (
            f"the matrix was bfloat16, yours is {getattr(found, 'dtype', None)}: which type must a weight have that "
            "takes the place of another?"
        )
        same = float(np.mean(np.asarray(found) == np.asarray(exact)))
        assert same == 1, (
            f"{1 - same:.0%} of the numbers are off by a rounding: in which type do you add, and how often is a number "
            "rounded on its way?"
        )
        return "One matrix, and nothing beside it: a merged model costs what the plain one did."

    grade(1, body)


def check_adapted(fn: Callable[..., Any]) -> None:
    """Exercise 2: a linear layer whose examples bring an adapter each."""

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


def _close(actual: Any, expected: Any, hint: str) -> None:
    shape = getattr(actual, "shape", None)
    assert shape == expected.shape, f"the shape must be {expected.shape}, not {shape}; {hint}"
    assert np.allclose(actual, expected, rtol=1e-3, atol=1e-4), hint
