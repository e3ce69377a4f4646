"""Where a step runs, as one object: made once from the plan, handed down, and asked. The base, and one device.

A power brings a place of its own: a mesh of devices (`llamem.mesh.mesh_step.OnMesh`), the host's memory beside one
device (`llamem.host.waiting_weights.OnHost`). `llamem.runs.step_of_plan.place_of` chooses.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.train.optimizers import norm_of, start_of_whole
from llamem.train.settings import TrainSettings

# How a tree lies: parameters and their moments each at its own place, batches `[B, ...]` shared out by sequences, or
# the same for all.
Kind = Literal["parameters", "batch", "same"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a plan's step runs. Its answers are those where nothing is elsewhere: sums are complete, weights plain."""

    plan: Plan = Plan()

    # Asked inside the step, by each device of it.

    def put(self, model: Llama) -> Llama:
        """Return the model with the weights of this place in the place of plain ones; it may be changed."""
        return model

    def sum_sequences(self, x: Array) -> Array:
        """Return the sum of what was computed from different whole sequences."""
        return x

    def sum_tokens(self, x: Array) -> Array:
        """Return the sum of what was computed from different tokens."""
        return x

    def sum_parts(self, x: Array) -> Array:
        """Return the sum of what was computed from different tokens, and from different heads, parts of F or rows."""
        return x

    def own_part(self, array: Array) -> Array:
        """Return what of the last axis, one of heads, of F or of rows, is computed here."""
        return array

    def sum_gradients(self, grads: Any) -> Any:
        """Return the gradients of all weights, complete."""
        return grads

    def norm(self, grads: Any) -> Float[Array, ""]:
        """Return the norm of all gradients, in f32."""
        return norm_of(grads)

    def start_of_part(self, path: tuple[Any, ...], param: Array) -> list[Any]:
        """Return where what is here of a parameter begins in the whole one, along each axis."""
        return start_of_whole(path, param)

    def update(self, rule: Callable[..., Any], grads: Any, moments: Any, params: Any) -> tuple[Any, Any]:
        """Return new parameters and moments: `rule(grads, moments, params)`."""
        return rule(grads, moments, params)

    # Asked by whoever makes the step, or its arguments.

    @property
    def of_batch(self) -> NamedSharding | None:
        """How token ids `[B, T]` lie; None where they stay as they are read."""
        return None

    def check(self, settings: TrainSettings) -> None:
        """Raise ValueError for batches and sequences that cannot be shared out."""

    def program(self, fn: Callable[..., Any], given: tuple[Kind, ...], returned: Any) -> Callable[..., Any]:
        """Return `fn`, the program of each device, as one program of all. `given`, `returned`: how each tree lies."""
        return fn

    def outside(self, params: Any) -> Any:
        """Return parameters for a loss inside of `program` that is differentiated outside of it."""
        return params

    def told(self, tree: Any) -> Any:
        """Return parameters, or a state, that JAX is told where they lie: an argument's shape does not tell it."""
        return tree

    def abstract(self, tree: Any, kind: Kind) -> Any:
        """Return shapes that say where they lie."""
        return tree

    def arrays(self, tree: Any, kind: Kind) -> Any:
        """Return arrays where they lie between steps."""
        return tree

    def begin(self, make: Callable[[Any], Any], params: Any, shapes: Callable[[], Any]) -> Any:
        """Return the state `make(params)`, in arrays of its own, like `shapes()`; without params, of a fresh model."""
        device = jax.devices()[0]
        state = make(jax.device_put(params, device, may_alias=False))
        return jax.tree.map(lambda leaf: jax.device_put(leaf, device), state)

    def alone(self) -> "Place":
        """Return the place of a model that anybody calls, with its arrays as they lie here: JAX shares the work out."""
        return self


@dataclasses.dataclass(frozen=True)
class OneDevice(Place):
    """All is here."""


ONE_DEVICE = OneDevice()
