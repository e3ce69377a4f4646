"""What stands around the adapter of notebook 09: what a model asks of a matrix that has one, and where it goes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamem.llama import Llama


class Trained(nnx.Variable):
    """Numbers of an adapter: all that learns."""


class BesideFrozen(nnx.Module):
    """A frozen matrix `base` and two thin ones, `down` and `up`, in its place. A subclass has `linear`."""

    is_trained = False  # the matrix wants no gradient

    def __init__(self, base: Any, down: Any, up: Any):
        self.base, self.down, self.up = base, Trained(down), Trained(up)

    def ready(self, dtype: Any) -> "BesideFrozen":
        """Return all three in the type that the layer computes with, the base out of its blocks."""
        down, up = (part[...].astype(dtype) for part in (self.down, self.up))
        return type(self)(self.base.ready(dtype), down, up)

    def total(self, out: Any) -> Any:
        """Return what `linear` returned: on one device nothing is left to add up."""
        return out


def with_new_adapter(model: Llama, kind: type[BesideFrozen], rank: int, seed: int) -> Llama:
    """Return a copy of a model, with an adapter on the feed-forward's matrices: `down` is random and `up` zero."""
    model = nnx.merge(*nnx.split(model))
    D, F, n_layers = model.config.d_model, model.config.d_ff, model.config.n_layers
    for number, (name, n_in, n_out) in enumerate((("w_gate", D, F), ("w_up", D, F), ("w_down", F, D))):
        down = jax.random.normal(jax.random.key(seed + number), (n_layers, n_in, rank)) / n_in**0.5
        setattr(model.blocks, name, kind(getattr(model.blocks, name), down, jnp.zeros((n_layers, rank, n_out))))
    return model
