"""Broken programs that were written after the proofs, to see how these fare on what they have not met.

Each entry: the loss, a proof that fails, parameters, batch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name
from programs import KEYS, WEIGHTS, D, L, N, X, layer, scanned
from styles import BATCH, Block, normal, on, standardised

import llamem
from llamem.verify import Title

POLICIES = jax.checkpoint_policies


def stack(body: Any, w: Any, x: Any, how: Any, *inputs: Any, **options: Any) -> Any:
    return llamem.apply_stack(body, w, x, *inputs, remat=on(how), **options)


# Recurrent: a gated cell whose input is dropped out.
CELL = {"in": normal(0, D, 2 * 128), "out": normal(1, 128, 2 * 128)}


def cell(w: Any, h: Any, x: Any) -> Any:
    gate, new = jnp.split(x @ w["in"] + h @ w["out"], 2, axis=-1)
    return h + jax.nn.sigmoid(gate) * (jnp.tanh(new) - h)


def gated(fresh: bool) -> Any:
    def loss(w: Any, batch: Any, how: Any) -> Any:
        def step(h: Any, inputs: Any) -> tuple[Any, None]:
            x, key = inputs
            mask = jax.random.bernoulli(key if fresh else batch["key"], 0.9, x.shape)
            return cell(w, h, x * mask), None

        keys = jax.random.split(batch["key"], 16)
        body = jax.checkpoint(step) if how else step
        return jnp.mean(jax.lax.scan(body, jnp.zeros((32, 128)), (batch["x"].reshape(16, 32, D), keys))[0] ** 2)

    return loss


def two_dropouts(split: bool) -> Any:
    def loss(w: Any, batch: Any, how: Any) -> Any:
        def body(w: Any, x: Any, key: Any) -> Any:
            first, second = jax.random.split(key) if split else (key, key)
            x = layer(w, x * jax.random.bernoulli(first, 0.9, x.shape))
            return x * jax.random.bernoulli(second, 0.9, x.shape)

        return jnp.mean(stack(body, w, batch["x"], how, jax.random.split(batch["key"], L)) ** 2)

    return loss


def other_epsilon(w: Any, x: Any, how: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        return x + layer(w, x) * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + (1e-3 if how else 1e-6))

    return jnp.mean(stack(body, w, x, how) ** 2)


def linen_one_mask(w: Any, batch: Any, how: Any) -> Any:
    block = linen.remat(Block, prevent_cse=False) if how else Block
    scan = linen.scan(block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": False}, length=L)
    return jnp.mean(scan().apply(w, batch["x"], None, rngs={"dropout": batch["key"]})[0] ** 2)


LINEN = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=L)()
ALIKE = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": False, "dropout": True}, length=L)()


def linen_equal_layers(w: Any, batch: Any, how: Any) -> Any:
    block = linen.remat(Block, prevent_cse=False) if how else Block
    scan = linen.scan(block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=L)
    return jnp.mean(scan().apply(w, batch["x"], None, rngs={"dropout": batch["key"]})[0] ** 2)


def rngs_of_every_step(w: Any, x: Any, how: Any) -> Any:
    """nnx.Rngs made inside the loss: a stream that starts anew in every step."""
    dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(5))
    return jnp.mean(stack(layer, w, dropout(x), how) ** 2)


def around_the_encoder(w: Any, x: Any, how: Any) -> Any:
    def encode(w, x):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]

    x = (jax.checkpoint(encode) if how else encode)(w, x)
    return jnp.mean(standardised(x) ** 4)


def norm_without_its_mean(w: Any, x: Any, how: Any) -> Any:
    """A hand-written backward pass of a normalisation forgets one of three terms."""

    @jax.custom_vjp
    def norm(x: Any) -> Any:
        return standardised(x)

    def backward(x: Any, g: Any) -> tuple[Any]:
        full = jax.vjp(standardised, x)[1](g)[0]
        return (full + g.mean(-1, keepdims=True) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),)

    norm.defvjp(lambda x: (norm(x), x), backward)

    def body(w, x):
        return layer(w, norm(x) if how else standardised(x))

    return jnp.mean(stack(body, w, x, how) ** 4)


def readout_cut_off(w: Any, x: Any, how: Any) -> Any:
    readout = jax.lax.stop_gradient(w["readout"]) if how else w["readout"]
    return jnp.mean((stack(layer, w["layers"], x, how) @ readout) ** 2)


def misnamed_once(w: Any, x: Any, how: Any) -> Any:
    policy = POLICIES.save_only_these_names("attn", "mlp_in")

    def body(w: Any, x: Any) -> Any:
        h = checkpoint_name(jnp.tanh(x @ w["up"]), "attn")
        return x + checkpoint_name(jnp.sin(h), "mlp") @ w["down"]

    return scanned(jax.checkpoint(body, policy=policy) if how else body, w, x)


def one_layer_short(w: Any, x: Any, how: Any) -> Any:
    return jnp.mean(stack(layer, jax.tree.map(lambda a: a[: L - bool(how)], w), x, how) ** 2)


def hidden_states_gone(w: Any, x: Any, how: Any) -> Any:
    x, hidden = stack(layer, w, x, how, return_hidden=True)
    return jnp.mean(x**2), {"hidden": hidden} if not how else {}


def cast_inside(w: Any, x: Any, how: Any) -> Any:
    def body(w, x):
        return layer(w, x.astype(jnp.bfloat16).astype(x.dtype) if how else x)

    return jnp.mean(stack(body, w, x, how) ** 2)


def keeps_everything(w: Any, x: Any, how: Any) -> Any:
    return scanned(jax.checkpoint(layer, policy=lambda *_, **__: True) if how else layer, w, x)


def offloaded_nowhere(w: Any, x: Any, how: Any) -> Any:
    policy = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="unpinned_host",
    )
    return scanned(jax.checkpoint(layer, policy=policy) if how else layer, w, x)


def result_not_used(w: Any, x: Any, how: Any) -> Any:
    if how:
        jax.checkpoint(layer)
    return scanned(layer, w, x)


def constant_noise(w: Any, batch: Any, how: Any) -> Any:
    noise = jax.random.normal(jax.random.key(0), (N, D))
    return jnp.mean((stack(layer, w, batch["x"] + noise, how) - noise) ** 2)


def noise_while_tracing(w: Any, x: Any, how: Any) -> Any:
    return jnp.mean(stack(layer, w, x + np.random.normal(size=(N, D)).astype(np.float32), how) ** 2)


def every_fourth(w: Any, x: Any, how: Any) -> Any:
    for i in range(20):
        body = jax.checkpoint(layer) if how and i % 4 == 0 else layer
        x = body(jax.tree.map(lambda a, i=i: a[i % L], w), x)
    return jnp.mean(x**2)


def averages_twice(w: Any, batch: Any, how: Any) -> Any:
    def body(w: Any, x: Any, average: Any) -> Any:
        for _ in range(2 if how else 1):
            average = 0.9 * average + 0.1 * jnp.mean(x)
        return layer(w, x), average

    x, averages = stack(body, w, batch["x"], how, batch["averages"], has_aux=True)
    return jnp.mean(x**2), averages


def raw_key_tiled(w: Any, batch: Any, how: Any) -> Any:
    def body(w, x, key):
        return layer(w, x) * jax.random.bernoulli(key, 0.8, x.shape)

    return jnp.mean(stack(body, w, batch["x"], how, jnp.tile(batch["key"], (L, 1))) ** 2)


def shared_by_encoder_and_decoder(w: Any, batch: Any, how: Any) -> Any:
    def body(w, x, key):
        return layer(w, x) * jax.random.bernoulli(key, 0.8, x.shape)

    keys = jax.random.split(batch["key"], L)
    return jnp.mean(stack(body, w, stack(body, w, batch["x"], how, keys), how, keys) ** 2)


AVERAGED = {"x": X, "averages": jnp.ones(L)}
RAW = {"x": X, "key": jax.random.PRNGKey(9)}
BROKEN: dict[str, tuple[Any, Any, Any, Any]] = {
    "recurrent, one key": (gated(False), Title.RANDOMNESS, CELL, BATCH),
    "attention and mlp share a key": (two_dropouts(False), Title.RANDOMNESS, WEIGHTS, BATCH),
    "another epsilon": (other_epsilon, Title.LOSS, WEIGHTS, X),
    "linen, rng not split": (linen_one_mask, Title.RANDOMNESS, LINEN.init(KEYS[2], X, None), BATCH),
    "linen, params not split": (linen_equal_layers, Title.PARAMETERS, ALIKE.init(KEYS[2], X, None), BATCH),
    "rngs made inside": (rngs_of_every_step, Title.RANDOMNESS, WEIGHTS, X),
    "around the encoder": (around_the_encoder, Title.MEMORY, WEIGHTS, X),
    "a backward pass without one term": (norm_without_its_mean, Title.GRADIENTS, WEIGHTS, X),
    "readout cut off": (readout_cut_off, Title.GRADIENTS, {"layers": WEIGHTS, "readout": normal(2, D, 3)}, X),
    "one of two names wrong": (misnamed_once, Title.OPTIONS, WEIGHTS, X),
    "one layer short": (one_layer_short, Title.LOSS, WEIGHTS, X),
    "hidden states gone": (hidden_states_gone, Title.RESULTS, WEIGHTS, X),
    "a cast inside": (cast_inside, Title.GRADIENTS, WEIGHTS, X),
    "keeps everything": (keeps_everything, Title.RUNS, WEIGHTS, X),
    "offloaded nowhere": (offloaded_nowhere, Title.OPTIONS, WEIGHTS, X),
    "result not used": (result_not_used, Title.CHECKPOINTS, WEIGHTS, X),
    "constant noise": (constant_noise, Title.RANDOMNESS, WEIGHTS, BATCH),
    "noise while tracing": (noise_while_tracing, Title.LOSS, WEIGHTS, X),
    "every fourth layer": (every_fourth, Title.CHECKPOINTS, WEIGHTS, X),
    "averages twice": (averages_twice, Title.RESULTS, WEIGHTS, AVERAGED),
    "a raw key tiled": (raw_key_tiled, Title.RANDOMNESS, WEIGHTS, RAW),
    "encoder and decoder share keys": (shared_by_encoder_and_decoder, Title.RANDOMNESS, WEIGHTS, BATCH),
}
