"""The training loop: it can be interrupted anywhere and resumed exactly."""

import contextlib
import dataclasses
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from llamem._extras import import_extra
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.train.data import Batches, Corpus
from llamem.train.snapshots import Snapshots, fingerprint
from llamem.train.step import TrainSettings, abstract_state, init_state, loss_fn, make_model, make_train_step


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
    output_dir: str | Path,
    *,
    plan: Plan = Plan(),
    progress: bool = True,
) -> Run:
    """Trains on `corpus.train` and evaluates on `corpus.heldout`, from the newest snapshot in `output_dir` if there is
    one.

    A resumed run continues the very same curve: batches depend on the step number alone, and parameters, moments and
    step are restored exactly. Ctrl-C (or "interrupt kernel") finishes the step, saves, and says how to go on.

    Writes `output_dir/metrics.jsonl` (step, loss, val_loss where evaluated, grad_norm, tokens_per_second, memory_bytes)
    and `output_dir/snapshots/`, training checkpoints by Orbax.

    Raises, before anything is computed or written: ValueError for a sequence beyond `max_seq_len`, a corpus too short
    or with ids outside the vocabulary, or a snapshot of another model or other data. FloatingPointError when the loss
    is not finite.
    """
    if settings.seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len={settings.seq_len} is longer than the model's max_seq_len={config.max_seq_len}: RoPE was not "
            "set up for such positions. Shorten the sequences or choose a model with a longer context."
        )
    size = (settings.batch_size, settings.seq_len)
    batches = Batches(corpus.train, *size, settings.seed, vocab_size=config.vocab_size)
    heldout = Batches(corpus.heldout, *size, vocab_size=config.vocab_size)
    snapshots = Snapshots(output_dir, identity=_identity(config, settings, corpus))

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, settings, plan)))
    latest = snapshots.latest()
    if latest is None:
        state = init_state(make_model(config, settings, plan), settings)
    else:
        state = snapshots.restore(latest, abstract_state(config, settings))
    first = int(state.step)
    metrics = snapshots.read_metrics(up_to=first)

    def validation_loss(params: Any) -> float:
        count = min(settings.eval_batches, max(1, heldout.num_sequences // settings.batch_size))
        return float(np.mean([evaluate(params, tuple(heldout.batch_at(i))) for i in range(count)]))

    evaluate = jax.jit(lambda params, batch: loss_fn(graphdef, params, *batch))
    jitted_step = jax.jit(make_train_step(graphdef, settings), donate_argnums=0)
    # Compiled before the clock starts, so that the first step's speed is a step's speed.
    step = jitted_step.lower(state, tuple(batches.batch_at(0))).compile()
    done = first
    with _interruptible() as interrupted, _progress_bar(first, settings.steps, progress) as bar:
        while done < settings.steps and not interrupted.is_set():
            start = time.perf_counter()
            state, values = step(state, tuple(batches.batch_at(done)))
            done += 1
            row = {"step": done, **{name: float(value) for name, value in values.items()}}
            row["tokens_per_second"] = size[0] * size[1] / (time.perf_counter() - start)
            row["memory_bytes"] = memory_in_use()
            if not math.isfinite(row["loss"]):
                newest = snapshots.latest() or 0
                raise FloatingPointError(
                    f"the loss is {row['loss']} at step {done}. The newest snapshot is of step {newest}; "
                    f"resume from it with a learning_rate below {settings.learning_rate} or more warmup_steps."
                )
            if done == settings.steps or (settings.eval_every and done % settings.eval_every == 0):
                row["val_loss"] = validation_loss(state.params)
            metrics.append(row)
            snapshots.append_metrics(row)
            if settings.snapshot_every and done % settings.snapshot_every == 0:
                snapshots.save(done, state)
            bar.set_postfix_str(
                f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s, {row['memory_bytes'] / 2**30:.1f} "
                f"GiB"
            )
            bar.update()
    if snapshots.latest() != done:
        snapshots.save(done, state)
    if done < settings.steps:
        print(f"Interrupted, and saved after step {done} of {settings.steps}. The same call goes on from there.")
    return Run(nnx.merge(graphdef, state.params), metrics, finished=done == settings.steps)


def memory_in_use() -> int:
    """Peak bytes in use on the device so far; where the backend keeps no statistics (CPU), bytes of the process now."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return import_extra("psutil", "the process's memory").Process().memory_info().rss


def _identity(config: LlamaConfig, settings: TrainSettings, corpus: Corpus) -> dict[str, Any]:
    model = {f"model {name}": str(value) for name, value in dataclasses.asdict(config).items()}
    order = {name: getattr(settings, name) for name in ("batch_size", "seq_len", "seed")}
    return {**model, **order, "training data": fingerprint(corpus.train)}


def _progress_bar(first: int, steps: int, shown: bool) -> Any:
    tqdm = import_extra("tqdm", "the progress bar").tqdm  # not tqdm.auto: widgets do not survive on GitHub
    return tqdm(initial=first, total=steps, unit="step", disable=not shown, file=sys.stdout, mininterval=1.0)


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    # An exception in the middle of a step would lose the state, whose buffers the step was given; so the first Ctrl-C
    # is
    # only noted. A second one acts as usual.
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def note(*_: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
