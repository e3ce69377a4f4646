"""One update of a Llama's parameters, with both features, as a function: to jit, or to compile for an absent chip."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from llamem.layers.offload import is_on_host
from llamem.layers.trees import combine
from llamem.llama.config import LlamaConfig
from llamem.llama.host_memory import host_place, host_sharding, of_matrices
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.llama.quantized import BlockKind, check_kinds, kinds_in, with_blocks
from llamem.llama.sharding import parameter_specs
from llamem.train.batch_loss import loss_and_grads, mean_weights, summed_loss
from llamem.train.on_host import update_by_parts
from llamem.train.optimizers import check_update, clip, make_optimizer, make_update, split_counters
from llamem.train.settings import TrainSettings
from llamem.train.sharded_step import (
    batch_spec,
    check_sizes,
    global_norm,
    on_mesh,
    placed_shapes,
    sum_gradients,
    sum_over_batch,
)
from llamem.train.streamed_step import streamed_update


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes: the number of updates done, what is trained, the optimizer's state."""

    step: Any  # an int32 scalar; Any, since JAX also builds pytrees of placeholders
    params: Any
    opt_state: Any


def make_model(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()) -> Llama:
    """Return a freshly initialised model, computed as the plan says. Same seed, same parameters."""
    return Llama(config, rngs=nnx.Rngs(settings.seed), plan=plan)


def init_state(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan(), *, params: Any = None) -> TrainState:
    """Return the state before the first step, each array where the plan says: on its part of a mesh, or on the host.

    `params`: parameters to begin with, such as `nnx.state(model, nnx.Param)` of a loaded model; they are copied.
    Without them those of a fresh model, of which every device of a mesh makes its own part. Weights that wait on the
    host are never on the device: the CPU makes them.
    """

    def begin(params: Any = params) -> TrainState:
        params = nnx.state(make_model(config, settings), nnx.Param) if params is None else params
        return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(settings).init(params))

    if plan.mesh.devices > 1:
        where = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, settings, plan))
        if params is None:
            return jax.jit(begin, out_shardings=where)()
        return jax.jit(begin, out_shardings=where)(jax.device_put(params, where.params))
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

    `(step, state, batch)` are for `llamem.compile_report(step, state, batch, donate_argnums=(0,), chip=...)`. With a
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


def abstract_params(config: LlamaConfig, settings: TrainSettings, quantize: BlockKind | None = None) -> Any:
    """Return the shapes and types of a model's parameters, its matrices in blocks of a kind where one is given."""
    kinds = {} if quantize is None else check_kinds(config, quantize)
    return jax.eval_shape(lambda: nnx.state(with_blocks(make_model(config, settings), kinds)))


def graphdef_of(config: LlamaConfig, plan: Plan, params: Any = None) -> nnx.GraphDef:
    """Return what `nnx.merge` makes a model of from parameters, computed as the plan says.

    `params`: the parameters that it is for, where matrices of theirs may be in blocks (`llamem.llama.quantize`).
    """
    kinds = kinds_in(params)
    return nnx.graphdef(nnx.eval_shape(lambda: with_blocks(Llama(config, rngs=nnx.Rngs(0), plan=plan), kinds)))


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
    graphdef, mesh = graphdef_of(config, plan), plan.mesh
    check_update(plan, settings, config.param_dtype)

    def step_on_device(state: TrainState, batch: tuple[Array, ...]) -> tuple[TrainState, dict[str, Array]]:
        counters, moments = split_counters(state.opt_state)
        update, params = make_update(settings, state.step, counters, mesh), state.params
        if plan.layer_by_layer:
            model = nnx.merge(graphdef, params)
            params, moments, metrics = streamed_update(model, settings, update, params, moments, batch)
        else:
            loss, grads = weights_loss_and_grads(graphdef, settings, params, batch)
            metrics = {"loss": loss, "grad_norm": global_norm(grads, mesh)}
            update = partial(update_by_parts, update, plan) if plan.moments == "host" else update
            params, moments = update(clip(settings, grads, metrics["grad_norm"]), moments, params)
        counters = jax.tree.map(lambda count: count + 1, counters)
        return TrainState(state.step + 1, params, combine(counters, moments)), metrics

    def step(state: TrainState, batch: tuple[Array, ...]) -> tuple[TrainState, dict[str, Array]]:
        # JAX does not know of shapes where they lie: a program is told so of its arguments.
        state, specs = _on_host(state, plan, is_on_host), parameter_specs(state, mesh)
        return on_mesh(step_on_device, mesh, (specs, batch_spec(mesh)), (specs, PartitionSpec()))(state, tuple(batch))

    return step


def weights_loss_and_grads(
    graphdef: nnx.GraphDef, settings: TrainSettings, params: Any, batch: tuple[Array, ...]
) -> tuple[Array, Any]:
    """Return the mean loss of a batch and the gradients of all weights; on a mesh, inside `shard_map`, their parts."""
    mesh = nnx.merge(graphdef, params).plan.mesh

    def loss(params: Any, weights_B: Array, *batch: Array) -> Array:
        return summed_loss(nnx.merge(graphdef, params), weights_B, *batch)

    weights_B = mean_weights(batch[1], mesh)
    losses_B, grads = loss_and_grads(loss, params, weights_B, batch, settings.accumulate)
    return sum_over_batch(jnp.vdot(losses_B, weights_B), mesh), sum_gradients(grads, mesh)


def _on_host(state: TrainState, plan: Plan, put: Callable[[Any], Any]) -> TrainState:
    """Return the state with `put` of what waits on the host."""
    homes = {"params": plan.weights, "opt_state": plan.moments}
    there = [name for name, home in homes.items() if home == "host"]
    return dataclasses.replace(state, **{name: of_matrices(getattr(state, name), put) for name in there})
