"""Weights that wait in the host's memory: fetched where a layer needs them, forward and backward."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from llamem.host.memory import host_place, host_sharding, of_matrices, update_by_parts
from llamem.host.streaming import fetch
from llamem.layers.host_memory import is_on_host, to_device
from llamem.llama.model import Llama
from llamem.llama.weights import MATRICES, Matrix, Table
from llamem.quantized.blocks import QuantizedMatrix, RowMatrix
from llamem.train.place import Kind, Place
from llamem.train.plain_step import TrainState


class HostMatrix(Matrix):
    """A matrix on the host."""

    def ready(self, dtype: Any) -> Matrix:
        """Return the matrix on the device, in the type of its products."""
        return Matrix(to_device(self[...]).astype(dtype), n_in=self.n_in)


class HostBlocks(QuantizedMatrix):
    """A matrix in blocks of few bits on the host."""

    def ready(self, dtype: Any) -> RowMatrix:
        """Return the matrix on the device, dequantised there."""
        graphdef, blocks = nnx.split(self)
        return QuantizedMatrix.ready(nnx.merge(graphdef, fetch(blocks)), dtype)


class HostTable(Table):
    """A table on the host."""

    def at_hand(self) -> Float[Array, "V D"]:
        """Return its numbers on the device."""
        return to_device(self[...])

    def ready(self, dtype: Any) -> Table:
        """Return the table on the device, in the type of its products."""
        return Table(self.at_hand().astype(dtype))

    def look_up(self, ids: Int[Array, "*N"], dtype: Any) -> Float[Array, "*N D"]:
        """Return rows in `dtype`; NaN for an id that there is not."""
        return Table(self.at_hand()).look_up(ids, dtype)


def wait_on_host(model: Llama) -> Llama:
    """Put matrices and tables that wait on the host in the place of plain ones; return the model, which is changed."""
    for name in MATRICES:
        matrix = getattr(model.blocks, name)
        if isinstance(matrix, QuantizedMatrix):
            blocks = {
                part: variable[...] for part, variable in vars(matrix).items() if isinstance(variable, nnx.Variable)
            }
            setattr(model.blocks, name, HostBlocks(blocks, matrix.kind, matrix.matrix_shape))
        else:
            setattr(model.blocks, name, HostMatrix(matrix[...], n_in=matrix.n_in))
    return tables_wait_on_host(model)


def tables_wait_on_host(model: Llama) -> Llama:
    """Do so with the tables of the vocabulary alone."""
    for name in ("embedding", "untied_head"):
        if hasattr(model, name):
            setattr(model, name, HostTable(getattr(model, name)[...]))
    return model


@dataclasses.dataclass(frozen=True)
class OnHost(Place):
    """One device, and beside it what the plan leaves on the host."""

    def put(self, model: Llama) -> Llama:
        """Return the model with weights that are fetched where they are used."""
        return wait_on_host(model) if self.plan.weights == "host" else model

    def update(self, rule: Callable[..., Any], grads: Any, moments: Any, params: Any) -> tuple[Any, Any]:
        """Return new parameters and moments, part by part where they wait on the host."""
        if self.plan.moments == "device":
            return rule(grads, moments, params)
        return update_by_parts(rule, self.plan, grads, moments, params)

    def told(self, tree: Any) -> Any:
        """Return parameters, or a state, with what waits on the host said to lie there."""
        return self._there(tree, is_on_host)

    def abstract(self, tree: Any, kind: Kind) -> Any:
        """Return shapes; those of what waits on the host say so."""
        return self._there(tree, lambda leaf: leaf.update(sharding=host_sharding())) if kind == "parameters" else tree

    def arrays(self, tree: Any, kind: Kind) -> Any:
        """Return arrays, on the host what waits there."""
        return self._there(tree, lambda leaf: jax.device_put(leaf, host_place())) if kind == "parameters" else tree

    def begin(self, make: Callable[[Any], Any], params: Any, shapes: Callable[[], Any]) -> Any:
        """Return the state `make(params)`. Weights that wait on the host never are on the device: a CPU makes them."""
        device, host = jax.devices()[0], host_place()
        first = jax.devices("cpu")[0] if self.plan.weights == "host" else device
        with jax.default_device(first):
            state = self.arrays(make(jax.device_put(params, first, may_alias=False)), "parameters")
        return jax.tree.map(lambda leaf: leaf if leaf.sharding == host else jax.device_put(leaf, device), state)

    def _there(self, tree: Any, put: Callable[[Any], Any]) -> Any:
        """Return parameters, or a state, with `put` of what waits on the host."""
        if not isinstance(tree, TrainState):
            return of_matrices(tree, put) if self.plan.weights == "host" else tree
        homes = {"params": self.plan.weights, "opt_state": self.plan.moments}
        there = [name for name, home in homes.items() if home == "host"]
        return dataclasses.replace(tree, **{name: of_matrices(getattr(tree, name), put) for name in there})
