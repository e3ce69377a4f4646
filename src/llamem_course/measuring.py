"""A model's layers by their shapes, which notebook 02 weighs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan


def abstract_layers(config: LlamaConfig, plan: Plan, tokens: int) -> tuple[Callable[..., Any], Any, Any]:
    """Return the layers of a model as a function of its parameters and tokens, and the shapes of both.

    The function returns what the last layer does, after its norm. One sequence; nothing is computed.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), plan=plan)))

    def layers(params: Any, tokens_BT: Any) -> Any:
        return nnx.merge(graphdef, params).hidden(tokens_BT)

    return layers, params, jax.ShapeDtypeStruct((1, tokens), jnp.int32)
