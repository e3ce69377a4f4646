"""Checks of the exercises of notebook 00."""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from llamem.course.exercises import grade
from llamem.llama.config import LlamaConfig

# Of AdamW steps with rematerialised layers and f32 logits, computed in bf16, jax 0.10.2 for an H100: peak bytes by
# model, sequences, tokens in each, and the type of weights and moments.
PEAKS = {
    ("llama3.2-1b", 3, 8000, "bfloat16"): 33_812_247_560,
    ("llama3.2-3b", 1, 24_576, "bfloat16"): 49_035_824_136,
    ("qwen3-0.6b", 5, 4096, "bfloat16"): 29_730_470_360,
    ("qwen3-0.6b", 2, 12_288, "float32"): 38_852_549_080,
}


def check_peak_with_logits(fn: Callable[..., Any]) -> None:
    """Exercise 1: the peak of a step whose layers are rematerialised and whose loss holds all logits."""

    def body() -> str:
        for (name, sequences, length, dtype), peak in PEAKS.items():
            config = LlamaConfig.from_name(name, param_dtype=jnp.dtype(dtype), compute_dtype=jnp.bfloat16)
            got = fn(config, sequences, length)
            assert got is not None, "Return a number of bytes."
            tokens, weights = sequences * length, config.param_dtype.itemsize * config.n_params
            logits, inputs = 4 * tokens * config.vocab_size, 2 * config.n_layers * tokens * config.d_model
            counted, off = 3 * weights + inputs + 2 * logits, (got - peak) / 2**30
            hint = "Which arrays are alive where forward becomes backward, how many of each, and of which type?"
            for what, size in (
                ("the gradients of all weights: are they there before the layers' backward passes?", weights),
                ("AdamW's moments: how many for each weight?", -2 * weights),
                ("one moment: how many has AdamW for each weight?", -weights),
                ("the layers' inputs: what do rematerialised layers keep?", -inputs),
                ("the layers' inputs once more: in which type are they kept?", inputs),
                ("an array of the logits' size: what stands beside the logits for a moment?", -logits),
            ):
                if abs(got - counted - size) < 0.001 * peak:
                    hint = f"The difference is as large as {what}"
            assert abs(got - peak) < 0.012 * peak, (
                f"{name}, {dtype} weights, {sequences} x {length:,} tokens: yours is {off:+.2f} GiB from the "
                f"compiler's. {hint}"
            )
        return "Four steps that nobody showed, within 1.2 % of the compiler."

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
        configs = {
            f"{name} in {jnp.dtype(dtype)}": LlamaConfig.from_name(name, param_dtype=dtype, compute_dtype=jnp.bfloat16)
            for name, dtype in (
                ("llama3-8b", jnp.bfloat16),
                ("llama3.2-1b", jnp.bfloat16),
                ("tiny", jnp.float32),
                ("llama3-8b", jnp.float32),
            )
        }
        exact: Any = types.SimpleNamespace(n_params=7_000_000, vocab_size=1000, d_model=64, n_layers=3)
        exact.param_dtype, exact.compute_dtype = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
        configs["a model of 7,000,000 parameters and 1,000 words"] = exact
        for name, config in configs.items():
            weights, token = config.n_params * jnp.dtype(config.param_dtype).itemsize, 4 * config.vocab_size
            got = fn(config)
            assert got is not None and got == int(got), f"A whole number of tokens, please; yours is {got}."
            assert got * token > weights, (
                f"With {got:,} tokens the logits of {name}, in f32, are not yet larger than its weights."
            )
            assert (got - 1) * token <= weights, f"For {name} fewer than {got:,} tokens are enough."
        return "For Llama 3.2 1B that is far below its context of 131,072."

    grade(3, body)
