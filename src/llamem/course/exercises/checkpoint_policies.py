"""Checks of the exercises of notebook 02."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.course.exercises import grade
from llamem.llama.config import LlamaConfig
from llamem.memory.compiling import matmul_flops
from llamem.memory.residuals import saved_residuals


def check_frontier(fn: Callable[..., Any]) -> None:
    """Exercise 1: the policies that no other policy beats."""

    def body() -> str:
        table = {"a": (10, 5.0), "b": (20, 4.0), "c": (20, 6.0), "d": (30, 4.0), "e": (40, 3.0)}
        table |= {"f": (9, 9.0), "g": (20, 4.0), "h": (15, 4.9)}  # g equals b; h lies above the line from a to b
        for rows in itertools.islice(itertools.permutations(table.items()), 0, None, 97):
            got = fn(dict(rows))
            assert got is not None, "Return the names, in any order."
            got = set(got)
            for loser, winner in (("c", "b"), ("d", "b")):
                assert loser not in got, (
                    f"{loser} = {table[loser]} does not belong: {winner} = {table[winner]} is nowhere worse and "
                    "somewhere better."
                )
            for missing in sorted(set(table) - {"c", "d"} - got):
                raise AssertionError(
                    f"Of {table} you leave out {missing}. Which of the others is at least as good in both numbers, and "
                    "better in one?"
                )
        return "Only these are worth a thought, whatever bytes and FLOPs are worth to you."

    grade(1, body)


def check_residual_bytes(fn: Callable[..., Any]) -> None:
    """Exercise 2: what a policy keeps, by hand."""

    def body() -> str:
        llama = LlamaConfig.from_name("llama3-8b", compute_dtype=jnp.bfloat16)
        # Its heads are wider together than its residual stream; and it is stored in another type than it computes in.
        qwen = LlamaConfig.from_name("qwen3-0.6b", compute_dtype=jnp.bfloat16, param_dtype=jnp.float32)
        for config, names, think in (
            (llama, (), "What does a layer keep that saves no name at all?"),
            (llama, ("attn",), "The attention's output has all its heads."),
            (llama, ("k", "v"), "Do keys and values have as many heads as queries?"),
            (llama, ("gate", "up", "q"), "How wide is a feed-forward inside?"),
            (qwen, ("q", "attn"), "Are all heads together always as wide as the residual stream?"),
            (llama.replace(compute_dtype=jnp.float32), ("up",), "How many bytes has one element?"),
        ):
            width = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads, "attn": config.n_heads}
            width = {name: heads * config.head_dim for name, heads in width.items()}
            width |= {"gate": config.d_ff, "up": config.d_ff}
            elements = config.n_layers * 1000 * (config.d_model + sum(width[name] for name in names))
            got, want = fn(config, 1000, names), elements * config.compute_dtype.itemsize
            assert got is not None, "Return a number of bytes."
            assert got == want, (
                f"{config.n_layers} layers, 1,000 tokens, computing in {config.compute_dtype}, keeping {names}: yours "
                f"is {got / want:.3f} times what is kept. {think}"
            )
        return "Widths times tokens times layers: a policy can be priced before anything is compiled."

    grade(2, body)


def check_thrifty(fn: Callable[..., Any]) -> None:
    """Exercise 3: a name and a policy that keep the one narrow array."""
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
        same = all(np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(mine, right, strict=True))
        assert same and np.allclose(got, want, atol=1e-4), "The output or its gradients are not those of the layer."
        kept = saved_residuals(lambda *args: fn(*args).sum(), *args).bytes
        size = rows * narrow * 4
        assert kept > 0, "Nothing is kept besides the arguments. Is the name in the policy, and is its result used?"
        assert kept <= size, (
            f"{kept:,} bytes are kept, and the narrow array has {size:,}. Look at the list with "
            "llamem.saved_residuals: what else is in it?"
        )
        products = matmul_flops(jax.make_jaxpr(gradients(fn))(*args).jaxpr) / (2 * rows * narrow * wide)
        assert products <= 10, (
            f"{products:.0f} products: a narrow array is kept, and yet the product that makes it runs again. Which "
            "array does the derivative of a sine need?"
        )
        return "One array kept, one product of three repeated."

    grade(3, body)
