"""What stands around the code of notebook 08: an optimizer's update as a program, and a small model's gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamem import LlamaConfig, Plan, TrainSettings
from llamem.train import make_model


def adam(weight: Any, moments: Any, gradient: Any) -> tuple[Any, Any]:
    """Return a matrix after one update, and its two moments, stacked `[2, ...]`."""
    mean = 0.9 * moments[0] + 0.1 * gradient
    square = 0.99 * moments[1] + 0.01 * gradient**2
    return weight - 1e-4 * mean / (jnp.sqrt(square) + 1e-8), jnp.stack([mean, square])


def moment_programs(update: Callable[..., Any], L: int, D: int, F: int) -> dict[str, tuple[Any, ...]]:
    """Return two programs that update `L` matrices `[D, F]`, by where the moments are: a function and its shapes.

    On the host, `update` is the body of a scan over the layers: it takes all moments, and a layer's number, matrix and
    gradient; it returns all moments and the new matrix. The moments of `[L, 2, D, F]` are a program's second argument.
    """

    def layer_by_layer(weights: Any, moments: Any, gradients: Any) -> tuple[Any, Any]:
        moments = jax.device_put(moments, jax.memory.Space.Host)  # they are there; this says so to the program
        moments, weights = jax.lax.scan(update, moments, (jnp.arange(L), weights, gradients))
        return weights, moments

    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    weights = jax.ShapeDtypeStruct((L, D, F), jnp.bfloat16)
    on_chip = jax.ShapeDtypeStruct((L, 2, D, F), jnp.bfloat16)
    on_host = jax.ShapeDtypeStruct((L, 2, D, F), jnp.bfloat16, sharding=there)
    return {
        "on the chip": (jax.vmap(adam), weights, on_chip, weights),
        "on the host": (layer_by_layer, weights, on_host, weights),
    }


def small_gradients(plan: Plan) -> list[Any]:
    """Return the gradients of a model of two layers, computed here by a plan: of the squares of what it puts out."""
    config = LlamaConfig.from_name("tiny", vocab_size=512, n_layers=2)
    model = make_model(config, TrainSettings(batch_size=1, seq_len=128), plan)
    structure, params = nnx.split(model)
    tokens_BT = jax.random.randint(jax.random.key(0), (1, 128), 0, 512)

    def total(params: Any) -> Any:
        return jnp.sum(nnx.merge(structure, params).hidden(tokens_BT) ** 2)

    return jax.tree.leaves(jax.jit(jax.grad(total))(params))
