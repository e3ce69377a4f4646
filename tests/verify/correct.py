"""Correct programs: the stacks of this package, and JAX and flax used directly. None may raise an alarm."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from gallery import STATISTICS_OF, WEIGHTS_OF, normed
from programs import KEYS, WEIGHTS, D, L, N, X, by_policy, half, layer, with_dropout

import llamem
from llamem import Policy


def stack(mode, **options):
    def loss(w, x, remat):
        return jnp.mean(llamem.apply_stack(layer, w, x, mode=mode, remat=remat, **options) ** 2)

    return loss


def with_adapters(w, x, remat):
    def adapted(p, x, lora):
        return layer({**p, "up": p["up"] + lora["a"] @ lora["b"]}, x)

    return jnp.mean(llamem.apply_stack(adapted, w["frozen"], x, w["lora"], remat=remat) ** 2)


ADAPTED = {
    "frozen": WEIGHTS,
    "lora": {"a": jax.random.normal(KEYS[5], (L, D, 2)), "b": jax.random.normal(KEYS[6], (L, 2, 4 * D))},
}


def as_argument(w, x, remat):
    """Keyword and static arguments, an integer input, jit inside."""

    @jax.jit
    def body(w, x, *, scale, places):
        return layer(w, x) * scale + 0 * places[:, None]

    def call(w, x):
        return body(w, x, scale=0.9, places=jnp.arange(N))

    return jnp.mean(llamem.apply_stack(call, w, x, remat=remat) ** 2)


def mapped(w, x, remat):
    def one(x):
        return stack("scan")(w, x, remat)

    return jnp.mean(jax.vmap(one)(jnp.stack([x, 2 * x])))


def of_gradient(w, x, remat):
    slope = jax.grad(lambda x: stack("scan")(w, x, remat))(x)
    return jnp.sum(slope**2)


class OwnLayer(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(D, 4 * D, rngs=rngs)
        self.outer = nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(jnp.sin(jnp.tanh(self.inner(x))))


GRAPH = nnx.graphdef(OwnLayer(nnx.Rngs(0)))
OWN = jax.vmap(lambda key: nnx.state(OwnLayer(nnx.Rngs(key))))(KEYS[:L])


def own_nnx(w, x, remat):
    return jnp.mean(llamem.apply_stack(lambda p, x: nnx.merge(GRAPH, p)(x), w, x, remat=remat) ** 2)


LINEN = linen.Dense(D)


def own_linen(w, x, remat):
    def body(p: Any, x: Any) -> Any:
        h: Any = LINEN.apply(p, x)
        return x + jnp.sin(jnp.tanh(h))

    return jnp.mean(llamem.apply_stack(body, w, x, remat=remat) ** 2)


def static_flag(w, x, remat):
    def body(w, x, train):
        return layer(w, x) if train else x

    call = jax.checkpoint(body, static_argnums=2) if remat else body
    return jnp.mean(jax.lax.scan(lambda x, w: (call(w, x, True), None), x, w)[0] ** 2)


def with_branches(w, x, remat):
    def body(w, x, i):
        return jax.lax.cond(i % 2 == 0, layer, lambda w, x: layer(w, -x), w, x)

    return jnp.mean(llamem.apply_stack(body, w, x, jnp.arange(L), remat=remat) ** 2)


class Noisy(nnx.Module):
    """A layer with all the state that nnx knows: weights, batch statistics, keys and counts of draws."""

    def __init__(self, rngs):
        self.inner = OwnLayer(rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.inner(x)))


NOISY = nnx.graphdef(Noisy(nnx.Rngs(0)))
NOISY_WEIGHTS, NOISY_STATE = nnx.split_state(
    jax.vmap(lambda key: nnx.state(Noisy(nnx.Rngs(key))))(KEYS[:L]), nnx.Param, ...
)


def nnx_transforms(w, batch, remat):
    """nnx.scan of nnx.remat; what the layers changed is returned, the counts of draws among it."""
    state = jax.tree.map(lambda leaf: leaf, batch["state"])  # Variables belong to the trace that made them
    layers = nnx.merge(NOISY, w, state)

    def body(layer, x):
        return layer(x)

    x = nnx.scan(nnx.remat(body) if remat else body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, batch["x"])
    return jnp.mean(x**2), nnx.state(layers, nnx.Not(nnx.Param))


@functools.partial(jax.jit, donate_argnums=0)
def donating(w, x):
    return jnp.mean(llamem.apply_stack(layer, w, x, remat="nothing") ** 2)


def donated(w, x, remat):
    return donating(w, x) if remat else stack("scan")(w, x, None)


CORRECT = {
    **{mode: (stack(mode), WEIGHTS, X, "nothing") for mode in ("scan", "nested")},
    **{f"policy {p}": (stack("scan"), WEIGHTS, X, p) for p in (Policy(save=("h",)), "dots_saveable")},
    "hidden states": (
        lambda w, x, r: jnp.mean(llamem.apply_stack(layer, w, x, remat=r, return_hidden=True)[1] ** 2),
        WEIGHTS,
        X,
        "nothing",
    ),
    "bfloat16": (stack("scan"), half(WEIGHTS), half(X), "nothing"),
    "plain jax": (by_policy(None), WEIGHTS, X, True),
    "plain jax, no barrier in the scan": (by_policy(None, prevent_cse=False), WEIGHTS, X, True),
    "plain jax, named": (
        by_policy(jax.checkpoint_policies.save_only_these_names("h")),
        WEIGHTS,
        X,
        True,
    ),
    "dropout": (with_dropout, WEIGHTS, {"x": X, "key": KEYS[7]}, "nothing"),
    "adapters": (with_adapters, ADAPTED, X, "nothing"),
    "keywords, integers, jit": (as_argument, WEIGHTS, X, "nothing"),
    "vmap": (mapped, WEIGHTS, X, "nothing"),
    "gradient of a gradient": (of_gradient, WEIGHTS, X, "nothing"),
    "own nnx model": (own_nnx, OWN, X, "nothing"),
    "own linen model": (own_linen, jax.vmap(LINEN.init, (0, None))(KEYS[:L], X), X, "nothing"),
    "batch statistics": (normed, WEIGHTS_OF, {"x": X, "statistics": STATISTICS_OF}, True),
    "nnx's own transforms": (nnx_transforms, NOISY_WEIGHTS, {"x": X, "state": NOISY_STATE}, True),
    "donated buffers": (donated, WEIGHTS, X, True),
    "a static flag": (static_flag, WEIGHTS, X, True),
    "branches": (with_branches, WEIGHTS, X, "nothing"),
}
