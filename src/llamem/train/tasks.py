"""What a run trains: every weight of a model, or adapters over a frozen one. The loop knows neither from the other."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from llamem._checks import show
from llamem.llama.config import LlamaConfig
from llamem.llama.host_memory import host_place, of_matrices, same_places
from llamem.llama.lora import Adapters, LoraConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.llama.pretrained import load_pretrained
from llamem.llama.quantized_model import check_trainable
from llamem.llama.sharding import parameter_specs, shardings
from llamem.memory.gpu_offload import compile_lowered, offloads_rightly
from llamem.train.adapter_step import init_lora_state, lora_losses, make_lora_step
from llamem.train.batch_loss import loss_fn
from llamem.train.settings import TrainSettings
from llamem.train.sharded_step import check_sizes
from llamem.train.snapshots import checksum
from llamem.train.step import Optimizer, TrainState, abstract_state, graphdef_of, init_state, make_train_step

Init = Llama | str | os.PathLike | None


@dataclasses.dataclass(frozen=True)
class Task:
    """The state of a run before its first step, what changes it and what judges it.

    `identity`: what a snapshot of it belongs to, by name. `abstract`: the state's shapes, and where they lie.
    `compile(state, batch)` returns `step(state, batch) -> state, metrics`. `evaluate(state, batch)`: the mean loss, or
    that of each adapter. `result(state)`: the model, and adapters where they were trained.
    """

    identity: dict[str, str]
    abstract: TrainState
    begin: Callable[[], TrainState]
    compile: Callable[[TrainState, Any], Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]]
    evaluate: Callable[[TrainState, Any], Any]
    result: Callable[[TrainState], tuple[Llama, Adapters | None]]


def train_weights(config: LlamaConfig, settings: TrainSettings, plan: Plan, optimizer: Optimizer, init: Init) -> Task:
    """Return the task of training every weight, of a fresh model or from `init` on."""
    step, graphdef = make_train_step(config, settings, plan, optimizer), graphdef_of(config, plan)
    evaluate = jax.jit(lambda params, batch: loss_fn(graphdef, params, *batch))

    # Refused before anything is written.
    given = _trainable(_loaded(init, config, plan)) if isinstance(init, Llama) else None

    def begin() -> TrainState:
        params = given if init is None or given is not None else _trainable(_loaded(init, config, plan))
        return init_state(config, settings, plan, optimizer, params=params)

    def compile(state: TrainState, batch: Any) -> Any:
        places = same_places(state) if "host" in (plan.moments, plan.weights) else None
        with offloads_rightly():
            return compile_lowered(jax.jit(step, donate_argnums=0, out_shardings=places).lower(state, batch))

    return Task(
        {} if init is None else {"begun from": "given weights"},
        abstract_state(config, settings, plan, optimizer),
        begin,
        compile,
        lambda state, batch: evaluate(state.params, batch),
        lambda state: (_off_the_mesh(config, plan, state.params), None),
    )


def train_adapters(
    config: LlamaConfig,
    settings: TrainSettings,
    plan: Plan,
    optimizer: Optimizer,
    init: Init,
    lora: LoraConfig | Adapters,
    learning_rates: Sequence[float] | None,
) -> Task:
    """Return the task of training adapters, new ones or given ones, over the frozen weights of `init`."""
    if init is None:
        raise ValueError(
            "train(lora=...) without init: adapters of random weights learn nothing. Give the model that they adapt, "
            "init=llamem.load_pretrained(...), or its folder."
        )
    step = make_lora_step(config, settings, plan, optimizer, learning_rates=learning_rates)
    if plan.mesh.devices > 1:
        check_sizes(plan.mesh, settings.batch_size, settings.seq_len, settings.accumulate)
    base = _placed(nnx.state(_loaded(init, config, plan)), plan)
    graphdef = graphdef_of(config, plan, base)
    everywhere = NamedSharding(plan.mesh.mesh(), PartitionSpec()) if plan.mesh.devices > 1 else None

    def begin() -> TrainState:
        given = lora if isinstance(lora, Adapters) else Adapters.create(config, lora, rngs=nnx.Rngs(settings.seed))
        state = init_lora_state(jax.tree.map(jnp.copy, given), settings, optimizer)
        return state if everywhere is None else jax.device_put(state, everywhere)

    abstract = jax.tree.map(lambda leaf: leaf.update(sharding=everywhere), jax.eval_shape(begin))
    evaluate = jax.jit(lambda base, adapters, batch: lora_losses(graphdef, base, adapters, batch))

    def compile(state: TrainState, batch: Any) -> Any:
        with offloads_rightly():
            compiled = compile_lowered(jax.jit(step, donate_argnums=0).lower(state, base, batch))
        return lambda state, batch: compiled(state, base, batch)

    return Task(
        {
            "weights under the adapters": checksum(base),
            "adapters": show(lora if isinstance(lora, LoraConfig) else "given"),
        },
        abstract,
        begin,
        compile,
        lambda state, batch: evaluate(base, state.params, batch),
        lambda state: (_off_the_mesh(config, plan, base), state.params),
    )


def _loaded(init: Any, config: LlamaConfig, plan: Plan) -> Llama:
    """Return a model as it is given, or that of a folder, file or hub name."""
    if isinstance(init, (str, os.PathLike)):
        init = load_pretrained(init, dtype=config.param_dtype, compute_dtype=config.compute_dtype, plan=plan)
    if not isinstance(init, Llama):
        raise TypeError(f"train(init={show(init)}): expected a llamem.Llama, or a folder or hub name of one.")
    ours, theirs = (dataclasses.asdict(c.replace(compute_dtype=config.compute_dtype)) for c in (config, init.config))
    if other := [f"{name}: {theirs[name]}, not {ours[name]}" for name in ours if ours[name] != theirs[name]]:
        raise ValueError(
            f"train(config, init=...): the weights are of another model than config says ({'; '.join(other[:4])}). "
            "Pass the model's own: train(model.config, ..., init=model)."
        )
    return init


def _trainable(model: Llama) -> Any:
    """Return the parameters of a model that can be trained itself."""
    check_trainable(model)
    return nnx.state(model, nnx.Param)


def _placed(tree: Any, plan: Plan) -> Any:
    """Return parameters where the plan says: on their part of a mesh, or on the host."""
    if plan.mesh.devices > 1:
        return jax.device_put(tree, shardings(parameter_specs(tree, plan.mesh), plan.mesh))
    return of_matrices(tree, lambda a: jax.device_put(a, host_place())) if plan.weights == "host" else tree


def _off_the_mesh(config: LlamaConfig, plan: Plan, params: Any) -> Llama:
    """Return the model, its parameters where they are: JAX shares out the work of whoever calls it."""
    return nnx.merge(graphdef_of(config, plan.replace(mesh={}), params), params)
