"""Runs the programs that are named, and prints for each what the report says and what the process really took.

A program of its own: memory that a test process kept and uses again would not show.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from measured import measure

import jaxmem
import llamem

KEY = jax.random.key(0)


def normal(*shape: int) -> Any:
    return jax.random.normal(jax.random.fold_in(KEY, sum(shape)), shape) * 0.05


def mlp(w: Any, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) + x


def stack_loss(w: Any, x: Any) -> Any:
    return jnp.sum(llamem.apply_stack(mlp, w, x, remat="nothing") ** 2)


def cross_entropy(x: Any, head: Any, targets: Any) -> Any:
    logp = jax.nn.log_softmax(x @ head.T)
    return -jnp.mean(jnp.take_along_axis(logp, targets[:, None], 1))


def program(name: str) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """The function, its arguments, and which of them are donated."""
    if name == "stack":
        return (
            jax.value_and_grad(stack_loss),
            ({"a": normal(6, 128, 512), "b": normal(6, 512, 128)}, normal(8192, 128)),
            (),
        )
    if name == "loss":
        args = normal(1024, 64), normal(32_000, 64), jnp.arange(1024) % 32_000
        return jax.value_and_grad(cross_entropy, argnums=(0, 1)), args, ()
    if name == "closed over":
        big = normal(2048, 4096)
        return lambda x: jnp.sum(jnp.tanh(x @ big)), (normal(1024, 2048),), ()
    return lambda a: jnp.sin(a) * 2, (normal(8192, 4096),), (0,)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        fn, args, donate = program(name)
        report = jaxmem.compile_report(fn, *args, donate_argnums=donate)
        rise = measure(fn, *args, donate_argnums=donate).rise_bytes
        # What it closes over is there before it runs.
        said = report.peak_bytes - report.argument_bytes - report.constant_bytes
        sizes = {"said_MB": said / 1e6, "rose_MB": rise / 1e6, "constant_MB": report.constant_bytes / 1e6}
        print(json.dumps({"name": name, **sizes, "notes": report.warnings}), flush=True)
