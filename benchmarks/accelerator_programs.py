"""The programs that `accelerator.py` predicts and measures: losses, stacks, attention and whole training steps."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from loss import plain, products

import llamem
from llamem.layers import causal_attention
from llamem.runs import loss_fn
from llamem.train import make_model


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, the shapes of its arguments, which of them it may overwrite, and what one call computes.

    `flops` are those of the model's own products, without what is computed twice: for MFU; 0 where no time is taken.
    `tokens` per call.
    """

    name: str
    fn: Callable[..., Any]
    shapes: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()
    flops: float = 0.0
    tokens: int = 0


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def losses(N: int, D: int, V: int) -> Iterator[Program]:
    x, head, ids = shape(N, D), shape(V, D), shape(N, dtype=jnp.int32)
    tiled = llamem.tiled_cross_entropy
    flops = 6.0 * N * V * D
    for name, loss in {
        "plain (optax)": plain,
        "auto": tiled,
        "tokens, 8 tiles": partial(tiled, axis="tokens", num_tiles=8),
        "vocab, 64 tiles": partial(tiled, axis="vocab", num_tiles=64),
    }.items():
        gradients = jax.value_and_grad(loss, argnums=(0, 1))
        yield Program(f"loss and gradients, {name}", gradients, (x, head, ids), flops=flops, tokens=N)
    yield Program("the loss's three products alone", products, (x, head, ids), flops=flops, tokens=N)
    yield Program("loss alone, auto", tiled, (x, head, ids))

    def policy(x_ND: Any, head_VD: Any, ids_N: Any, advantages_N: Any) -> Any:
        return llamem.tiled_token_loss(lambda logp, _, advantage: -advantage * logp, x_ND, head_VD, ids_N, advantages_N)

    shapes = (x, head, ids, shape(N, dtype=jnp.float32))
    yield Program("policy's loss and gradients", jax.value_and_grad(policy, argnums=(0, 1)), shapes)


def stacks(N: int, D: int, L: int) -> Iterator[Program]:
    def layer(w: Any, x_ND: Any) -> Any:
        return x_ND + jnp.tanh(x_ND @ w["up"]) @ w["down"]

    weights = {"up": shape(L, D, 4 * D), "down": shape(L, 4 * D, D)}
    for mode, remat in itertools.product(("scan", "unroll", "nested"), (None, "nothing")):

        def loss(w: Any, x_ND: Any, mode: Any = mode, remat: Any = remat) -> Any:
            out_ND = llamem.apply_stack(layer, w, x_ND, mode=mode, remat=remat)
            return jnp.mean(out_ND.astype(jnp.float32) ** 2)

        yield Program(f"stack, {mode}, remat={remat}", jax.value_and_grad(loss), (weights, shape(N, D)))


def attentions(T: int, H: int, h: int) -> Iterator[Program]:
    for how in ("xla", "tiled"):

        def loss(q: Any, k: Any, v: Any, how: Any = how) -> Any:
            return jnp.sum(causal_attention(q, k, v, implementation=how).astype(jnp.float32) ** 2)

        qkv = (shape(1, T, H, h), shape(1, T, H // 4, h), shape(1, T, H // 4, h))
        yield Program(f"attention and gradients, {how}", jax.grad(loss, argnums=(0, 1, 2)), qkv)


def steps(config: llamem.LlamaConfig, seq_len: int) -> Iterator[Program]:
    plans = {
        "neither": llamem.Plan(remat=None, loss_tiles=None),
        "tiling": llamem.Plan(remat=None),
        "remat": llamem.Plan(loss_tiles=None),
        "both": llamem.Plan(),
    }
    settings = llamem.TrainSettings(batch_size=1, seq_len=seq_len)
    flops = 3.0 * seq_len * config.flops_per_token(seq_len)
    for name, plan in plans.items():
        step, state, batch = llamem.abstract_step(config, settings, plan)
        yield Program(f"training step, {name}", step, (state, batch), (0,), flops, seq_len)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, settings, plans["both"])))
    _, state, batch = llamem.abstract_step(config, settings)
    yield Program("gradients, both", jax.value_and_grad(partial(loss_fn, graphdef)), (state.params, *batch))


def programs(small: bool) -> dict[str, Program]:
    if small:
        config = llamem.LlamaConfig.from_name("tiny", vocab_size=32_000)
        loss_NDV, stack_NDL, attention_THh, T = (512, 64, 32_000), (512, 128, 6), (1024, 8, 16), 256
    else:
        config = llamem.LlamaConfig.from_name("llama3.2-1b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
        loss_NDV, stack_NDL, attention_THh, T = (4096, 4096, 128_256), (8192, 2048, 16), (8192, 32, 64), 8192
    found = [*losses(*loss_NDV), *stacks(*stack_NDL), *attentions(*attention_THh), *steps(config, T)]
    return {program.name: program for program in found}
