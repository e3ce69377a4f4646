"""Checks of the exercises of notebook 00."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from llamem.course.exercises import grade
from llamem.llama.config import LlamaConfig


def check_layer_input_bytes(fn: Callable[..., Any]) -> None:
    """Exercise 1: what rematerialised layers keep."""

    def body() -> str:
        for name, dtype in (("llama3-8b", jnp.bfloat16), ("llama3.2-1b", jnp.float32), ("qwen3-0.6b", jnp.bfloat16)):
            config = LlamaConfig.from_name(name, compute_dtype=dtype)
            got, elements = fn(config, 3, 1000), config.n_layers * 3 * 1000 * config.d_model
            assert got != elements, "That counts elements: multiply by the bytes of config.compute_dtype."
            assert got * config.n_layers != elements * dtype.dtype.itemsize, "That is one layer: there are n_layers."
            want = elements * dtype.dtype.itemsize
            assert got == want, f"For {name}, 3 sequences of 1,000 tokens in {dtype.dtype}: {want:,}; yours is {got:,}."
        return "One residual stream per layer, in the compute type."

    grade(1, body)


def check_tokens(fn: Callable[..., Any]) -> None:
    """Exercise 2: where the scores outgrow the weights."""

    def body() -> str:
        for name, dtype in (("llama3-8b", jnp.bfloat16), ("llama3.2-1b", jnp.bfloat16), ("tiny", jnp.float32)):
            config = LlamaConfig.from_name(name, param_dtype=dtype)
            weights, token = config.n_params * jnp.dtype(config.param_dtype).itemsize, 4 * config.vocab_size
            got = fn(config)
            assert got == int(got), f"A whole number of tokens, please; yours is {got}."
            assert got * token > weights, (
                f"With {got:,} tokens the scores of {name} are not yet larger than its weights."
            )
            assert (got - 1) * token <= weights, f"For {name} one token fewer is enough already."
        return "For Llama 3.2 1B that is far below its context of 131,072."

    grade(2, body)
