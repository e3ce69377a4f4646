"""What a run trains: every weight of a model, or adapters over a frozen one. The loop knows neither from the other."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamem.adapters.lora import Adapters, LoraConfig
from llamem.adapters.lora_step import init_lora_state, lora_losses, make_lora_step, tokens_of_adapters
from llamem.host.memory import same_places
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.quantized.quantized_model import check_trainable, graphdef_of, plain_params
from llamem.runs.step_of_plan import abstract_state_at, init_state_at, make_train_step_at, mean_loss, plain_graphdef
from llamem.train.place import Place
from llamem.train.plain_step import IGNORED, TrainState
from llamem.train.settings import TrainSettings
from llamem.train.snapshots import checksum

Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The state of a run before its first step, what changes it and what judges it.

    `identity`: what a snapshot of it belongs to, by name. `abstract`: the state's shapes, and where they lie.
    `step(state, *frozen, batch)` returns the next state and metrics; `losses(state.params, *frozen, batch)` the mean
    loss and the number of targets that it is of, or those of each adapter. `result(state)`: the model, and adapters
    where they were trained.
    """

    identity: dict[str, str]
    abstract: TrainState
    begin: Callable[[], TrainState]
    step: Callable[..., tuple[TrainState, dict[str, Any]]]
    losses: Callable[..., Any]
    result: Callable[[TrainState], tuple[Llama, Adapters | None]]
    frozen: tuple[Any, ...] = ()

    def compile(self, state: TrainState, batch: Any) -> tuple[Step, int | None]:
        """Return the compiled `step(state, batch)`, to which the state is given up, and its `compiled_peak`."""
        jitted = jax.jit(self.step, donate_argnums=0, out_shardings=same_places(state))
        compiled = jitted.lower(state, *self.frozen, batch).compile()
        return lambda state, batch: compiled(state, *self.frozen, batch), compiled_peak(compiled)


def compiled_peak(compiled: jax.stages.Compiled) -> int | None:
    """Return what a program needs on a device, by its compiler, in bytes; None where that says nothing.

    XLA's own `peak_memory_in_bytes` leaves out temporaries on a CPU, and counts the host's memory where arguments are.
    """
    sizes = compiled.memory_analysis()
    if sizes is None:
        return None
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return int(kept + sizes.temp_size_in_bytes)


def trained_weights(config: LlamaConfig, settings: TrainSettings, place: Place, init: Llama | None) -> Trained:
    """Return every weight as what is trained, of a fresh model or from `init` on."""
    graphdef, params = plain_graphdef(config, place.plan), None
    if init is not None:
        check_trainable(init)
        _check_same_model(config, init)
        params = plain_params(init)
    return Trained(
        {} if init is None else {"begun from": "given weights"},
        abstract_state_at(place, config, settings),
        lambda: init_state_at(place, config, settings, params),
        make_train_step_at(place, config, settings),
        jax.jit(lambda params, batch: (mean_loss(place, graphdef, params, batch), jnp.sum(batch[1] != IGNORED))),
        lambda state: (_model_of(config, place.alone(), state.params), None),
    )


def trained_adapters(
    config: LlamaConfig, settings: TrainSettings, place: Place, init: Llama | None, lora: LoraConfig | Adapters
) -> Trained:
    """Return adapters as what is trained, new ones or given ones, over the frozen weights of `init`."""
    if init is None:
        raise ValueError(
            "train(lora=...) without init: adapters of random weights learn nothing. Give the model that they adapt, "
            "init=llamem.load_pretrained(...)."
        )
    _check_same_model(config, init)
    step = make_lora_step(config, settings, place)
    base = place.arrays(plain_params(init), "parameters")
    graphdef = graphdef_of(config, place.plan, base)

    def begin() -> TrainState:
        first = lora if isinstance(lora, Adapters) else Adapters.create(config, lora, rngs=nnx.Rngs(settings.seed))
        return place.arrays(init_lora_state(jax.tree.map(jnp.copy, first), settings), "same")

    def losses(adapters: Adapters, base: Any, batch: Any) -> tuple[Any, Any]:
        return lora_losses(place, graphdef, base, adapters, batch), tokens_of_adapters(adapters.count, batch)

    return Trained(
        {
            "weights under the adapters": checksum(base),
            "adapters": repr(lora if isinstance(lora, LoraConfig) else "given"),
        },
        place.abstract(jax.eval_shape(begin), "same"),
        begin,
        step,
        jax.jit(losses),
        lambda state: (_model_of(config, place.alone(), base), state.params),
        (base,),
    )


def _check_same_model(config: LlamaConfig, init: Llama) -> None:
    """Raise ValueError where the weights are of another model than the config: shapes alone would not tell."""
    ours, theirs = (c.replace(compute_dtype=config.compute_dtype).architecture for c in (config, init.config))
    if other := [f"{name}: {theirs[name]}, not {ours[name]}" for name in ours if ours[name] != theirs[name]]:
        raise ValueError(
            f"train(config, init=...): the weights are of another model than config says ({'; '.join(other[:4])}). "
            "Pass the model's own: train(model.config, ..., init=model)."
        )


def _model_of(config: LlamaConfig, place: Place, params: Any) -> Llama:
    """Return the model of these parameters, which are where they are."""
    return place.put(nnx.merge(graphdef_of(config, place.plan, params), params))
