"""Twenty programs of different kinds for timelines, by shapes alone: so large that a TPU keeps them in main memory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import llamem
from llamem.layers.attention import causal_attention


class Program(NamedTuple):
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


X = shape(65_536, 512)
WEIGHTS = {"a": shape(6, 512, 2048), "b": shape(6, 2048, 512)}
HIDDEN, HEAD, CHIPS = shape(8192, 512), shape(64_000, 512), shape(8192, dtype=jnp.int32)


def mlp(w: Any, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) + x


def stack_loss(weights: Any, x: Any, **options: Any) -> Any:
    return jnp.sum(llamem.apply_stack(mlp, weights, x, **options) ** 2)


def plain_loss(hidden: Any, head: Any, chips: Any) -> Any:
    with jax.named_scope("logits"):
        logp = jax.nn.log_softmax(hidden @ head.T)
        return -jnp.mean(jnp.take_along_axis(logp, chips[:, None], 1))


def attention_loss(q: Any, k: Any, v: Any) -> Any:
    return jnp.sum(causal_attention(q, k, v, implementation="xla") ** 2)


def both_ways(x: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x) @ x.T, lambda x: x @ jnp.cos(x).T, x)


def halved(x: Any) -> Any:
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, lambda x: x / 2, x)


def train_step(plan: llamem.Plan, accumulate: int = 1, **config: Any) -> Program:
    settings = llamem.TrainSettings(batch_size=8, seq_len=1024, accumulate=accumulate)
    model = llamem.LlamaConfig.from_name("tiny", vocab_size=50_000, d_model=256, max_seq_len=1024, **config)
    return Program(*llamem_step(model, settings, plan), donate_argnums=(0,))


def llamem_step(config: Any, settings: Any, plan: llamem.Plan) -> tuple[Any, Any]:
    step, state, batch = llamem.abstract_step(config, settings, plan)
    return step, (state, batch)


def stack(mode: Any, remat: Any) -> Program:
    return Program(jax.value_and_grad(functools.partial(stack_loss, mode=mode, remat=remat)), (WEIGHTS, X))


def tiled(**options: Any) -> Program:
    loss = functools.partial(llamem.tiled_cross_entropy, num_tiles=8, **options)
    return Program(jax.value_and_grad(loss, argnums=(0, 1)), (HIDDEN, HEAD, CHIPS))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "stack, scan, keep all": lambda: stack("scan", None),
    "stack, scan, remat": lambda: stack("scan", "nothing"),
    "stack, unrolled, keep all": lambda: stack("unroll", None),
    "stack, unrolled, remat": lambda: stack("unroll", "nothing"),
    "stack, nested, remat": lambda: stack("nested", "nothing"),
    "loss, plain": lambda: Program(jax.value_and_grad(plain_loss, argnums=(0, 1)), (HIDDEN, HEAD, CHIPS)),
    "loss, forward only": lambda: Program(plain_loss, (HIDDEN, HEAD, CHIPS)),
    "loss, tiles of tokens": lambda: tiled(axis="tokens"),
    "loss, tiles of the vocabulary": lambda: tiled(axis="vocab"),
    "attention": lambda: Program(jax.grad(attention_loss, argnums=(0, 1, 2)), (shape(4, 2048, 8, 64),) * 3),
    "softmax of rows": lambda: Program(lambda x: jax.nn.softmax(x) * 2, (shape(32_768, 8192),)),
    "elementwise, donated": lambda: Program(lambda x: jnp.sin(x) * 2, (shape(32_768, 8192),), (0,)),
    "sort": lambda: Program(lambda x: jnp.sort(x, axis=0)[1:] * 2, (shape(32_768, 8192),)),
    "cond": lambda: Program(both_ways, (shape(16_384, 4096),)),
    "while": lambda: Program(halved, (shape(32_768, 8192),)),
    "one product": lambda: Program(lambda a, b: a @ b, (shape(16_384, 16_384), shape(16_384, 8192))),
    "train step, neither": lambda: train_step(llamem.Plan(remat=None, loss_tiles=None)),
    "train step, both": lambda: train_step(llamem.Plan(loss_tiles=8)),
    "train step, two micro-batches": lambda: train_step(llamem.Plan(loss_tiles=8), accumulate=2),
    "train step, more layers": lambda: train_step(llamem.Plan(loss_tiles=None), n_layers=12),
}
