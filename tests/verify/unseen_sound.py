"""Correct programs that were written after the proofs: none may raise an alarm. Entries: loss, parameters, batch."""

from typing import Any

import jax
import jax.numpy as jnp
from programs import KEYS, WEIGHTS, D, L, N, X, half, layer
from styles import BATCH, normal, standardised
from unseen_broken import CELL, gated, stack, two_dropouts


def ensemble(w: Any, batch: Any, how: Any) -> Any:
    def one(w, key):
        return two_dropouts(True)(w, {"x": batch["x"], "key": key}, how)

    return jnp.mean(jax.vmap(one)(w, jax.random.split(batch["key"], 2)))


def contrastive(w: Any, batch: Any, how: Any) -> Any:
    first, second = jax.random.split(batch["key"])
    views = [batch["x"] + 0.1 * jax.random.normal(key, (N, D)) for key in (first, second)]
    a, b = (standardised(stack(layer, w, view, how)) for view in views)
    return jnp.mean(jax.nn.logsumexp(a @ b.T, axis=-1) - jnp.sum(a * b, -1))


def meta_learning(w: Any, x: Any, how: Any) -> Any:
    def inner(w, x):
        return jnp.mean(stack(layer, w, x, how) ** 2)

    adapted = jax.tree.map(lambda p, g: p - 0.01 * g, w, jax.grad(inner)(w, x[: N // 2]))
    return inner(adapted, x[N // 2 :])


def preferences(w: Any, batch: Any, how: Any) -> Any:
    """Direct preference optimisation; the reference model is part of the batch, and equal at first."""
    better, worse = (
        jnp.mean(stack(layer, w, x, how), -1) - jnp.mean(stack(layer, batch["reference"], x, how), -1)
        for x in (batch["x"], batch["x"][::-1])
    )
    return -jnp.mean(jax.nn.log_sigmoid(better - worse))


def physics(w: Any, x: Any, how: Any) -> Any:
    """The loss holds derivatives with respect to the inputs."""
    value, slope = jax.jvp(lambda x: stack(layer, w, x, how), (x,), (jnp.ones_like(x),))
    return jnp.mean((slope + value) ** 2)


def ordinary_differential(w: Any, x: Any, how: Any) -> Any:
    def slope(x: Any) -> Any:
        return jnp.tanh(x @ w["up"]) @ w["down"]

    def step(x: Any, _: None) -> tuple[Any, None]:
        k1 = slope(x)
        k2 = slope(x + 0.05 * k1)
        return x + 0.1 * k2, None

    return jnp.mean(jax.lax.scan(jax.checkpoint(step) if how else step, x, None, length=8)[0] ** 2)


def patches_over_time(w: Any, x: Any, how: Any) -> Any:
    """Most of what is kept is a weight with two equal axes, as patches of images have: no array with a row a turn."""

    def look(x: Any, _: None) -> tuple[Any, None]:
        patch = w["patch"].reshape(-1, D).T
        return x + 0.1 * jnp.tanh(jnp.tanh(x @ patch)) @ w["back"], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(look) if how else look, x, None, length=4)[0] ** 2)


def two_of_four_experts(w: Any, x: Any, how: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), 2)
        share = jnp.sum(jax.nn.one_hot(chosen, 4) * gates[..., None], axis=1)
        return x + jnp.einsum("nef,efd,ne->nd", jnp.tanh(jnp.einsum("nd,edf->nef", x, w["in"])), w["out"], share)

    return jnp.mean(stack(body, w, x, how) ** 2)


def masked_language_model(w: Any, batch: Any, how: Any) -> Any:
    hidden = stack(layer, w["layers"], w["embedding"][batch["tokens"]], how)
    losses = -jax.nn.log_softmax(hidden @ w["embedding"].T)[jnp.arange(N), batch["labels"]]
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


@jax.custom_vjp
def rounded(x: Any) -> Any:
    return jnp.round(16 * x) / 16


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


def quantised(w: Any, x: Any, how: Any) -> Any:
    return jnp.mean(stack(lambda w, x: layer(jax.tree.map(rounded, w), x), w, x, how) ** 2)


def fourier_layers(w: Any, x: Any, how: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        return x + jnp.tanh(jnp.fft.irfft(jnp.fft.rfft(x) * (w["real"] + 1j * w["imaginary"]), n=D))

    return jnp.mean(stack(body, w, x, how) ** 2)


def unused_head(w: Any, x: Any, how: Any) -> Any:
    return jnp.mean(stack(layer, w["layers"], x, how) ** 2)


def scaled_loss(w: Any, x: Any, how: Any) -> Any:
    return 1024.0 * jnp.mean(stack(layer, w, x, how).astype(jnp.float32) ** 2)


def gradient_penalty(w: Any, x: Any, how: Any) -> Any:
    def critic(x):
        return jnp.sum(jnp.tanh(stack(layer, w, x, how)))

    value, slope = jax.value_and_grad(critic)(x)
    return value / N + jnp.mean((jnp.linalg.norm(slope, axis=-1) - 1) ** 2)


EDGES = jax.random.randint(KEYS[6], (2, 4 * N), 0, N)


def message_passing(w: Any, x: Any, how: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        sent = jnp.tanh(x @ w["up"])[EDGES[0]]
        return x + jnp.sin(jax.ops.segment_sum(sent, EDGES[1], N)) @ w["down"] / 4

    return jnp.mean(stack(body, w, x, how) ** 2)


def sampling(w: Any, batch: Any, how: Any) -> Any:
    def body(w: Any, x: Any, key: Any) -> Any:
        action = jax.random.categorical(key, x)
        return layer(w, x) + 0.1 * jax.nn.one_hot(action, D)

    return jnp.mean(stack(body, w, batch["x"], how, jax.random.split(batch["key"], L)) ** 2)


def tiled_head(w: Any, x: Any, how: Any) -> Any:
    hidden = stack(layer, w["layers"], x, how)

    def tile(h):
        return jnp.sum(jax.nn.logsumexp(h @ w["head"], axis=-1))

    return jnp.sum(jax.lax.map(jax.checkpoint(tile) if how else tile, hidden.reshape(8, N // 8, D))) / N


def stochastic_depth(w: Any, batch: Any, how: Any) -> Any:
    def body(w: Any, x: Any, inputs: Any) -> Any:
        key, rate = inputs
        return jnp.where(jax.random.bernoulli(key, rate), layer(w, x) - x, 0.0) / rate + x

    keys = jax.random.split(jax.random.fold_in(batch["key"], 7), L)
    return jnp.mean(stack(body, w, batch["x"], how, (keys, jnp.linspace(1.0, 0.5, L))) ** 2)


def group_normalised(w: Any, images: Any, how: Any) -> Any:
    def body(w: Any, x: Any) -> Any:
        h = jax.lax.conv(x, w["kernel"], (1, 1), "SAME") + w["bias"][:, None, None]
        groups = standardised(h.reshape(4, 4, -1)).reshape(h.shape)
        return x + jax.nn.gelu(groups)

    return jnp.mean(stack(body, w, images.reshape(4, 16, 16, 16), how) ** 4)


def accumulated(w: Any, batch: Any, how: Any) -> Any:
    """Microbatches, each with a key of its own, in a checkpointed scan."""
    keys = jax.random.split(batch["key"], 2)

    def part(total: Any, inputs: Any) -> tuple[Any, None]:
        x, key = inputs
        return total + two_dropouts(True)(w, {"x": x, "key": key}, how), None

    part = jax.checkpoint(part) if how else part
    return jax.lax.scan(part, 0.0, (batch["x"].reshape(2, N // 2, D), keys))[0]


TOKENS = {
    "tokens": jax.random.randint(KEYS[1], (N,), 0, 40),
    "labels": jax.random.randint(KEYS[2], (N,), 0, 50),
    "mask": jax.random.bernoulli(KEYS[3], 0.2, (N,)),
}
MIXTURE = {"router": normal(0, L, D, 4), "in": normal(1, L, 4, D, 64), "out": normal(2, L, 4, 64, D)}
KERNELS = {"kernel": normal(0, L, 16, 16, 3, 3) / 5, "bias": normal(1, L, 16)}
SPECTRA = {"real": normal(0, L, D // 2 + 1), "imaginary": normal(1, L, D // 2 + 1)}
F16 = jax.tree.map(lambda a: a.astype(jnp.float16), (WEIGHTS, X))
SOUND: dict[str, tuple[Any, Any, Any]] = {
    "recurrent, keys of each step": (gated(True), CELL, BATCH),
    "two dropouts": (two_dropouts(True), WEIGHTS, BATCH),
    "ensemble": (ensemble, jax.tree.map(lambda a: jnp.stack([a, 0.9 * a]), WEIGHTS), BATCH),
    "contrastive": (contrastive, WEIGHTS, BATCH),
    "meta-learning": (meta_learning, WEIGHTS, X),
    "preferences": (preferences, WEIGHTS, {"x": X, "reference": jax.tree.map(jnp.copy, WEIGHTS)}),
    "physics": (physics, WEIGHTS, X),
    "patches over time": (patches_over_time, {"patch": normal(0, 48, 48, D), "back": normal(1, 48 * 48, D)}, X),
    "ordinary differential equation": (
        ordinary_differential,
        {"up": normal(0, D, 256), "down": normal(1, 256, D)},
        X,
    ),
    "two of four experts": (two_of_four_experts, MIXTURE, X),
    "masked language model": (masked_language_model, {"embedding": normal(0, 50, D), "layers": WEIGHTS}, TOKENS),
    "quantised": (quantised, WEIGHTS, X),
    "fourier layers": (fourier_layers, SPECTRA, jnp.tile(X, (8, 1))),
    "a head not used": (unused_head, {"layers": WEIGHTS, "head": normal(0, D, 7)}, X),
    "float16, scaled": (scaled_loss, *F16),
    "gradient penalty": (gradient_penalty, WEIGHTS, X),
    "message passing": (message_passing, WEIGHTS, X),
    "sampling": (sampling, WEIGHTS, BATCH),
    "tiled head": (tiled_head, {"layers": half(WEIGHTS), "head": half(normal(1, D, 300))}, half(X)),
    "stochastic depth": (stochastic_depth, WEIGHTS, BATCH),
    "group normalisation": (group_normalised, KERNELS, X),
    "accumulated microbatches": (accumulated, WEIGHTS, BATCH),
}
