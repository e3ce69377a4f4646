"""Where a step runs, and what it asks of that place. The plain answers are those of one device."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from llamem.llama.model import Llama
from llamem.train.optimizers import norm_of, start_of_whole


class OneDevice:
    """Nothing is elsewhere: weights are plain, sums are complete."""

    def put(self, model: Llama) -> Llama:
        """Return the model with the weights of this place in the place of plain ones; it may be changed."""
        return model

    def sum_sequences(self, x: Array) -> Array:
        """Return the sum of what was computed from different whole sequences."""
        return x

    def sum_tokens(self, x: Array) -> Array:
        """Return the sum of what was computed from different tokens."""
        return x

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


ONE_DEVICE = OneDevice()
