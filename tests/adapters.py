"""Adapters that several tests share, and what they must compute: by plain models, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import reference
from flax import nnx

from llamem import Adapters, LoraConfig
from llamem.adapters import IN_LAYERS, TARGET_MODULES

PARAMETERS = {"q": "wq", "k": "wk", "v": "wv", "o": "wo", "gate": "w_gate", "up": "w_up", "down": "w_down"}
MIXED = LoraConfig(ranks=(3, 5, 1), alphas=(6, 2.5, 4), target_modules=TARGET_MODULES)
IDS = np.array([2, 0, 2, 1])


def adapters_of(config, lora=MIXED, seed=3, size=0.3):
    """With both matrices random within each adapter's rank, and zero beyond it."""
    made = Adapters.create(config, lora, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)

    def stirred(target, array):
        rank = np.asarray(made.rank[target])
        within = np.arange(array.shape[-2])[:, None] < rank.reshape(*rank.shape, *(1,) * (array.ndim - rank.ndim))
        return jnp.asarray(within * size * rng.standard_normal(array.shape), jnp.float32)

    weights = {name: {t: stirred(t, x) for t, x in part.items()} for name, part in made.weights.items()}
    return made.with_weights(weights)


def put_together(params, adapters, i):
    """A plain model's parameters, its head apart from the embedding, with adapter i added to the weights."""
    params = {**params, "blocks": dict(params["blocks"])}
    params.setdefault("untied_head", params["embedding"])
    for target, a in adapters.a.items():
        b, scale = adapters.b[target], adapters.scale[target]
        if target in IN_LAYERS:
            added = jnp.stack([a[layer, i].mT @ b[layer, i] * scale[layer, i] for layer in range(len(a))])
            name = PARAMETERS[target]
            params["blocks"][name] = params["blocks"][name] + added.reshape(params["blocks"][name].shape)
        else:
            params["untied_head"] = params["untied_head"] + (a[i].T @ b[i] * scale[i]).T
    return params


def wide(tree):
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)), tree
    )


def expected_gradients(config, model, adapters, tokens, ids):
    """Each adapter's mean loss, summed, and its gradients for A and B, in float64, from plain models."""
    untied = config.replace(tied_head=False)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def loss(weights, params, adapters):
        adapters = adapters.with_weights(weights)
        each = []
        for i in range(adapters.count):
            mine = tokens[np.asarray(ids) == i]
            if len(mine):
                whole = put_together(params, adapters, i)
                each.append(reference.loss(untied, whole, mine[:, :-1], mine[:, 1:]))
        return sum(each), jnp.stack(each)

    with reference.float64():
        params, adapters = wide(params), wide(dataclasses.replace(adapters))
        (_, losses), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(adapters.weights, params, adapters)
        return np.asarray(losses), jax.tree.map(np.asarray, grads)
