"""Training steps as a plan says, on one device, on a mesh or with parts of them on the host; or their shapes alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from llamem.host.memory import host_place, host_sharding, of_matrices
from llamem.host.streamed_step import make_streamed_step
from llamem.layers.remat import is_on_host
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.mesh.mesh_step import batch_spec, check_sizes, for_gradients_outside, on_mesh, placed_shapes
from llamem.mesh.specs import parameter_specs
from llamem.runs.places import place_of
from llamem.train.optimizers import make_optimizer
from llamem.train.plain_step import TrainState, make_model, make_step, mean_weights, summed_loss
from llamem.train.settings import TrainSettings


def init_state(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan(), *, params: Any = None) -> TrainState:
    """Return the state before the first step, each array where the plan says: on its part of a mesh, or on the host.

    `params`: parameters to begin with, such as `nnx.state(model, nnx.Param)` of a loaded model; they are copied.
    Without them those of a fresh model, of which every device of a mesh makes its own part. Weights that wait on the
    host are never on the device: the CPU makes them.
    """

    def begin(params: Any = params) -> TrainState:
        own = abstract_params(config, settings)
        params = nnx.state(make_model(config, settings), nnx.Param) if params is None else params
        params = jax.tree.unflatten(jax.tree.structure(own), jax.tree.leaves(params))  # plain weights, whatever waited
        return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(settings).init(params))

    if plan.mesh.devices > 1:
        where = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, settings, plan))
        if params is None:
            return jax.jit(begin, out_shardings=where)()
        own = jax.tree.unflatten(jax.tree.structure(where.params), jax.tree.leaves(params))
        return jax.jit(begin, out_shardings=where)(jax.device_put(own, where.params))
    device, cpu = jax.devices()[0], jax.devices("cpu")[0]
    if plan.weights == "device":
        state = begin(jax.device_put(params, device, may_alias=False))
    else:
        with jax.default_device(cpu):
            state = begin(jax.device_put(params, cpu, may_alias=False))
    state = _on_host(state, plan, lambda leaf: jax.device_put(leaf, host_place()))
    host = host_place()
    return jax.tree.map(lambda leaf: leaf if leaf.sharding == host else jax.device_put(leaf, device), state)


def abstract_step(
    config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()
) -> tuple[Callable[..., Any], TrainState, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Return the train step of a model that is never built, with the shapes of its arguments: what a compiler needs.

    `(step, state, batch)` are for `jaxmem.compile_report(step, state, batch, donate_argnums=(0,), chip=...)`. With a
    mesh in the plan the shapes say how they lie on it. Raise ValueError for sizes that do not divide, and as
    `make_train_step`.
    """
    step, state = make_train_step(config, settings, plan), abstract_state(config, settings, plan)
    tokens_BT = jax.ShapeDtypeStruct((settings.batch_size, settings.seq_len), jnp.int32)
    return step, state, placed_shapes((tokens_BT, tokens_BT), batch_spec(plan.mesh), plan.mesh)


def abstract_state(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()) -> TrainState:
    """Return the shapes and types of a training state, without a byte of it, and where they lie.

    Raise ValueError where weights, batch or sequence do not divide among the devices of the plan's mesh.
    """
    params = abstract_params(config, settings)
    opt_state = jax.eval_shape(make_optimizer(settings).init, params)
    state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, opt_state)
    check_sizes(plan.mesh, settings)
    state = _on_host(state, plan, lambda leaf: leaf.update(sharding=host_sharding()))
    return placed_shapes(state, parameter_specs(state, plan.mesh), plan.mesh)


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
    check_update(plan, settings, config.param_dtype)
    graphdef, mesh = plain_graphdef(config, plan), plan.mesh
    if plan.layer_by_layer:
        step_on_device = make_streamed_step(graphdef, settings)
    else:
        step_on_device = make_step(graphdef, settings, place_of(plan))

    def step(state: TrainState, batch: tuple[Array, ...]) -> tuple[TrainState, dict[str, Array]]:
        # JAX does not know of shapes where they lie: a program is told so of its arguments.
        state, specs = _on_host(state, plan, is_on_host), parameter_specs(state, mesh)
        return on_mesh(step_on_device, mesh, (specs, batch_spec(mesh)), (specs, PartitionSpec()))(state, tuple(batch))

    return step


def check_update(plan: Plan, settings: TrainSettings, param_dtype: Any) -> None:
    """Raise ValueError where the plan, the settings and the weights' type exclude each other, with the remedy."""
    if plan.mesh.devices > 1 and settings.clip == "layer":
        raise ValueError(
            f"TrainSettings(clip='layer') on a mesh {plan.mesh.axes}: norms of layers would depend on how arrays are "
            "split. Leave clip='global'."
        )
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
    return mean_loss(nnx.merge(graphdef, params).plan, graphdef, params, batch)


def mean_loss(plan: Plan, graphdef: nnx.GraphDef, params: Any, batch: tuple[Array, ...]) -> Float[Array, ""]:
    """Return the loss of `loss_fn` for a model whose plan is at hand."""
    place, mesh = place_of(plan), plan.mesh

    def share(params: Any, *batch: Array) -> Array:
        model = place.put(nnx.merge(graphdef, for_gradients_outside(params, mesh)))
        return place.sum_tokens(summed_loss(model, mean_weights(batch[1], place), *batch))

    specs = (parameter_specs(params, mesh), *(batch_spec(mesh) for _ in batch))
    return on_mesh(share, mesh, specs, PartitionSpec())(params, *batch)


def _on_host(state: TrainState, plan: Plan, put: Callable[[Any], Any]) -> TrainState:
    """Return the state with `put` of what waits on the host."""
    homes = {"params": plan.weights, "opt_state": plan.moments}
    there = [name for name, home in homes.items() if home == "host"]
    return dataclasses.replace(state, **{name: of_matrices(getattr(state, name), put) for name in there})
