"""The training loop: it can be interrupted anywhere and resumed exactly."""

import dataclasses
import math
import os
import sys
import time
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx

from llamem._extras import import_extra
from llamem.llama.config import LlamaConfig
from llamem.llama.host_memory import host_place, same_places
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.llama.sharding import shardings
from llamem.memory.gpu_offload import compile_lowered, offloads_rightly
from llamem.train.data import Batches, Corpus
from llamem.train.hosts import place, together
from llamem.train.interrupts import interruptible
from llamem.train.sharded_step import batch_spec
from llamem.train.snapshots import OnChange, Snapshots, fingerprint
from llamem.train.step import (
    TrainSettings,
    TrainState,
    abstract_state,
    first_state,
    loss_fn,
    make_model,
    make_train_step,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: the model as trained, its metrics (one dict per step), and whether it reached its end."""

    model: Llama
    metrics: list[dict[str, float]]
    finished: bool


def train(
    config: LlamaConfig,
    corpus: Corpus,
    settings: TrainSettings,
    output_dir: str | os.PathLike,
    *,
    plan: Plan = Plan(),
    progress: bool = True,
    on_change: OnChange = "refuse",
) -> Run:
    """Trains on `corpus.train` and evaluates on `corpus.heldout`, from the newest snapshot in `output_dir` if there is
    one.

    A resumed run continues the very same curve: batches depend on the step number alone, and parameters, moments and
    step are restored exactly. Ctrl-C ("interrupt kernel") or SIGTERM finishes the step, saves, and says how to go on.
    With other settings or another text the curve would be another one: that is refused, or, with
    `on_change="continue"`, printed and done. The plan may change.

    Writes `output_dir/metrics.jsonl` (step, loss, val_loss where evaluated, grad_norm, tokens_per_second, memory_bytes)
    and `output_dir/snapshots/`, training checkpoints by Orbax. `output_dir/run.lock` keeps other processes out.

    Raises, before anything is computed: TypeError for arguments of another kind, ValueError for a sequence beyond
    `max_seq_len`, a corpus too short or with ids outside the vocabulary, a mesh of more devices than there are or among
    which something does not divide, a damaged snapshot, or one of another model or other settings, BlockingIOError for
    a folder in which another process trains. FloatingPointError when the loss, the gradient or a parameter is not
    finite; what is not finite is never a snapshot to resume from.
    """
    _check_arguments(config, corpus, settings, output_dir, plan, on_change)
    size = (settings.batch_size, settings.seq_len)
    batches = Batches(corpus.train, *size, settings.seed, vocab_size=config.vocab_size)
    heldout = Batches(corpus.heldout, *size, vocab_size=config.vocab_size)
    model, decides = _identity(config, settings, corpus)
    same = {"configuration": model, "settings": {**decides, **dataclasses.asdict(settings)}, "plan": plan}
    with together(same), Snapshots(output_dir, model, decides) as snapshots:
        return _train(config, settings, plan, batches, heldout, snapshots, progress, on_change)


def _train(
    config: LlamaConfig,
    settings: TrainSettings,
    plan: Plan,
    batches: Batches,
    heldout: Batches,
    snapshots: Snapshots,
    progress: bool,
    on_change: OnChange,
) -> Run:
    state = _first_state(config, settings, plan, snapshots, on_change)
    first = done = int(state.step)
    metrics = snapshots.cut_metrics(up_to=first)
    mesh, first_host = plan.mesh, jax.process_index() == 0
    where = shardings(batch_spec(mesh), mesh) if mesh.devices > 1 else None
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, settings, plan)))
    evaluate = jax.jit(lambda params, batch: loss_fn(graphdef, params, *batch))

    def validation_loss(params: Any) -> float:
        count = min(settings.eval_batches, max(1, heldout.num_sequences // settings.batch_size))
        return float(np.mean([evaluate(params, place(heldout, i, where)) for i in range(count)]))

    places = same_places(state) if "host" in (plan.moments, plan.weights) else None
    jitted_step = jax.jit(make_train_step(graphdef, settings), donate_argnums=0, out_shardings=places)
    # Compiled before the clock starts, so that the first step's speed is a step's speed.
    with offloads_rightly():
        step = compile_lowered(jitted_step.lower(state, place(batches, 0, where)))
    with interruptible() as interrupted, _progress_bar(first, settings.steps, progress and first_host) as bar:
        while done < settings.steps and not interrupted(done):
            start = time.perf_counter()
            state, values = step(state, place(batches, done, where))
            done += 1
            row = {"step": done, **{name: float(value) for name, value in values.items()}}
            row["tokens_per_second"] = settings.batch_size * settings.seq_len / (time.perf_counter() - start)
            row["memory_bytes"] = memory_in_use()
            if not math.isfinite(row["loss"]) or not math.isfinite(row["grad_norm"]):
                # The parameters of the step before gave this, finite as they are: from there it would diverge again.
                snapshots.delete(done - 1)
                what = f"the loss is {row['loss']} and the gradient's norm {row['grad_norm']}"
                raise _diverged(what, done, snapshots)
            if done == settings.steps or (settings.eval_every and done % settings.eval_every == 0):
                row["val_loss"] = validation_loss(state.params)
                if not math.isfinite(row["val_loss"]):
                    raise _diverged(f"the validation loss is {row['val_loss']}", done, snapshots)
            metrics.append(row)
            snapshots.append_metrics(row)
            if settings.snapshot_every and done % settings.snapshot_every == 0:
                _save(snapshots, done, state)
            loss, speed, memory = row["loss"], row["tokens_per_second"], row["memory_bytes"] / 2**30
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s, {memory:.1f} GiB")
            bar.update()
    if snapshots.latest() != done:
        _save(snapshots, done, state)
    if done < settings.steps and first_host:
        print(f"Interrupted, and saved after step {done} of {settings.steps}. The same call goes on from there.")
    # Of a mesh the parameters stay where they are; JAX shares out the work of whoever calls the model.
    model = nnx.eval_shape(lambda: make_model(config, settings, plan.replace(mesh={})))
    return Run(nnx.merge(nnx.graphdef(model), state.params), metrics, finished=done == settings.steps)


def _first_state(
    config: LlamaConfig, settings: TrainSettings, plan: Plan, snapshots: Snapshots, on_change: OnChange
) -> TrainState:
    latest = snapshots.latest()
    if latest is None:
        return first_state(config, settings, plan)
    state = snapshots.restore(latest, abstract_state(config, settings, plan), on_change)
    if latest > settings.steps:
        raise ValueError(
            f"the newest snapshot in {snapshots.folder} is of step {latest}, beyond steps={settings.steps}: there is "
            "nothing left to train. Ask for more steps, or choose another output folder."
        )
    # It was read to where a compiler is told that its parts lie.
    return jax.tree.map(
        lambda a: jax.device_put(a, host_place()) if a.sharding.memory_kind == "pinned_host" else a, state
    )


def _save(snapshots: Snapshots, done: int, state: TrainState) -> None:
    try:
        snapshots.save(done, state)
    except FloatingPointError as error:
        raise _diverged(str(error).rstrip("."), done, snapshots) from None


def _diverged(what: str, done: int, snapshots: Snapshots) -> FloatingPointError:
    newest = snapshots.latest()
    if newest is None:
        where = "There is no good snapshot, so the next call begins at step 0: give it"
    else:
        where = f"The newest good snapshot is of step {newest}: go on from it, with on_change='continue' and"
    return FloatingPointError(f"{what} at step {done}. {where} a learning_rate below today's or more warmup_steps.")


def _check_arguments(
    config: LlamaConfig, corpus: Corpus, settings: TrainSettings, output_dir: Any, plan: Plan, on_change: str
) -> None:
    expected = {
        "config": (config, LlamaConfig, "llamem.LlamaConfig.from_name('tiny')"),
        "corpus": (corpus, Corpus, "llamem.train.load_corpus()"),
        "settings": (settings, TrainSettings, "llamem.TrainSettings()"),
        "output_dir": (output_dir, (str, os.PathLike), "a folder's name"),
        "plan": (plan, Plan, "llamem.Plan()"),
    }
    for name, (value, kind, example) in expected.items():
        if not isinstance(value, kind):
            raise TypeError(f"train({name}={value!r}): expected {example} or another of its kind.")
    if on_change not in get_args(OnChange):
        raise ValueError(f"train(on_change={on_change!r}): expected 'refuse' or 'continue'.")
    if settings.seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len={settings.seq_len} is longer than the model's max_seq_len={config.max_seq_len}: RoPE was not "
            "set up for such positions. Shorten the sequences or choose a model with a longer context."
        )
    plan.mesh.check_devices()
    if jax.process_count() > 1 and plan.mesh.devices != jax.device_count():
        raise ValueError(
            f"the plan's mesh {plan.mesh.axes} has {plan.mesh.devices} devices, and the "
            f"{jax.process_count()} hosts have {jax.device_count()} together: some would have nothing to do. Choose a "
            f"mesh of all of them, such as Plan(mesh={{'fsdp': {jax.device_count()}}})."
        )
    abstract_state(config, settings, plan)  # refuses what does not divide among the mesh


def memory_in_use() -> int:
    """Peak bytes in use on the device so far; where the backend keeps no statistics (CPU), bytes of the process now."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return import_extra("psutil", "the process's memory").Process().memory_info().rss


def _identity(
    config: LlamaConfig, settings: TrainSettings, corpus: Corpus
) -> tuple[dict[str, str], dict[str, int | float | str | None]]:
    """What a snapshot's model is, and what of the rest decides the curve."""
    model = {f"model {name}": str(value) for name, value in dataclasses.asdict(config).items()}
    watching = ("eval_every", "snapshot_every")  # when the curve is looked at or stored, not what it is
    new = ("clip", "rounding")  # since snapshots without them were written, which had what is the default now
    defaults = {name: getattr(TrainSettings, name) for name in new}
    decides = {name: value for name, value in dataclasses.asdict(settings).items() if name not in watching}
    decides = {name: value for name, value in decides.items() if name not in new or value != defaults[name]}
    texts = {"training data": fingerprint(corpus.train), "held-out data": fingerprint(corpus.heldout)}
    return model, {**decides, **texts}


def _progress_bar(first: int, steps: int, shown: bool) -> Any:
    tqdm = import_extra("tqdm", "the progress bar").tqdm  # not tqdm.auto: widgets do not survive on GitHub
    return tqdm(initial=first, total=steps, unit="step", disable=not shown, file=sys.stdout, mininterval=1.0)
