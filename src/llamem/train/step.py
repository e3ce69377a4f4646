"""One update of a Llama's parameters, with both features, as a function: to jit, or to compile for an absent chip."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from llamem.layers.context import local_positions
from llamem.layers.parts import gradients_together
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.llama.sharding import MeshShape, gather_weight, parameter_specs, shardings
from llamem.losses.cross_entropy import tiled_cross_entropy
from llamem.train.host_moments import host_sharding, update_in_turn, waits_on_host
from llamem.train.sharded_step import batch_spec, check_sizes, global_norm, on_mesh, sum_gradients, sum_over_batch


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything about a run but the model and the text.

    A step reads `batch_size` sequences of `seq_len` tokens, in `accumulate` equal parts one after the other. AdamW's
    rate rises linearly for `warmup_steps`, at most all steps but the last, then falls along a cosine to a tenth. Counts
    of steps are updates; 0 turns the regular evaluation or snapshot off. How a step is computed is not said here: see
    `llamem.Plan`.
    """

    steps: int = 100
    batch_size: int = 8
    seq_len: int = 512
    accumulate: int = 1
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 8
    snapshot_every: int = 50

    def __post_init__(self):
        least = {"warmup_steps": 0, "seed": 0, "eval_every": 0, "snapshot_every": 0}
        for name in ("steps", "batch_size", "seq_len", "accumulate", "eval_batches", *least):
            value, at_least = getattr(self, name), least.get(name, 1)
            if type(value) is not int or not at_least <= value < 2**31:
                raise ValueError(
                    f"{name}={value!r}: expected a whole number (a Python int) of at least {at_least}, below 2**31."
                )
        for name in ("learning_rate", "clip_norm", "weight_decay"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and name != "weight_decay"):
                limit = "of at least 0" if name == "weight_decay" else "above 0"
                raise ValueError(f"{name}={value!r}: expected a finite number (a Python float) {limit}.")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide into accumulate={self.accumulate} equal parts: "
                "choose a divisor, so that no sequence is dropped."
            )


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


def make_optimizer(settings: TrainSettings, norm: Callable[[Any], Array] = global_norm) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW (betas 0.9 and 0.95; no decay on norms) under warm-up and cosine decay.

    A warm-up of `steps` or more ends at the last step but one: the rate has its peak in the last.
    `norm` is the norm of all gradients, from those that one device has.
    """
    warmup = min(settings.warmup_steps, settings.steps - 1)
    peak = settings.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(peak / max(warmup, 1), peak, warmup, settings.steps, peak / 10)

    def decays(path: tuple, _: Any) -> bool:
        return "norm" not in jax.tree_util.keystr(path)

    def decayed(params: Any) -> Any:
        return jax.tree.map_with_path(decays, params)

    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=settings.weight_decay, mask=decayed)
    return optax.chain(_clip(settings.clip_norm, norm), adamw)


def _clip(max_norm: float, norm: Callable[[Any], Array]) -> optax.GradientTransformation:
    # optax.clip_by_global_norm would take the norm of one device's part.
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        total = norm(updates)
        within = total < max_norm
        return jax.tree.map(lambda g: jnp.where(within, g, (g / total.astype(g.dtype)) * max_norm), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def init_state(model: Llama, settings: TrainSettings) -> TrainState:
    """The state before the first step. Under `jax.eval_shape`, with an abstract model, it is shapes only."""
    _check_settings(settings)
    if not isinstance(model, Llama):
        raise TypeError(f"init_state({type(model).__name__}, ...): expected a llamem.Llama.")
    params = nnx.state(model, nnx.Param)
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(settings).init(params))


def first_state(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()) -> TrainState:
    """The state before the first step of a fresh model; on a mesh every device makes its own part."""
    mesh = MeshShape.of(plan.mesh)
    if mesh.devices == 1:
        state = init_state(make_model(config, settings, plan), settings)
        return _moments_on_host(state, jax.device_put) if plan.moments == "host" else state
    where = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, settings, plan))
    return jax.jit(lambda: init_state(make_model(config, settings), settings), out_shardings=where)()


def abstract_step(
    config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()
) -> tuple[Callable[..., Any], TrainState, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """The train step of a model that is never built, with the shapes of its arguments: what a compiler needs.

    Returns `(step, state, batch)` for `llamem.compile_report(step, state, batch, donate=(0,), target=...)`. With a
    mesh in the plan the shapes say how they lie on it. Raises ValueError for sizes that do not divide.
    """
    _check_settings(settings)
    mesh = MeshShape.of(plan.mesh)
    model = nnx.eval_shape(lambda: make_model(config, settings, plan))
    where = None
    if mesh.devices > 1:
        where = shardings(batch_spec(mesh), mesh)
    tokens_BT = jax.ShapeDtypeStruct((settings.batch_size, settings.seq_len), jnp.int32, sharding=where)
    return (
        make_train_step(nnx.graphdef(model), settings),
        abstract_state(config, settings, plan),
        (tokens_BT, tokens_BT),
    )


def abstract_state(config: LlamaConfig, settings: TrainSettings, plan: Plan = Plan()) -> TrainState:
    """The shapes and types of a training state, without a byte of it, and how they lie on the plan's mesh.

    Raises ValueError where weights, batch or sequence do not divide among its devices.
    """
    state = jax.eval_shape(lambda: init_state(make_model(config, settings), settings))
    mesh = MeshShape.of(plan.mesh)
    if plan.moments == "host":
        return _moments_on_host(state, lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where))
    if mesh.devices == 1:
        return state
    check_sizes(mesh, settings.batch_size, settings.seq_len, settings.accumulate)
    where = shardings(parameter_specs(state, mesh), mesh)
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, where)


def _moments_on_host(state: TrainState, put: Callable[[Any, Any], Any]) -> TrainState:
    where = host_sharding()

    def one(path: tuple, leaf: Any) -> Any:
        return put(leaf, where) if waits_on_host(path) else leaf

    return dataclasses.replace(state, opt_state=jax.tree.map_with_path(one, state.opt_state))


def loss_fn(
    graphdef: nnx.GraphDef, params: Any, inputs_BT: Int[Array, "B T"], targets_BT: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Mean cross-entropy in nats of the targets under the model, tiled as the model's plan says."""
    mesh = _mesh(graphdef, params)

    def share(params: Any, *batch: Array) -> Array:
        return sum_over_batch(local_loss(graphdef, params, *batch), mesh)

    specs = (parameter_specs(params, mesh), batch_spec(mesh), batch_spec(mesh))
    return on_mesh(share, mesh, specs, PartitionSpec())(params, inputs_BT, targets_BT)


def local_loss(
    graphdef: nnx.GraphDef, params: Any, inputs_BT: Int[Array, "B T"], targets_BT: Int[Array, "B T"]
) -> Float[Array, ""]:
    """One device's share of `loss_fn`, inside `shard_map`: over the devices that hold different tokens they sum to it.

    On one device all of it.
    """
    model = nnx.merge(graphdef, params)
    plan, mesh = model.plan, MeshShape.of(model.plan.mesh)
    hidden_BTD = model.hidden(inputs_BT)
    if mesh.context_axis:
        targets_BT = targets_BT[:, local_positions(targets_BT.shape[1], mesh.context_axis)]
    # Gathered once, before the loop over tiles; where the vocabulary is split, each device has its rows.
    head_VD = gather_weight("untied_head", model.head, mesh, hidden_BTD.dtype)
    if plan.saves_memory:  # the head's f32 gradient would stay for the whole backward pass
        hidden_BTD, head_VD = gradients_together(hidden_BTD, head_VD)
    shares = mesh.devices // mesh.tensor  # parts into which the tokens are cut
    if plan.loss_tiles is not None or mesh.tensor_axis:
        return tiled_cross_entropy(
            hidden_BTD,
            head_VD,
            targets_BT,
            num_tiles=plan.loss_tiles or 1,
            axis="vocab" if mesh.tensor_axis else plan.loss_axis,
            vocab_axis_name=mesh.tensor_axis,
            normalizer=None if shares == 1 else targets_BT.size * shares,
        )
    with jax.named_scope("logits"):  # by this name a timeline knows them
        logits_BTV = jnp.einsum("BTD,VD->BTV", hidden_BTD, head_VD, preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean() / shares


def _check_settings(settings: Any) -> None:
    if not isinstance(settings, TrainSettings):
        raise TypeError(f"settings={settings!r}: expected llamem.TrainSettings(steps=..., batch_size=..., ...).")


def make_train_step(
    graphdef: nnx.GraphDef, settings: TrainSettings
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """`step(state, (inputs_BT, targets_BT)) -> state, metrics`: one update, to be jitted with the state donated.

    With a mesh in the model's plan it is one program for every device of it, on states and batches that lie as
    `abstract_step` says. Metrics: `loss` (mean over tokens, nats), `grad_norm`.
    """
    _check_settings(settings)
    if not isinstance(graphdef, nnx.GraphDef):
        raise TypeError(f"make_train_step({type(graphdef).__name__}, ...): expected nnx.graphdef(model).")

    def step(state: TrainState, batch: tuple[Array, Array]) -> tuple[TrainState, dict[str, Array]]:
        plan = nnx.merge(graphdef, state.params).plan
        mesh = MeshShape.of(plan.mesh)
        norm = partial(global_norm, mesh=mesh)
        optimizer = make_optimizer(settings, norm)

        def update(state: TrainState, batch: tuple[Array, Array]) -> tuple[TrainState, dict[str, Array]]:
            loss, grads = loss_and_grads(graphdef, settings, state.params, batch)
            if plan.moments == "host":
                total = norm(grads)
                in_turn = make_optimizer(settings, lambda _: total)
                params, opt_state = update_in_turn(in_turn, grads, state.opt_state, state.params)
                return TrainState(state.step + 1, params, opt_state), {"loss": loss, "grad_norm": total}
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            metrics = {"loss": loss, "grad_norm": norm(grads)}
            return TrainState(state.step + 1, params, opt_state), metrics

        specs = parameter_specs(state, mesh)
        return on_mesh(update, mesh, (specs, batch_spec(mesh)), (specs, PartitionSpec()))(state, batch)

    return step


def loss_and_grads(
    graphdef: nnx.GraphDef, settings: TrainSettings, params: Any, batch: tuple[Array, Array]
) -> tuple[Float[Array, ""], Any]:
    """The mean loss and its gradients, each in the type of its parameter; on a mesh, inside `shard_map`, their parts.

    With `accumulate > 1` gradients are made and added inside a scan, in f32: autodiff through a loop over
    micro-batches, or a Python loop, would keep the residuals of all of them.
    """
    mesh = _mesh(graphdef, params)
    grad = jax.value_and_grad(lambda params, part: local_loss(graphdef, params, *part))
    if settings.accumulate == 1:
        loss, grads = grad(params, batch)
        return sum_over_batch(loss, mesh), sum_gradients(grads, mesh)
    parts = jax.tree.map(lambda a: a.reshape(settings.accumulate, -1, a.shape[-1]), batch)

    def add(total: Any, part: tuple[Array, Array]) -> tuple[Any, None]:
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grad(params, part)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
    (loss, grads), _ = jax.lax.scan(add, (jnp.zeros(()), zeros), parts)
    loss, grads = sum_over_batch(loss, mesh), sum_gradients(grads, mesh)
    loss, grads = jax.tree.map(lambda t: t / settings.accumulate, (loss, grads))
    return loss, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


def _mesh(graphdef: nnx.GraphDef, params: Any) -> MeshShape:
    return MeshShape.of(nnx.merge(graphdef, params).plan.mesh)
