"""What a step asks of one device of a mesh, inside `shard_map`."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from llamem.llama.model import Llama
from llamem.llama.plan import MeshShape
from llamem.llama.weights import PARAMETERS, parameter_name
from llamem.mesh.step import global_norm, sum_gradients, sum_over
from llamem.mesh.weights import split
from llamem.train.place import OneDevice


@dataclasses.dataclass(frozen=True)
class OnMesh(OneDevice):
    """One device of a mesh: it has its part of weights and tokens."""

    mesh: MeshShape

    def put(self, model: Llama) -> Llama:
        """Return the model of this device's parts."""
        return split(model, self.mesh)

    def sum_sequences(self, x: Array) -> Array:
        """Return the sum over devices with different sequences."""
        return sum_over(x, self.mesh.over("batch"))

    def sum_tokens(self, x: Array) -> Array:
        """Return the sum over devices with different tokens."""
        return sum_over(x, self.mesh.over("batch", "sequence"))

    def sum_gradients(self, grads: Any) -> Any:
        """Return gradients summed over devices with the same part of a weight that read it differently."""
        return sum_gradients(grads, self.mesh)

    def norm(self, grads: Any) -> Float[Array, ""]:
        """Return the norm of all devices' gradients, each element counted once."""
        return global_norm(grads, self.mesh)

    def start_of_part(self, path: tuple[Any, ...], param: Array) -> list[Any]:
        """Return where this device's part of a parameter begins in the whole one, along each axis."""
        names = PARAMETERS[str(parameter_name(path))]
        start: list[Any] = [0] * (param.ndim - len(names))
        for name, size in zip(names, param.shape[len(start) :], strict=True):
            over = self.mesh.over(name) if name else ()
            start.append(jax.lax.axis_index(over) * size if over else 0)
        return start
