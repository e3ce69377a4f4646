"""What checks the plans of notebook 08: a small model's gradients."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamem import LlamaConfig, Plan, TrainSettings
from llamem.train import make_model


def small_gradients(plan: Plan) -> list[Any]:
    """Return the gradients of a model of two layers, computed here by a plan: of the squares of what it puts out."""
    config = LlamaConfig.from_name("tiny", vocab_size=512, n_layers=2)
    model = make_model(config, TrainSettings(batch_size=1, seq_len=128), plan)
    structure, params = nnx.split(model)
    tokens_BT = jax.random.randint(jax.random.key(0), (1, 128), 0, 512)

    def total(params: Any) -> Any:
        return jnp.sum(nnx.merge(structure, params).hidden(tokens_BT) ** 2)

    return jax.tree.leaves(jax.jit(jax.grad(total))(params))
