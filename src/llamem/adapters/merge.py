"""One adapter added into the weights: a plain model, which computes what the adapted one did."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamem.adapters.lora import Adapters, check_adapters
from llamem.adapters.weights import IN_LAYERS, PARAMETERS
from llamem.llama.model import Llama
from llamem.quantized.model import is_quantized


def merge_adapter(model: Llama, adapters: Adapters, i: int) -> Llama:
    """Return a new model with weights `W + scale A' B` of adapter `i`, rounded to the weights' type once.

    An adapted head that was tied to the embedding is untied: they are two matrices then. Raises ValueError for an
    adapter that is not there, and for adapters of another model.
    """
    if is_quantized(model):
        raise ValueError(
            "merge_adapter adds to numbers, and this model's matrices are in blocks of four or eight bits: pass "
            "llamem.llama.dequantize(model)."
        )
    one = adapters.select([i])
    check_adapters(one, None, model.config)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params["blocks"] = dict(params["blocks"])
    for target in one.a:
        a, b, scale = one.a[target], one.b[target], one.scale[target]
        if target in IN_LAYERS:
            blocks, name = params["blocks"], PARAMETERS[target]
            blocks[name] = _sum_by_layer(blocks[name], a[:, 0], b[:, 0], scale[:, 0])
        else:
            params["untied_head"] = _sum(model.head, b[0], a[0], scale[0])  # stored as [out, in]
    config = model.config.replace(tied_head="untied_head" not in params)
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), plan=model.plan))
    graphdef, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


@jax.jit
def _sum(w: Any, a_rI: Any, b_rO: Any, scale: Any) -> Any:
    product_IO = scale * jnp.einsum("rI,rO->IO", a_rI, b_rO)
    return (w.astype(jnp.promote_types(w.dtype, product_IO.dtype)) + product_IO.reshape(w.shape)).astype(w.dtype)


@jax.jit
def _sum_by_layer(*stacked: Any) -> Any:
    return jax.lax.map(lambda layer: _sum(*layer), stacked)  # one layer's product alive at a time
