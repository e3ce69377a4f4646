"""One adapter added into the weights: a plain model, which computes what the adapted one did."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamem.llama.lora import IN_LAYERS, Adapters, check_adapters
from llamem.llama.model import Llama

_PARAMETERS = {"q": "wq", "k": "wk", "v": "wv", "o": "wo", "gate": "w_gate", "up": "w_up", "down": "w_down"}


def merge_adapter(model: Llama, adapters: Adapters, i: int) -> Llama:
    """A new model whose weights are `W + scale A' B` of adapter `i`, rounded to the weights' type once.

    Where the embedding and the head are tied and one of them is adapted, the result's head is untied: they are two
    matrices then. Raises ValueError for an adapter that is not there, and for adapters of another model.
    """
    if not isinstance(model, Llama):
        raise TypeError(f"merge_adapter({type(model).__name__}, ...): expected a llamem.Llama.")
    one = adapters.select([i])
    check_adapters(one, None, 1, model.config)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params["blocks"] = dict(params["blocks"])
    if model.config.tied_head and {"embedding", "head"} & set(one.a):
        params["untied_head"] = params["embedding"]
    for target in one.a:
        a, b, scale = one.a[target], one.b[target], one.scale[target]
        if target in IN_LAYERS:
            name = _PARAMETERS[target]
            product_LIO = jnp.einsum("LrI,LrO,L->LIO", a[:, 0], b[:, 0], scale[:, 0])
            params["blocks"][name] = _sum(params["blocks"][name], product_LIO)
        elif target == "embedding":
            params["embedding"] = _sum(params["embedding"], jnp.einsum("rV,rD->VD", a[0], b[0]) * scale[0])
        else:
            params["untied_head"] = _sum(params["untied_head"], jnp.einsum("rD,rV->VD", a[0], b[0]) * scale[0])
    config = model.config.replace(tied_head="untied_head" not in params)
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), plan=model.plan))
    graphdef, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


@jax.jit
def _sum(w: Any, product: Any) -> Any:
    wide = w.astype(jnp.promote_types(w.dtype, product.dtype))
    return (wide + product.reshape(w.shape)).astype(w.dtype)
