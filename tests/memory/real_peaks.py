"""Runs different programs, or those named, and prints for each what the report says and what the process really took.

A program of its own: memory that a test process kept and uses again would not show.
"""

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

import llamem
from llamem.layers.attention import causal_attention
from llamem.memory.measured import measure
from llamem.train import init_state, make_train_step

KEY = jax.random.key(0)
# XLA's CPU libraries take workspace of their own for these, which no plan counts: how much, depends on their threads.
LIBRARY_WORKSPACE = ("attention", "sort", "loss, forward only")


def normal(*shape: int) -> Any:
    return jax.random.normal(jax.random.fold_in(KEY, sum(shape)), shape) * 0.05


def mlp(w: Any, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) + x


def stack_loss(w: Any, x: Any, **options: Any) -> Any:
    return jnp.sum(llamem.apply_stack(mlp, w, x, **options) ** 2)


def cross_entropy(x: Any, head: Any, targets: Any, **options: Any) -> Any:
    if options:
        return llamem.tiled_cross_entropy(x, head, targets, **options)
    logp = jax.nn.log_softmax(x @ head.T)
    return -jnp.mean(jnp.take_along_axis(logp, targets[:, None], 1))


def attention(q: Any, k: Any, v: Any) -> Any:
    return jnp.sum(causal_attention(q, k, v, implementation="xla") ** 2)


def programs() -> Any:
    x, w = normal(8192, 128), {"a": normal(6, 128, 512), "b": normal(6, 512, 128)}
    for mode, remat in [
        ("scan", None),
        ("scan", "nothing"),
        ("unroll", None),
        ("unroll", "nothing"),
        ("nested", "nothing"),
    ]:
        fn = functools.partial(stack_loss, mode=mode, remat=remat)
        yield f"stack {mode} {remat}", jax.value_and_grad(fn), (w, x), ()
    hidden, head, targets = normal(1024, 64), normal(32_000, 64), jnp.arange(1024) % 32_000
    for options in ({}, {"num_tiles": 8}, {"num_tiles": 8, "axis": "vocab"}):
        fn = functools.partial(cross_entropy, **options)
        yield f"loss {options}", jax.value_and_grad(fn, argnums=(0, 1)), (hidden, head, targets), ()
    yield "loss, forward only", cross_entropy, (hidden, head, targets), ()
    tiled = functools.partial(cross_entropy, num_tiles=8)
    yield "tiled loss, forward only", tiled, (hidden, head, targets), ()
    yield "softmax of rows", lambda a: jax.nn.softmax(a) * 2, (normal(8192, 2048),), ()
    yield "attention", jax.grad(attention, argnums=(0, 1, 2)), tuple(normal(1, 1536, 8, 16) for _ in range(3)), ()
    yield "elementwise, donated", lambda a: jnp.sin(a) * 2, (normal(8192, 4096),), (0,)
    yield "sort", lambda a: jnp.sort(a.ravel()[::-1])[1:] * 2, (normal(4096, 2048),), ()
    config = llamem.LlamaConfig.from_name("tiny", vocab_size=50_000, n_layers=2)
    settings = llamem.TrainSettings(batch_size=2, seq_len=256)
    for both, plan in enumerate((llamem.Plan(remat=None, loss_tiles=None), llamem.Plan(loss_tiles=4))):
        step = make_train_step(config, settings, plan)
        tokens = jnp.arange(512, dtype=jnp.int32).reshape(2, 256)
        yield (
            f"train step, {['neither', 'both'][both]}",
            step,
            (init_state(config, settings, plan), (tokens, tokens)),
            (0,),
        )


if __name__ == "__main__":
    for name, fn, args, donate in programs():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        report = llamem.compile_report(fn, *args, donate_argnums=donate)
        rise = measure(fn, *args, donate_argnums=donate).rise_bytes
        said = report.peak_bytes - report.argument_bytes
        print(json.dumps({"name": name, "said_MB": said / 1e6, "rose_MB": rise / 1e6}), flush=True)
