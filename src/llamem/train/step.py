"""One update of a model's parameters, as a function: the plain step, and what changes in it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from llamem.layers.trees import combine
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.train.batch_loss import loss_and_grads, mean_weights, summed_loss
from llamem.train.optimizers import clip, make_update, split_counters
from llamem.train.place import ONE_DEVICE, OneDevice
from llamem.train.settings import TrainSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes: the number of updates done, what is trained, the optimizer's state."""

    step: Any  # an int32 scalar; Any, since JAX also builds pytrees of placeholders
    params: Any
    opt_state: Any


Step = Callable[[TrainState, tuple[Array, ...]], tuple[TrainState, dict[str, Array]]]


def make_model(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()) -> Llama:
    """Return a freshly initialised model, computed as the plan says. Same seed, same parameters."""
    return Llama(config, rngs=nnx.Rngs(settings.seed), plan=plan)


def make_step(graphdef: nnx.GraphDef, settings: TrainSettings, place: OneDevice = ONE_DEVICE) -> Step:
    """Return `step(state, (inputs_BT, targets_BT)) -> state, metrics`: one update of the parameters of `graphdef`.

    A third array in the batch, `segments_BT`, numbers documents that are packed into one sequence.
    """

    def step(state: TrainState, batch: tuple[Array, ...]) -> tuple[TrainState, dict[str, Array]]:
        counters, moments = split_counters(state.opt_state)
        loss, grads = weights_loss_and_grads(graphdef, settings, place, state.params, batch)
        norm = place.norm(grads)
        update = make_update(settings, state.step, counters, place.start_of_part)
        params, moments = place.update(update, clip(settings, grads, norm), moments, state.params)
        counters = jax.tree.map(lambda count: count + 1, counters)
        return TrainState(state.step + 1, params, combine(counters, moments)), {"loss": loss, "grad_norm": norm}

    return step


def weights_loss_and_grads(
    graphdef: nnx.GraphDef, settings: TrainSettings, place: OneDevice, params: Any, batch: tuple[Array, ...]
) -> tuple[Float[Array, ""], Any]:
    """Return the mean loss of a batch and the gradients of all weights, of one device their parts."""

    def loss(params: Any, weights_B: Array, *batch: Array) -> Array:
        return summed_loss(place.put(nnx.merge(graphdef, params)), weights_B, *batch)

    weights_B = mean_weights(batch[1], place)
    losses_B, grads = loss_and_grads(loss, params, weights_B, batch, settings.accumulate)
    return place.sum_tokens(jnp.vdot(losses_B, weights_B)), place.sum_gradients(grads)
