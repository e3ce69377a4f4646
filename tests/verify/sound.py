"""Correct programs in many styles of writing JAX: none of them may raise an alarm."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from programs import (
    BATCH,
    KEYS,
    LINEN,
    NOISY,
    NOISY_CASE,
    POLICIES,
    SOUND,
    WEIGHTS,
    D,
    L,
    N,
    Program,
    X,
    by_policy,
    dropout,
    half,
    in_mode,
    layer,
    linen_transforms,
    normal,
    scanned,
    sound,
    split,
    stack,
    stacked,
    standardised,
    with_dropout,
)

import llamem
from jaxmem import Title
from llamem import Policy

FRESH = {"skip": {Title.RANDOMNESS}}
SAVE_H = Policy(save=("h",))
SOUND |= {
    "scan": Program(in_mode("scan"), WEIGHTS, X),
    "nested": Program(in_mode("nested"), WEIGHTS, X),
    "nested, names": Program(in_mode("nested"), WEIGHTS, X, how=SAVE_H),
    "names": Program(in_mode("scan"), WEIGHTS, X, how=SAVE_H),
    "products": Program(in_mode("scan"), WEIGHTS, X, how="dots_saveable"),
    "bfloat16": Program(in_mode("scan"), half(WEIGHTS), half(X)),
    "plain jax, no barrier in the scan": Program(by_policy(None, prevent_cse=False), WEIGHTS, X),
    "plain jax, named": Program(by_policy(POLICIES.save_only_these_names("h")), WEIGHTS, X),
    "dropout": Program(with_dropout, WEIGHTS, BATCH),
    "rbg keys": Program(with_dropout, WEIGHTS, {"x": X, "key": jax.random.key(3, impl="rbg")}),
    "raw keys": Program(with_dropout, WEIGHTS, {"x": X, "key": jax.random.PRNGKey(3)}),
    "linen's transforms": Program(linen_transforms(True), LINEN, BATCH),
}

# Transforms around and inside.


@sound()
def no_barrier_in_a_scan_unrolled_by_two(w, x, how):
    return scanned(jax.checkpoint(layer, prevent_cse=False) if how else layer, w, x, unroll=2)


@sound()
def keywords_integers_jit(w, x, how):
    @jax.jit
    def body(w, x, *, scale, places):
        return layer(w, x) * scale + 0 * places[:, None]

    return stacked(lambda w, x: body(w, x, scale=0.9, places=jnp.arange(N)), w, x, how)


@sound()
def a_static_flag(w, x, how):
    def body(w, x, train):
        return layer(w, x) if train else x

    call = jax.checkpoint(body, static_argnums=2) if how else body
    return scanned(lambda w, x: call(w, x, True), w, x)


@sound()
def branches(w, x, how):
    def body(w, x, i):
        return jax.lax.cond(i % 2 == 0, layer, lambda w, x: layer(w, -x), w, x)

    return stacked(body, w, x, how, jnp.arange(L))


@sound(jax.tree.map(lambda a: jnp.stack([a, 0.9 * a]), WEIGHTS), BATCH)
def ensemble(w, batch, how):
    def one(w, key):
        return with_dropout(w, {"x": batch["x"], "key": key}, how)

    return jnp.mean(jax.vmap(one)(w, jax.random.split(batch["key"], 2)))


@functools.partial(jax.jit, donate_argnums=0)
def donating(w: Any, x: Any) -> Any:
    return stacked(layer, w, x, True)


@sound()
def donated_buffers(w, x, how):
    return donating(w, x) if how else stacked(layer, w, x, False)


@jax.custom_vjp
def smooth(x: Any) -> Any:
    return jnp.tanh(x)


def _smooth_forward(x: Any) -> Any:
    y = checkpoint_name(jnp.tanh(x), "res")
    return y, y


smooth.defvjp(_smooth_forward, lambda y, g: (g * (1 - y**2),))


@sound(how=Policy(save=("res",)))
def a_name_in_a_custom_rule(w, x, how):
    return stacked(lambda w, x: x + jnp.sin(smooth(x @ w["up"])) @ w["down"], w, x, how)


@sound({"encoder": WEIGHTS, "decoder": half(WEIGHTS)})
def encoder_and_decoder(w, x, how):
    """One policy for both, whose names are given by one or the other."""

    def named(name, w, x):
        return x + jnp.sin(jnp.tanh(checkpoint_name(x @ w["up"], name))) @ w["down"]

    policy = POLICIES.save_only_these_names("encoded", "decoded")
    for name in ("encoder", "decoder"):
        body = functools.partial(named, f"{name[:-1]}d")
        body = jax.checkpoint(body, policy=policy) if how else body
        x = jax.lax.scan(lambda x, w, body=body: (body(w, x), None), x, w[name])[0]
    return jnp.mean(x**2)


# Layers of other kinds.


@sound({name: normal(i, L, D, D) for i, name in enumerate(("q", "k", "v", "o"))} | {"k_bias": normal(4, L, D)})
def a_bias_of_the_keys(w, images, how):
    """It shifts all scores of a query alike, so that its true gradient is 0: rounding is all there is."""

    def block(w, x):
        h = standardised(x)
        q, k, v = h @ w["q"], h @ w["k"] + w["k_bias"], h @ w["v"]
        return x + (jax.nn.softmax(q @ k.swapaxes(1, 2) / D**0.5) @ v) @ w["o"]

    return jnp.mean(stack(block, w, images.reshape(8, 64, D), how) ** 4)


@sound({"kernel": normal(0, L, 3, 3, 16, 16) / 3, "bias": normal(1, L, 16), "scale": jnp.ones((L, 16))})
def convolutions_with_batch_normalisation(w, images, how):
    def block(w, x):
        h = jax.lax.conv_general_dilated(x, w["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        h = h + w["bias"]  # which the normalisation takes away again
        h = (h - h.mean((0, 1, 2))) * jax.lax.rsqrt(h.var((0, 1, 2)) + 1e-5) * w["scale"]
        return x + jax.nn.relu(h)

    return jnp.mean(stack(block, w, images.reshape(4, 16, 16, 16), how) ** 4)


@sound({"a": normal(5, L, D), "b": normal(6, L, D)})
def the_larger_of_two_products(w, x, how):
    return stacked(lambda w, x: x + jnp.maximum(x * w["a"], x * w["b"]), w, x, how)


@sound({"gate": jnp.tile(jnp.eye(D), (L, 1, 1)), "in": jnp.tile(jnp.eye(D), (L, 1, 1))})
def a_state_space_from_identities(w, x, how):
    def join(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    def body(w, x):
        return x + jax.lax.associative_scan(join, (jax.nn.sigmoid(x @ w["gate"]), jnp.tanh(x @ w["in"])))[1]

    return stacked(body, w, x.reshape(4, N // 4, D), how)


@sound(half({**WEIGHTS, "router": normal(4, L, D, 4)}), {"x": half(X), "key": KEYS[7]})
def a_jittered_router(w, batch, how):
    def body(w, x, key):
        scores = x @ w["router"] * (1 + jax.random.uniform(key, (len(x), 4), x.dtype, -0.01, 0.01))
        gates, chosen = jax.lax.top_k(jax.nn.softmax(scores), 1)
        share = jnp.sum(jax.nn.one_hot(chosen, 4, dtype=x.dtype) * gates[..., None], axis=1)
        return layer(w, x) * (1 + share @ jnp.arange(4, dtype=x.dtype)[:, None])

    return jnp.mean(stack(body, w, batch["x"], how, split(batch["key"])).astype(jnp.float32) ** 2)


@sound({"patch": normal(0, 48, 48, D), "back": normal(1, 48 * 48, D)})
def patches_over_time(w, x, how):
    """Most of what is kept is a weight with two equal axes, as patches of images have: no array with a row a turn."""

    def look(x, _):
        patch = w["patch"].reshape(-1, D).T
        return x + 0.1 * jnp.tanh(jnp.tanh(x @ patch)) @ w["back"], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(look) if how else look, x, None, length=4)[0] ** 2)


# Losses and parameters of other kinds.


@sound({"frozen": WEIGHTS, "lora": {"a": normal(5, L, D, 2), "b": normal(6, L, 2, 4 * D)}})
def adapters(w, x, how):
    def adapted(p, x, lora):
        return layer({**p, "up": p["up"] + lora["a"] @ lora["b"]}, x)

    return stacked(adapted, w["frozen"], x, how, w["lora"])


@sound({"online": WEIGHTS, "target": jax.tree.map(jnp.copy, WEIGHTS)})
def a_target_network(w, x, how):
    """Self-distillation: the target starts as a copy, and is not trained."""
    target = stack(layer, w["target"], x[::-1], False)
    return jnp.mean((stack(layer, w["online"], x, how) - jax.lax.stop_gradient(target)) ** 2)


@sound({"layers": half(WEIGHTS), "head": half(normal(1, D, 300))}, half(X))
def a_tiled_head(w, x, how):
    hidden = stack(layer, w["layers"], x, how)

    def tile(h):
        return jnp.sum(jax.nn.logsumexp(h @ w["head"], axis=-1))

    return jnp.sum(jax.lax.map(jax.checkpoint(tile) if how else tile, hidden.reshape(8, N // 8, D))) / N


@sound({"layers": WEIGHTS, "scale": 0.5, "head": normal(0, D, 7)})
def a_number_and_a_head_not_used(w, x, how):
    return w["scale"] * stacked(layer, w["layers"], x, how)


@sound()
def mixed_precision(w, x, how):
    """Weights in float32, products in bfloat16."""
    return jnp.mean(stack(lambda w, x: layer(half(w), x), w, half(x), how).astype(jnp.float32) ** 2)


@sound(*jax.tree.map(lambda a: a.astype(jnp.float16), (WEIGHTS, X)))
def a_scaled_loss_in_float16(w, x, how):
    return 1024.0 * jnp.mean(stack(layer, w, x, how).astype(jnp.float32) ** 2)


# Random numbers.


@sound(**FRESH)
def a_fixed_random_projection(w, x, how):
    features = jax.random.normal(jax.random.key(3), (D, D)) / D**0.5
    return stacked(layer, w, jnp.cos(x @ features), how)


CLOSED_OVER = jax.random.key(11)


@sound(batch={"x": X, "step": jnp.int32(4)})
def a_key_closed_over_and_the_step(w, batch, how):
    return stacked(dropout, w, batch["x"], how, split(jax.random.fold_in(CLOSED_OVER, batch["step"])))


@sound(batch={**BATCH, "step": jnp.int32(13)})
def a_remainder_folded_into_the_steps_key(w, batch, how):
    return stacked(dropout, w, batch["x"], how, split(jax.random.fold_in(batch["key"], batch["step"] % 8)))


@sound(llamem.unstack_layers(WEIGHTS), BATCH)
def folded_with_the_number(w, batch, how):
    """Weights are a list of dicts, stacked on the way in."""
    keys = jax.vmap(functools.partial(jax.random.fold_in, batch["key"]))(jnp.arange(L))
    return stacked(dropout, llamem.stack_layers(w), batch["x"], how, keys)


@sound(batch=BATCH)
def two_dropouts_and_dropped_layers(w, batch, how):
    def body(w, x, inputs):
        key, rate = inputs
        first, second, third = jax.random.split(key, 3)
        y = layer(w, x * jax.random.bernoulli(first, 0.9, x.shape)) * jax.random.bernoulli(second, 0.9, x.shape)
        return jnp.where(jax.random.bernoulli(third, rate), y - x, 0.0) / rate + x

    return stacked(body, w, batch["x"], how, (split(batch["key"]), jnp.linspace(1.0, 0.5, L)))


@sound(batch=BATCH)
def diffusion(w, batch, how):
    """Times and noise are drawn, and every layer sees the time."""
    times_key, noise_key = jax.random.split(batch["key"])
    times, noise = jax.random.uniform(times_key, (N, 1)), jax.random.normal(noise_key, (N, D))
    noisy = jnp.cos(times) * batch["x"] + jnp.sin(times) * noise
    return jnp.mean((stack(lambda w, x: layer(w, x + jnp.sin(times)), w, noisy, how) - noise) ** 2)


@sound(batch=BATCH)
def a_variational_autoencoder(w, batch, how):
    encoded = stack(layer, w, batch["x"], how)
    sample = encoded + jnp.exp(encoded / 4) * jax.random.normal(batch["key"], encoded.shape)
    return jnp.mean((stack(layer, w, sample, how) - batch["x"]) ** 2) / 1e3, {"rate": jnp.mean(encoded**2)}


@sound(batch=BATCH)
def accumulated_microbatches(w, batch, how):
    def part(total, inputs):
        x, key = inputs
        return total + with_dropout(w, {"x": x, "key": key}, how), None

    parts = batch["x"].reshape(2, N // 2, D), jax.random.split(batch["key"], 2)
    return jax.lax.scan(jax.checkpoint(part) if how else part, 0.0, parts)[0]


# Modules of flax.


def through(layers: Any, x: Any, how: Any) -> Any:
    """nnx's own scan of its own checkpoint."""

    def body(layer, x):
        return layer(x)

    x = nnx.scan(nnx.remat(body) if how else body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x)
    return jnp.mean(x**2)


@sound(*NOISY_CASE)
def transforms_of_nnx(w, batch, how):
    """What the layers changed is returned, the counts of draws among it."""
    layers = nnx.merge(NOISY, w, batch["state"])
    return through(layers, batch["x"], how), nnx.state(layers, nnx.Not(nnx.Param))


# Layers that begin as the identity have no gradient yet, and frozen weights never will.


@sound({**WEIGHTS, "gate": jnp.zeros((L, 4 * D))})
def gates_of_zeros(w, x, how):
    return stacked(lambda w, x: x + w["gate"] * jnp.sin(jnp.tanh(x @ w["up"])) @ w["down"], w, x, how)


@sound({"base": WEIGHTS, "a": normal(6, L, D, 2), "b": jnp.zeros((L, 2, 4 * D))})
def adapters_of_a_frozen_base(w, x, how):
    def body(w, x):
        return layer(w["base"] | {"up": w["base"]["up"] + w["a"] @ w["b"]}, x)

    return stacked(body, w | {"base": jax.lax.stop_gradient(w["base"])}, x, how)
