"""One update of a Llama's parameters, with both features, as a function: to jit, or to compile for an absent chip."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from llamem.llama.config import LlamaConfig
from llamem.llama.host_memory import host_place, host_sharding, of_matrices
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.llama.sharding import parameter_specs, shardings
from llamem.train.batch_loss import local_loss, loss_and_grads, loss_fn
from llamem.train.on_host import said, update_in_turn
from llamem.train.optimizers import (
    check_elementwise,
    check_mesh,
    check_rounding,
    clip_layers,
    clipped_by,
    make_optimizer,
    make_update,
)
from llamem.train.settings import TrainSettings
from llamem.train.sharded_step import batch_spec, check_sizes, global_norm, on_mesh
from llamem.train.streamed_step import check_streamed, streamed_update

__all__ = [
    "TrainSettings",
    "TrainState",
    "abstract_state",
    "abstract_step",
    "first_state",
    "init_state",
    "local_loss",
    "loss_and_grads",
    "loss_fn",
    "make_model",
    "make_train_step",
]
Rule = optax.GradientTransformation | None  # None: AdamW, as `llamem.train.optimizers.make_optimizer` says


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes: the number of updates done, the parameters, the optimizer's moments."""

    step: Any  # an int32 scalar; Any, since JAX also builds pytrees of placeholders
    params: Any
    opt_state: Any


def make_model(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()) -> Llama:
    """A freshly initialised model, computed as the plan says. Same seed, same parameters."""
    _check_settings(settings)
    return Llama(config, rngs=nnx.Rngs(settings.seed), plan=plan)


def init_state(model: Llama, settings: TrainSettings, optimizer: Rule = None) -> TrainState:
    """The state before the first step. Under `jax.eval_shape`, with an abstract model, it is shapes only."""
    _check_settings(settings)
    if not isinstance(model, Llama):
        raise TypeError(f"init_state({type(model).__name__}, ...): expected a llamem.Llama.")
    params = nnx.state(model, nnx.Param)
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(settings, rule=optimizer).init(params))


def first_state(
    config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan(), optimizer: Rule = None
) -> TrainState:
    """The state before the first step of a fresh model; on a mesh every device makes its own part.

    What waits on the host is never on the device: a model whose weights do is made by the CPU.
    """

    def put(leaf: Any) -> jax.Array:
        return jax.device_put(leaf, host_place())

    mesh = plan.mesh
    if mesh.devices == 1:
        if plan.weights == "device":
            return _placed(init_state(make_model(config, settings, plan), settings, optimizer), plan, put)
        with jax.default_device(jax.devices("cpu")[0]):
            state = _placed(init_state(make_model(config, settings, plan), settings, optimizer), plan, put)
        host, device = host_place(), jax.devices()[0]
        return jax.tree.map(lambda leaf: leaf if leaf.sharding == host else jax.device_put(leaf, device), state)
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, settings, plan, optimizer))
    return jax.jit(lambda: init_state(make_model(config, settings), settings, optimizer), out_shardings=where)()


def abstract_step(
    config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan(), optimizer: Rule = None
) -> tuple[Callable[..., Any], TrainState, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """The train step of a model that is never built, with the shapes of its arguments: what a compiler needs.

    Returns `(step, state, batch)` for `llamem.compile_report(..., donate_argnums=(0,), chip=...)`. With a
    mesh in the plan the shapes say how they lie on it. Raises ValueError for sizes that do not divide.
    """
    _check_settings(settings)
    mesh = plan.mesh
    model = nnx.eval_shape(lambda: make_model(config, settings, plan))
    where = None
    if mesh.devices > 1:
        where = shardings(batch_spec(mesh), mesh)
    tokens_BT = jax.ShapeDtypeStruct((settings.batch_size, settings.seq_len), jnp.int32, sharding=where)
    return (
        make_train_step(nnx.graphdef(model), settings, optimizer),
        abstract_state(config, settings, plan, optimizer),
        (tokens_BT, tokens_BT),
    )


def abstract_state(
    config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan(), optimizer: Rule = None
) -> TrainState:
    """The shapes and types of a training state, without a byte of it, and where they lie: on which part of the plan's
    mesh, or on the host.

    Raises ValueError where weights, batch or sequence do not divide among its devices.
    """
    state = jax.eval_shape(lambda: init_state(make_model(config, settings), settings, optimizer))
    mesh = plan.mesh
    if mesh.devices == 1:
        return _placed(state, plan, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host_sharding()))
    check_sizes(mesh, settings.batch_size, settings.seq_len, settings.accumulate)
    where = shardings(parameter_specs(state, mesh), mesh)
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, where)


def _placed(state: TrainState, plan: Plan, put: Callable[[Any], Any]) -> TrainState:
    """The state with `put` of what waits on the host."""
    homes = {"params": plan.weights, "opt_state": plan.moments}
    there = [name for name, home in homes.items() if home == "host"]
    return dataclasses.replace(state, **{name: of_matrices(getattr(state, name), put) for name in there})


def _check_settings(settings: Any) -> None:
    if not isinstance(settings, TrainSettings):
        raise TypeError(f"settings={settings!r}: expected llamem.TrainSettings(steps=..., batch_size=..., ...).")


def make_train_step(
    graphdef: nnx.GraphDef, settings: TrainSettings, optimizer: Rule = None
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """`step(state, (inputs_BT, targets_BT)) -> state, metrics`: one update, to be jitted with the state donated.

    With a mesh in the model's plan it is one program for every device of it, on states and batches that lie as
    `abstract_step` says. Metrics: `loss` (mean over tokens, nats), `grad_norm`. With weights or moments on
    the host, JAX 0.7 wants `out_shardings=same_places(state)` as well: else they come home with the first result.

    `optimizer`: an optax transformation in place of AdamW, without clipping, which the settings say; the state is then
    one made with it. Raises ValueError, when the step is traced, where the plan or the settings and it exclude each
    other: see `llamem.train.streamed_step.check_streamed` and `llamem.train.optimizers.check_elementwise`.
    """
    _check_settings(settings)
    if not isinstance(graphdef, nnx.GraphDef):
        raise TypeError(f"make_train_step({type(graphdef).__name__}, ...): expected nnx.graphdef(model).")

    def step(state: TrainState, batch: tuple[Array, Array]) -> tuple[TrainState, dict[str, Array]]:
        plan = nnx.merge(graphdef, state.params).plan
        mesh = plan.mesh
        check_mesh(settings, mesh)
        check_rounding(settings, state.params)
        if plan.moments == "host" or plan.layer_by_layer:
            check_elementwise(optimizer)
            return _one_by_one(state, plan, batch)
        norm = partial(global_norm, mesh=mesh)
        rule = make_optimizer(settings, norm, optimizer)

        def update(state: TrainState, batch: tuple[Array, Array]) -> tuple[TrainState, dict[str, Array]]:
            loss, grads = loss_and_grads(graphdef, settings, state.params, batch)
            params, opt_state = make_update(settings, rule, state.step)(grads, state.opt_state, state.params)
            return TrainState(state.step + 1, params, opt_state), {"loss": loss, "grad_norm": norm(grads)}

        specs = parameter_specs(state, mesh)
        return on_mesh(update, mesh, (specs, batch_spec(mesh)), (specs, PartitionSpec()))(state, batch)

    def _one_by_one(state: TrainState, plan: Plan, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        params, opt_state = said(state.params, state.opt_state, plan)
        if plan.layer_by_layer:
            check_streamed(settings)
            update = streamed_update(graphdef, settings, optimizer, state.step)
            params, opt_state, metrics = update(params, opt_state, batch)
        else:
            loss, grads = loss_and_grads(graphdef, settings, params, batch)
            metrics = {"loss": loss, "grad_norm": global_norm(grads)}
            if settings.clip == "layer":
                grads = clip_layers(settings, grads)
            rule = clipped_by(settings, optimizer, metrics["grad_norm"] if settings.clip == "global" else None)
            params, opt_state = update_in_turn(make_update(settings, rule, state.step), plan, grads, opt_state, params)
        return TrainState(state.step + 1, params, opt_state), metrics

    return step
