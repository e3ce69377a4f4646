"""One update of many adapters at once: each as if it were trained alone, and the model under them frozen."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from llamem.adapters.adapted_weights import IN_LAYERS, put_on
from llamem.adapters.lora import Adapters, LoraConfig, check_adapters
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import Plan
from llamem.quantized.blocks import BlockKind, check_kinds, with_blocks
from llamem.quantized.quantized_model import graphdef_of
from llamem.train.optimizers import make_optimizer, norm_of, within
from llamem.train.place import ONE_DEVICE, Place
from llamem.train.plain_step import IGNORED, TrainState, loss_and_grads, make_model, summed_loss
from llamem.train.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class OwnPart:
    """Cuts out, inside a place's program, what of one target's A or B a device meets.

    Of A of "o" and "down", and of B of all others, that is its heads, its part of F or its rows: a part of the last
    axis.
    """

    place: Place
    target: str

    def __call__(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Return both, one of them cut."""
        return (self.place.own_part(a), b) if self.target in ("o", "down") else (a, self.place.own_part(b))


def summed(place: Place, path: tuple[Any, ...], grad: Array) -> Array:
    """Return a gradient of adapters summed over the devices that have summands of it: on the others it is the same."""
    part, target = (entry.key for entry in path[-2:])
    # In a layer devices compute for their heads and their part of F, and B of the head meets their rows.
    in_parts = target in IN_LAYERS or (part, target) == ("b", "head")
    return place.sum_parts(grad) if in_parts else place.sum_tokens(grad)


# inputs [B, T], targets [B, T], the adapter of each sequence [B], perhaps segments [B, T]
AdapterBatch = tuple[Any, ...]


def init_lora_state(adapters: Adapters, settings: TrainSettings) -> TrainState:
    """Return the state before the first step: updates of each adapter `[A]`, the adapters, their moments; no weight.

    Under `jax.eval_shape`, with abstract adapters, it is shapes only.
    """
    moments = make_optimizer(settings).init(adapters.weights)
    # optax counts updates in scalars; here every adapter counts its own. Each in a buffer of its own, to be donated.
    moments = jax.tree.map(lambda leaf: leaf if leaf.ndim else jnp.zeros(adapters.count, leaf.dtype), moments)
    return TrainState(jnp.zeros(adapters.count, jnp.int32), adapters, moments)


def make_lora_step(
    config: LlamaConfig, settings: TrainSettings, place: Place = ONE_DEVICE
) -> Callable[[TrainState, Any, AdapterBatch], tuple[TrainState, dict[str, Array]]]:
    """Return `step(state, base, (inputs_BT, targets_BT, adapter_B)) -> state, metrics`, to be jitted, state donated.

    `base` are the parameters of the frozen model, `nnx.state(model)`, matrices in blocks of four bits among them; no
    gradient of them is computed. Every adapter is trained as if its sequences were alone in the batch: its loss is the
    mean over its own tokens, its gradient's norm is clipped by itself, and warm-up, decay and AdamW's bias corrections
    follow its own number of updates. An adapter without a token that counts (targets of -100 do not) stays as it is,
    bit by bit, with its moments and its count. `place`: where it runs, that of a plan by `llamem.runs.place_of`.

    A fourth array in the batch, `segments_BT`, numbers documents that are packed into one sequence. On a mesh adapters
    are whole on every device, and lie as `abstract_lora_step` says. Metrics, each `[A]`: `loss` (mean over the
    adapter's tokens, nats; NaN where it has none, and for all where an id in `adapter_B` is none), `grad_norm`,
    `tokens`.
    """
    check_adapter_plan(settings, place.plan)
    optimizer = make_optimizer(settings)

    def update_one(grads: Any, moments: Any, weights: Any) -> tuple[Any, Any, Array]:
        norm = norm_of(grads)
        updates, moments = optimizer.update(within(grads, norm, settings.clip_norm), moments, weights)
        return optax.apply_updates(weights, updates), moments, norm

    def step_on_device(state: TrainState, base: Any, batch: AdapterBatch) -> tuple[TrainState, dict[str, Array]]:
        graphdef = graphdef_of(config, place.plan, base)
        metrics, grads = losses_and_grads(place, graphdef, settings, base, state.params, batch)
        old = state.params.weights, state.opt_state
        axes = _axis_of_adapters(old[0]), _axis_of_adapters(old[1])
        each = jax.vmap(update_one, in_axes=(axes[0], axes[1], axes[0]), out_axes=(*axes, 0))
        *new, norm_A = each(grads, state.opt_state, old[0])
        present_A = metrics["tokens"] > 0
        weights, moments = jax.tree.map(
            lambda new, old, axis: jnp.where(_along(axis, new, present_A), new, old), tuple(new), old, axes
        )
        state = TrainState(state.step + present_A, state.params.with_weights(weights), moments)
        return state, metrics | {"grad_norm": norm_A}

    program = place.program(step_on_device, ("same", "parameters", "batch"), "same")

    def step(state: TrainState, base: Any, batch: AdapterBatch) -> tuple[TrainState, dict[str, Array]]:
        return program(state, place.told(base), tuple(batch))

    return step


def abstract_lora_step_at(
    place: Place, config: LlamaConfig, settings: TrainSettings, lora: LoraConfig, quantize: BlockKind | None
) -> tuple[Callable[..., Any], TrainState, Any, AdapterBatch]:
    """Return `llamem.abstract_lora_step` of a place."""
    kinds = {} if quantize is None else check_kinds(config, quantize)
    base = jax.eval_shape(lambda: nnx.state(with_blocks(make_model(config, settings), kinds)))
    place.check(settings)
    state = jax.eval_shape(lambda: init_lora_state(Adapters.create(config, lora, rngs=nnx.Rngs(0)), settings))
    tokens_BT = jax.ShapeDtypeStruct((settings.batch_size, settings.seq_len), jnp.int32)
    batch = (tokens_BT, tokens_BT, jax.ShapeDtypeStruct((settings.batch_size,), jnp.int32))
    return (
        make_lora_step(config, settings, place),
        place.abstract(state, "same"),
        place.abstract(base, "parameters"),
        place.abstract(batch, "batch"),
    )


def losses_and_grads(
    place: Place, graphdef: nnx.GraphDef, settings: TrainSettings, base: Any, adapters: Adapters, batch: AdapterBatch
) -> tuple[dict[str, Array], Any]:
    """Return every adapter's mean loss and number of tokens, `[A]`, and the gradients of the sum of the losses.

    On a mesh, inside `shard_map`, from this device's part of the batch; the results are the same on all devices.
    """
    weights_B, tokens_A, mean = _of_adapters(adapters.count, place, batch)

    def divided(path: tuple[Any, ...], grad: Array, axis: int) -> Array:
        counts = _along(axis, grad, jnp.maximum(tokens_A, 1).astype(grad.dtype))
        return summed(place, path, grad) / counts

    # Of the sum over tokens, divided at the end, in the adapters' own f32: one over the number of tokens would push
    # what flows back through the layers below the smallest numbers of float16, whose loss scale this is.
    loss = _loss_of(place, graphdef, base, adapters)
    losses_B, grads = loss_and_grads(loss, adapters.weights, jnp.ones_like(weights_B), batch, settings.accumulate)
    grads = jax.tree.map_with_path(divided, grads, _axis_of_adapters(grads))
    return {"loss": mean(losses_B), "tokens": tokens_A}, grads


def lora_losses(
    place: Place, graphdef: nnx.GraphDef, base: Any, adapters: Adapters, batch: AdapterBatch
) -> Float[Array, " A"]:
    """Return every adapter's mean loss over its own tokens, `[A]`, without gradients; NaN where it has none."""

    def losses(base: Any, adapters: Adapters, batch: AdapterBatch) -> Array:
        weights_B, _, mean = _of_adapters(adapters.count, place, batch)
        return mean(jax.grad(_loss_of(place, graphdef, base, adapters), 1)(adapters.weights, weights_B, *batch))

    return place.program(losses, ("parameters", "same", "batch"), "same")(base, adapters, batch)


def _loss_of(place: Place, graphdef: nnx.GraphDef, base: Any, adapters: Adapters) -> Callable[..., Array]:
    """Return `loss(weights, weights_B, *batch)` of adapters' weights; linear in `weights_B`, as `summed_loss` is."""

    def loss(weights: Any, weights_B: Array, inputs_BT: Array, targets_BT: Array, adapter_B: Array, *rest: Any) -> Any:
        model = place.put(nnx.merge(graphdef, base))
        adapter_B = check_adapters(adapters, adapter_B, model.config)
        model = put_on(model, adapters.with_weights(weights), adapter_B, partial(OwnPart, place))
        return summed_loss(model, weights_B, inputs_BT, targets_BT, *rest)

    return loss


def tokens_of_adapters(count: int, batch: AdapterBatch) -> Int[Array, " A"]:
    """Return how many targets of a batch count for each of `count` adapters, `[A]`."""
    _, targets_BT, adapter_B, *_ = batch
    return jax.ops.segment_sum(jnp.sum(targets_BT != IGNORED, axis=1), adapter_B, num_segments=count)


def _of_adapters(count: int, place: Place, batch: AdapterBatch) -> tuple[Array, Array, Callable[[Array], Array]]:
    """Return one over the tokens of each sequence's adapter `[B]`, the tokens of each adapter `[A]`, and what
    makes the mean losses `[A]` of the summed losses of sequences `[B]`.
    """
    adapter_B = batch[2]
    per_adapter = partial(jax.ops.segment_sum, segment_ids=adapter_B, num_segments=count)
    tokens_A = place.sum_sequences(tokens_of_adapters(count, batch))
    weights_B = 1 / jnp.maximum(tokens_A, 1)[jnp.clip(adapter_B, 0, count - 1)]

    def mean(losses_B: Array) -> Array:
        # An id that is none belongs to no adapter's sum: its NaN is told to all of them.
        nowhere = jnp.sum(jnp.where((adapter_B < 0) | (adapter_B >= count), jnp.nan, 0.0))
        loss_A = place.sum_tokens(per_adapter(losses_B * weights_B) + nowhere)
        return jnp.where(tokens_A > 0, loss_A, jnp.nan)

    return weights_B, tokens_A, mean


def _axis_of_adapters(tree: Any) -> Any:
    """Return for every leaf of adapters' weights, or of an optimizer's state of them, which axis the adapters are."""

    def axis(path: tuple[Any, ...], _: Any) -> int:
        return int(any(getattr(entry, "key", None) in IN_LAYERS for entry in path))

    return jax.tree.map_with_path(axis, tree)


def _along(axis: int, array: Array, values_A: Array) -> Array:
    """Return values of the adapters, to be broadcast with an array whose axis of adapters is `axis`."""
    return values_A.reshape([-1 if i == axis else 1 for i in range(array.ndim)])


def check_adapter_plan(settings: TrainSettings, plan: Plan) -> None:
    """Raise ValueError for what a step of adapters cannot do."""
    if settings.clip != "global" or settings.rounding == "stochastic":
        raise ValueError(
            f"TrainSettings(clip={settings.clip!r}, rounding={settings.rounding!r}) for adapters: each is clipped by "
            "the norm of its own gradients, and its weights are f32. Leave clip='global' and rounding='auto'."
        )
    if plan.update == "in_backward" or plan.moments == "host":
        raise ValueError(
            f"Plan(update={plan.update!r}, moments={plan.moments!r}) for adapters: their gradients and moments are too "
            "small to be worth a place or a moment of their own. Leave update='after' and moments='device'; "
            "weights='host' is for the frozen model under them."
        )
