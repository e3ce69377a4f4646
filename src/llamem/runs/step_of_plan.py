"""Training steps as a plan says, on one device, on a mesh or with parts of them on the host; or their shapes alone.

The place where a step runs is made once, by `place_of`; what is called `.._at` is handed it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from llamem.adapters.lora import LoraConfig
from llamem.adapters.lora_step import AdapterBatch, abstract_lora_step_at
from llamem.host.streamed_step import make_streamed_step
from llamem.host.waiting_weights import OnHost
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.mesh.mesh_step import OnMesh
from llamem.quantized.blocks import BlockKind
from llamem.train.optimizers import make_optimizer
from llamem.train.place import OneDevice, Place
from llamem.train.plain_step import TrainState, make_model, make_step, mean_weights, summed_loss
from llamem.train.settings import Clip, TrainSettings


def place_of(plan: Plan) -> Place:
    """Return where a step of this plan runs."""
    if plan.mesh.devices > 1:
        return OnMesh(plan)
    return OnHost(plan) if "host" in (plan.weights, plan.moments) else OneDevice(plan)


def init_state(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan(), *, params: Any = None) -> TrainState:
    """Return the state before the first step, each array where the plan says: on its part of a mesh, or on the host.

    `params`: parameters to begin with, such as `nnx.state(model, nnx.Param)` of a loaded model; they are copied.
    Without them those of a fresh model, of which every device of a mesh makes its own part. Weights that wait on the
    host are never on the device: the CPU makes them.
    """
    return init_state_at(place_of(plan), config, settings, params)


def init_state_at(place: Place, config: LlamaConfig, settings: TrainSettings, params: Any) -> TrainState:
    """Return `init_state` of a place."""

    def begin(params: Any) -> TrainState:
        own = abstract_params(config, settings)
        params = nnx.state(make_model(config, settings), nnx.Param) if params is None else params
        params = jax.tree.unflatten(jax.tree.structure(own), jax.tree.leaves(params))  # plain weights, whatever waited
        return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(settings).init(params))

    return place.begin(begin, params, lambda: abstract_state_at(place, config, settings))


def abstract_step(
    config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()
) -> tuple[Callable[..., Any], TrainState, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Return the train step of a model that is never built, with the shapes of its arguments: what a compiler needs.

    `(step, state, batch)` are for `jaxmem.compile_report(step, state, batch, donate_argnums=(0,), chip=...)`. With a
    mesh in the plan the shapes say how they lie on it. Raise ValueError for sizes that do not divide, and as
    `make_train_step`.
    """
    place = place_of(plan)
    step, state = make_train_step_at(place, config, settings), abstract_state_at(place, config, settings)
    tokens_BT = jax.ShapeDtypeStruct((settings.batch_size, settings.seq_len), jnp.int32)
    return step, state, place.abstract((tokens_BT, tokens_BT), "batch")


def abstract_lora_step(
    config: LlamaConfig, settings: TrainSettings, plan: Plan, lora: LoraConfig, *, quantize: BlockKind | None = None
) -> tuple[Callable[..., Any], TrainState, Any, AdapterBatch]:
    """Return the step of adapters over a model that is never built, with the shapes of its arguments.

    `(step, state, base, batch)` are for `jaxmem.compile_report(step, state, base, batch, donate_argnums=(0,),
    chip=...)`. With a mesh in the plan the shapes say how they lie on it. `quantize`: the kind of blocks that the
    frozen matrices are in, such as `"q4_0"`. Raise ValueError for sizes that do not divide.
    """
    return abstract_lora_step_at(place_of(plan), config, settings, lora, quantize)


def abstract_state(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()) -> TrainState:
    """Return the shapes and types of a training state, without a byte of it, and where they lie.

    Raise ValueError where weights, batch or sequence do not divide among the devices of the plan's mesh.
    """
    return abstract_state_at(place_of(plan), config, settings)


def abstract_state_at(place: Place, config: LlamaConfig, settings: TrainSettings) -> TrainState:
    """Return `abstract_state` of a place."""
    place.check(settings)
    params = abstract_params(config, settings)
    opt_state = jax.eval_shape(make_optimizer(settings).init, params)
    return place.abstract(TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, opt_state), "parameters")


def abstract_params(config: LlamaConfig, settings: TrainSettings) -> Any:
    """Return the shapes and types of a model's parameters."""
    return jax.eval_shape(lambda: nnx.state(make_model(config, settings)))


def plain_graphdef(config: LlamaConfig, plan: Plan) -> nnx.GraphDef:
    """Return what `nnx.merge` makes a model of from its parameters, computed as the plan says."""
    return nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), plan=plan)))


def make_train_step(
    config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Return `step(state, (inputs_BT, targets_BT)) -> state, metrics`: one update, to be jitted with the state donated.

    A third array in the batch, `segments_BT`, numbers documents that are packed into one sequence. Targets of -100 do
    not count. With a mesh in the plan it is one program for every device of it, on states and batches that lie as
    `abstract_step` says. Metrics: `loss` (mean over the tokens that count, nats), `grad_norm`. With weights or moments
    on the host, JAX 0.7 wants `out_shardings=same_places(state)` as well: else they come home with the first result.
    Raise ValueError where plan and settings exclude each other.
    """
    return make_train_step_at(place_of(plan), config, settings)


def make_train_step_at(
    place: Place, config: LlamaConfig, settings: TrainSettings
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """Return `make_train_step` of a place."""
    check_update(place.plan, settings, config.param_dtype)
    graphdef = plain_graphdef(config, place.plan)
    on_device = (
        make_streamed_step(graphdef, settings) if place.plan.layer_by_layer else make_step(graphdef, settings, place)
    )
    program = place.program(on_device, ("parameters", "batch"), ("parameters", "same"))

    def step(state: TrainState, batch: tuple[Array, ...]) -> tuple[TrainState, dict[str, Array]]:
        return program(place.told(state), tuple(batch))

    return step


def check_clip(clip: Clip, devices: int, where: str) -> None:
    """Raise ValueError where gradients are to be clipped layer by layer on several devices; `where` names them."""
    if devices > 1 and clip == "layer":
        raise ValueError(
            f"clip='layer' on {where}, {devices} chips: norms of layers would depend on how arrays are split. Leave "
            "clip='global'."
        )


def check_update(plan: Plan, settings: TrainSettings, param_dtype: Any) -> None:
    """Raise ValueError where the plan, the settings and the weights' type exclude each other, with the remedy."""
    check_clip(settings.clip, plan.mesh.devices, f"a mesh {plan.mesh.axes}")
    if settings.rounding == "stochastic" and param_dtype != jnp.bfloat16:
        raise ValueError(
            f"TrainSettings(rounding='stochastic') with weights in {jnp.dtype(param_dtype).name}: it is for bf16 "
            "weights without a wider copy. Choose LlamaConfig(param_dtype=jnp.bfloat16), or leave rounding='auto'."
        )
    if plan.layer_by_layer and settings.clip == "global" and settings.clip_norm is not None:
        raise ValueError(
            f"TrainSettings(clip='global', clip_norm={settings.clip_norm}) with weights on the host or an update in "
            "the backward pass: the norm of all gradients is known when the last of them is there, and by then the "
            "first have been used and are gone. Choose clip='layer', which clips each layer by its own norm, or "
            "clip_norm=None; with weights='device', update='after' the norm of all is at hand."
        )
    if plan.layer_by_layer and settings.accumulate > 1:
        raise ValueError(
            f"TrainSettings(accumulate={settings.accumulate}) with weights on the host or an update in the backward "
            "pass: gradients of all layers would have to be kept and added, in the room that was to be saved. Choose "
            "accumulate=1: with layers fetched one by one a larger batch costs only its own activations."
        )


def loss_fn(
    graphdef: nnx.GraphDef,
    params: Any,
    inputs_BT: Int[Array, "B T"],
    targets_BT: Int[Array, "B T"],
    segments_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Return the mean cross-entropy in nats of the targets that count, tiled as the model's plan says.

    Targets of -100 do not count. `segments_BT` numbers documents packed into one sequence, which do not see each other.
    To be called, and differentiated, outside of `shard_map`, whatever the plan's mesh.
    """
    batch = inputs_BT, targets_BT, *(() if segments_BT is None else (segments_BT,))
    return mean_loss(place_of(nnx.merge(graphdef, params).plan), graphdef, params, batch)


def mean_loss(place: Place, graphdef: nnx.GraphDef, params: Any, batch: tuple[Array, ...]) -> Float[Array, ""]:
    """Return the loss of `loss_fn` for a model whose place is at hand."""

    def share(params: Any, batch: tuple[Array, ...]) -> Array:
        model = place.put(nnx.merge(graphdef, place.outside(params)))
        return place.sum_tokens(summed_loss(model, mean_weights(batch[1], place), *batch))

    return place.program(share, ("parameters", "batch"), "same")(params, batch)
