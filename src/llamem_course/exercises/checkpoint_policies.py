"""Checks of the exercises of notebook 02."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.compiling import matmul_flops
from jaxmem.tracing.residuals import saved_residuals
from llamem.layers.remat import Policy
from llamem.llama.config import LlamaConfig
from llamem_course.exercises import grade

MiB = 2**20


def priced(config: LlamaConfig, tokens: int) -> dict[str, tuple[int, int]]:
    """For one sequence, by name: bytes that all layers keep of it, and FLOPs of the products that they then spare.

    Each name spares the product that makes it; `attn` is the scores times the values, in plain attention.
    """
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    # Of each name: how wide it is, and over how many numbers each of its own is a sum.
    sizes = {"q": (heads, config.d_model), "k": (kv_heads, config.d_model), "v": (kv_heads, config.d_model)}
    sizes |= {"attn": (heads, tokens), "attn_out": (config.d_model, heads)}
    sizes |= dict.fromkeys(("gate", "up"), (config.d_ff, config.d_model))
    rows = config.n_layers * tokens
    return {
        name: (rows * width * config.compute_dtype.itemsize, 2 * rows * width * inner)
        for name, (width, inner) in sizes.items()
    }


def _sums(table: dict[str, tuple[int, int]], names: Iterable[str]) -> tuple[int, int]:
    """Bytes and FLOPs of some names of a table."""
    n_bytes, flops = zip((0, 0), *(table[name] for name in names), strict=True)
    return sum(n_bytes), sum(flops)


def check_best_policy(fn: Callable[..., Any]) -> None:
    """Exercise 2: the names that spare the most products within a budget, against every other choice of names."""
    one_b, eight_b, qwen = (
        LlamaConfig.from_name(name, compute_dtype=jnp.bfloat16) for name in ("llama3.2-1b", "llama3-8b", "qwen3-0.6b")
    )

    def body() -> str:
        # Budgets in KiB for one token in one layer: small enough to write down, and to do in one's head.
        for config, tokens, kib in (
            (one_b, 2048, 0),
            (one_b, 2048, 25),
            (one_b, 2048, 100),
            (eight_b, 8192, 30),
            (eight_b, 8192, 36),
            (eight_b, 5120, 35),
            (qwen, 1024, 12),
        ):
            table, budget = priced(config, tokens), kib * 1024 * tokens * config.n_layers
            policy = fn(dict(table), budget)
            if not isinstance(policy, Policy):
                raise AssertionError(f"Return a llamem.Policy that says what to save, not {type(policy).__name__}.")
            if policy != Policy(save=policy.save) or not set(policy.save) <= set(table):
                raise AssertionError(f"{policy}: save names of the table, and nothing else. It prices no other place.")
            choices = [names for n in range(len(table) + 1) for names in itertools.combinations(table, n)]
            sums = [_sums(table, names) for names in choices]
            kept, spared = _sums(table, set(policy.save))
            best = max(flops for n_bytes, flops in sums if n_bytes <= budget)
            told = (
                f"{config.n_layers} layers of width {config.d_model}, {tokens:,} tokens: {policy.save} keeps "
                f"{kept / MiB:,.0f} of {budget / MiB:,.0f} MiB"
            )
            question = "Of how many layers are the table's bytes?" if budget else "Which policy keeps nothing at all?"
            assert kept <= budget, f"{told}. That is more than there is. {question}"
            if spared < best:
                least = min(n_bytes for n_bytes, flops in sums if flops == best)
                question = "Which name would you give back, to make use of the room that is left?"
                if kept >= least:
                    question = "A full budget is not the aim. What does a byte of each name spare?"
                if not policy.save:
                    question = "Is there no name that fits?"
                raise AssertionError(
                    f"{told}, and spares {spared / 1e12:.2f} TFLOP, where {best / 1e12:.2f} are possible. {question}"
                )
        return "Seven names are few enough to try every choice, before anything is compiled."

    grade(2, body)


def check_residual_bytes(fn: Callable[..., Any]) -> None:
    """Exercise 1: what a policy keeps, by hand."""

    def body() -> str:
        llama = LlamaConfig.from_name("llama3-8b", compute_dtype=jnp.bfloat16)
        # Its heads are wider together than its residual stream; and it is stored in another type than it computes in.
        qwen = LlamaConfig.from_name("qwen3-0.6b", compute_dtype=jnp.bfloat16, param_dtype=jnp.float32)
        for i, (config, names, think) in enumerate(
            (
                (llama, (), "What does a layer keep that saves no name at all?"),
                (llama, ("attn",), "Attention's output has all heads, and perhaps a float32 logsumexp each."),
                (llama, ("k", "v"), "These are two arrays. Do keys and values have as many heads as queries?"),
                (llama, ("gate", "up", "q"), "How wide is a feed-forward inside?"),
                (qwen, ("q", "attn"), "Are all heads together always as wide as the residual stream?"),
                (
                    qwen,
                    ("k", "gate"),
                    "Which number of the configuration says how wide it is? No share of d_model.",
                ),
                (llama.replace(compute_dtype=jnp.float32), ("up",), "How many bytes has one element?"),
            )
        ):
            tokens = 1000 + 7 * i
            width = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads, "attn": config.n_heads}
            width = {name: heads * config.head_dim for name, heads in width.items()}
            width |= {"gate": config.d_ff, "up": config.d_ff}
            elements = config.n_layers * tokens * (config.d_model + sum(width[name] for name in names))
            got, want = fn(config, tokens, names), elements * config.compute_dtype.itemsize
            assert got is not None, "Return a number of bytes."
            assert abs(got * MiB / want - 1) > 0.01, "Bytes are asked for, and yours are MiB."
            if "attn" in names:  # with the logsumexp of its scores, as the notebook prices it, or without
                want += (got > want) * 4 * config.n_layers * tokens * config.n_heads
            other = elements * jnp.dtype(config.param_dtype).itemsize
            if got * config.n_layers == want:
                think = f"That is one layer's. This model has {config.n_layers}."
            if got == other != want and names != ("k", "v"):  # whose heads, all of them, are as many bytes
                think = "In which type are activations computed, and weights stored? Or does an array count twice?"
            assert got == want, (
                f"{config.n_layers} layers, {tokens:,} tokens, computing in {config.compute_dtype}, keeping {names}: "
                f"yours is {got / want:.3f} times what is kept. {think}"
            )
        return "Widths times tokens times layers: a policy can be priced before anything is compiled."

    grade(1, body)


def check_thrifty(fn: Callable[..., Any]) -> None:
    """Exercise 3: a layer that keeps the one narrow array, and repeats one product."""
    rows, narrow, wide = 30, 8, 64

    def plain(w1: Any, w2: Any, w3: Any, x: Any) -> Any:
        return jnp.sin(jnp.tanh(x @ w1) @ w2) @ w3

    def body() -> str:
        keys = jax.random.split(jax.random.key(0), 4)
        sizes = ((narrow, wide), (wide, narrow), (narrow, wide), (rows, narrow))
        args = [0.3 * jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True)]

        def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
            return jax.value_and_grad(lambda *args: fn(*args).sum(), argnums=(0, 1, 2, 3))

        got, want = fn(*args), plain(*args)
        assert got is not None and np.shape(got) == want.shape, f"Return the layer's output, {want.shape}."
        mine, right = jax.tree.leaves(gradients(fn)(*args)), jax.tree.leaves(gradients(plain)(*args))
        assert np.allclose(got, want, atol=1e-4), "The output is not that of the layer."
        for name, a, b in zip(("w1", "w2", "w3", "x"), mine[1:], right[1:], strict=True):
            assert np.allclose(a, b, rtol=1e-3, atol=1e-4), (
                f"The output is right, and the gradient of {name} is not: does anything stop it on its way back?"
            )
        kept = saved_residuals(lambda *args: fn(*args).sum(), *args).bytes
        size = rows * narrow * 4
        assert kept > 0, "Nothing is kept besides the arguments. Is the name in the policy, and is its result used?"
        assert kept <= size, (
            f"{kept:,} bytes are kept, and the narrow array has {size:,}. Look at the list with "
            "jaxmem.saved_residuals: what else is in it?"
        )
        products = matmul_flops(jax.make_jaxpr(gradients(fn))(*args).jaxpr) / (2 * rows * narrow * wide)
        assert products <= 10, (
            f"{products:.0f} products: a narrow array is kept, and yet the product that makes it runs again. Which "
            "array does the derivative of a sine need?"
        )
        return "One array kept, one product of three repeated."

    grade(3, body)
