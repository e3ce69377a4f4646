"""The four programs that notebook 10 shows for diagnosis: on paper each rematerialises its layers, one of them does.

`layer`, `scanned` and `dropped` are the notebook's own; the others stand in its exercise 2, line by line.
"""
# ruff: noqa: D103  (what a function does is what the reader shall find out)

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name


def layer(w: Any, x: Any) -> Any:
    h = checkpoint_name(x @ w["up"], "h")
    return x + jnp.sin(jnp.tanh(h)) @ w["down"]


def scanned(layer: Callable[[Any, Any], Any], w: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0] ** 2)


def dropped(w: Any, x: Any, key: Any) -> Any:
    return layer(w, x) * jax.random.bernoulli(key, 0.8, x.shape) / 0.8


def ada(w, batch, remat):
    def body(numbered, x):
        w, i = numbered
        return dropped(w, x, jax.random.fold_in(batch["key"], i))

    numbered = w, jnp.arange(len(w["up"]))
    return scanned(jax.checkpoint(body) if remat else body, numbered, batch["x"])


def ben(w, batch, remat):
    keep_h = jax.checkpoint_policies.save_only_these_names("h")
    loss = partial(scanned, layer)
    return (jax.checkpoint(loss, policy=keep_h) if remat else loss)(w, batch["x"])


def cleo(w, batch, remat):
    body = layer
    if remat:
        jax.checkpoint(body)
    return scanned(body, w, batch["x"])


def dan(w, batch, remat):
    def body(w, x):
        return layer(w, x) * np.random.normal(1.0, 0.1)

    return scanned(jax.checkpoint(body) if remat else body, w, batch["x"])


SUSPECTS = (ada, ben, cleo, dan)
