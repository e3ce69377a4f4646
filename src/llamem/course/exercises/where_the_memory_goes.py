"""Checks of the exercises of notebook 00."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from llamem.course.exercises import grade
from llamem.llama.config import LlamaConfig


def check_layer_input_bytes(fn: Callable[..., Any]) -> None:
    """Exercise 1: what rematerialised layers keep."""

    def body() -> str:
        # The last one's heads are wider together than its residual stream.
        for name, dtype in (("llama3-8b", jnp.bfloat16), ("llama3.2-1b", jnp.float32), ("qwen3-0.6b", jnp.bfloat16)):
            config = LlamaConfig.from_name(name, compute_dtype=dtype, param_dtype=jnp.float32)
            elements = config.n_layers * 3 * 1000 * config.d_model
            want, got = elements * config.compute_dtype.itemsize, fn(config, 3, 1000)
            assert got is not None, "Return a number of bytes."
            assert got != elements, "That counts elements. How many bytes has one, in the type that layers compute in?"
            assert got * config.n_layers != want, "That is one layer's input. How many layers wait for the backward?"
            assert got * 3 != want, "That is one sequence, and the batch has three."
            assert got == want, (
                f"3 sequences of 1,000 tokens, {name} computing in {config.compute_dtype}: yours is {got / want:.3f} "
                "times what is kept. Which axes does a layer's input have, and which type?"
            )
        return "One residual stream per layer, in the compute type."

    grade(1, body)


def check_kept_bytes(fn: Callable[..., Any]) -> None:
    """Exercise 2: a meter of residuals, built from `jax.vjp`."""

    def kept(f: Callable[..., Any], *args: Any) -> int:
        backward = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))

    def wave(x: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sin(x))

    def body() -> str:
        x, x16 = jax.ShapeDtypeStruct((1000, 10), jnp.float32), jax.ShapeDtypeStruct((1000, 10), jnp.bfloat16)
        square, huge = jax.ShapeDtypeStruct((10, 10), jnp.float32), jax.ShapeDtypeStruct((10**6, 10**7), jnp.float32)
        cases = (
            ("two sines one after the other", wave, (x,)),
            ("the same under jax.checkpoint", jax.checkpoint(wave), (x,)),
            ("two sines in 16 bits", wave, (x16,)),
            ("a product of two arguments", jnp.matmul, (x, square)),
            ("a sum of two arguments", jnp.add, (x, x)),
            ("two sines of an array of many terabytes", wave, (huge,)),
        )
        for what, f, args in cases:
            try:
                got = fn(f, *args)
            except NotImplementedError:  # not tried, and a RuntimeError as well
                raise
            except RuntimeError:  # out of memory
                raise AssertionError(f"Nothing has to be computed for {what}: ask for shapes only.") from None
            want = kept(f, *args)
            assert got is not None, "Return a number of bytes."
            assert got == want, (
                f"For {what}, {args[0].shape} in {args[0].dtype}, yours is {got:,} bytes: too "
                f"{'many' if got > want else 'few'}. Count what the function for the backward pass carries, not what "
                "goes in or comes out."
            )
        return "The same meter reads any function, yours too."

    grade(2, body)


def check_tokens(fn: Callable[..., Any]) -> None:
    """Exercise 3: where the logits outgrow the weights."""

    def body() -> str:
        for name, dtype in (("llama3-8b", jnp.bfloat16), ("llama3.2-1b", jnp.bfloat16), ("tiny", jnp.float32)):
            config = LlamaConfig.from_name(name, param_dtype=dtype, compute_dtype=jnp.bfloat16)
            weights, token = config.n_params * jnp.dtype(config.param_dtype).itemsize, 4 * config.vocab_size
            got = fn(config)
            assert got is not None and got == int(got), f"A whole number of tokens, please; yours is {got}."
            assert got * token > weights, (
                f"With {got:,} tokens the logits of {name}, in f32, are not yet larger than its {dtype.dtype} weights."
            )
            assert (got - 1) * token <= weights, f"For {name} fewer than {got:,} tokens are enough."
        return "For Llama 3.2 1B that is far below its context of 131,072."

    grade(3, body)
