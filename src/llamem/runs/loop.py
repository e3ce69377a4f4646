"""The training loop, which can be interrupted anywhere and resumed exactly, and what it returns.

A run's folder is what others read: weights or adapters, their tokenizer, a card.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxmem.common.checks import import_extra, show
from jaxmem.common.files import user_path, whole_folder
from jaxmem.common.printing import size_text
from llamem.adapters.lora import Adapters, LoraConfig, merge_adapter
from llamem.files.peft import save_adapter
from llamem.files.pretrained import save_pretrained
from llamem.host.memory import host_place
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan
from llamem.mesh.specs import check_devices
from llamem.quantized.quantized_model import dequantize, is_quantized
from llamem.runs.progress import OnStep, showing
from llamem.runs.step_of_plan import place_of
from llamem.runs.weights_or_adapters import Trained, trained_adapters, trained_weights
from llamem.text.tokenizer import Tokenizer
from llamem.train.chats import Chats
from llamem.train.data import AdapterBatches, BatchSource, Corpus, Once
from llamem.train.hosts import agreed, place_batch
from llamem.train.optimizers import make_schedule, rounding_of
from llamem.train.place import Place
from llamem.train.plain_step import TrainState
from llamem.train.settings import Rounding, TrainSettings
from llamem.train.snapshots import OnChange, Snapshots


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: the model, its metrics (one dict per step), whether it reached its end, and the adapters it trained.

    `described`: data, settings and plan in words, for the card.
    """

    model: Llama
    metrics: list[dict[str, Any]]
    finished: bool
    adapters: Adapters | None = None
    described: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def save(
        self, folder: str | os.PathLike, tokenizer: Tokenizer | None = None, *, merge: bool = False, base: str = ""
    ) -> Path:
        """Write a Hugging Face folder of what was trained, with a card, and return it.

        The model's weights as `transformers` reads them, or the adapters as `peft` does: one in the folder, several in
        `adapter_0`, `adapter_1` .. inside it. `tokenizer`: written beside them. `merge`: the one adapter added into the
        weights, which blocks of four or eight bits leave for that. `base`: the hub name or folder that the adapters
        name as their base.

        The folder appears when all of it is written. Raise FileExistsError where it exists and is not empty, ValueError
        for `merge` without exactly one adapter.
        """
        folder, count = user_path(folder), 0 if self.adapters is None else self.adapters.count
        if merge and count != 1:
            raise ValueError(
                f"save(merge=True): one adapter can be added into the weights, and this run has {count}. Choose one: "
                "llamem.save_pretrained(llamem.merge_adapter(run.model, run.adapters, 0), folder)."
            )
        with whole_folder(folder) as unfinished:
            if self.adapters is None or merge:
                save_pretrained(self._merged() if merge else self.model, unfinished)
            for i in range(0 if merge else count):
                assert self.adapters is not None
                save_adapter(self.adapters, i, unfinished if count == 1 else unfinished / f"adapter_{i}", base=base)
            if tokenizer is not None:
                tokenizer.save(unfinished)
            (unfinished / "README.md").write_text(self._card(folder.name, base, merge), encoding="utf-8")
        return folder

    def _merged(self) -> Llama:
        assert self.adapters is not None
        return merge_adapter(dequantize(self.model) if is_quantized(self.model) else self.model, self.adapters, 0)

    def _card(self, name: str, base: str, merge: bool) -> str:
        """Return the folder's README: what Hugging Face's hub reads between the dashes, then a table for people."""
        adapters = self.adapters is not None and not merge
        known = f"base_model: {base}\n" if base else ""
        head = f"---\nlibrary_name: {'peft' if adapters else 'transformers'}\n{known}tags: [llamem]\n---\n"
        rows = {"what": "LoRA adapters" if adapters else "weights, adapters added" if merge else "weights"}
        rows |= {**self.described, "base": base or "not named"}
        rows["steps"] = f"{len(self.metrics)}{'' if self.finished else ', not finished'}"
        for key, words in (("loss", "loss"), ("val_loss", "loss on held-out data")):
            values = [row[key] for row in self.metrics if key in row]
            if values:
                rows[words] = f"{values[0]:.4f} at first, {values[-1]:.4f} at last"
        packages = ("llamem", "jax", "flax", "optax")
        rows["versions"] = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
        lines = [f"| {key} | {value.replace('|', '/')} |" for key, value in rows.items()]
        return f"{head}\n# {name}\n\n| | |\n|---|---|\n" + "\n".join(lines) + "\n"


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[int], bool]]:
    """Yield `stop(done)`, to be asked after each step, `done` of them: whether to end here.

    An exception in the middle of a step would lose the state, whose buffers the step was given; so the first Ctrl-C or
    SIGTERM (a cloud takes its machine back) is only noted. A second one acts as usual. Of several hosts any may be told
    to stop: they agree on the step after which all do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda done: False
    elif jax.process_count() > 1:
        # JAX's runtime listens for SIGTERM itself, and tells the other hosts.
        with _noting([signal.SIGINT], lambda: os.kill(os.getpid(), signal.SIGTERM)):
            yield multihost_utils.reached_preemption_sync_point
    else:
        noted = threading.Event()
        with _noting([signal.SIGINT, signal.SIGTERM], noted.set):
            yield lambda done: noted.is_set()


@contextlib.contextmanager
def _noting(signals: list[signal.Signals], note: Callable[[], None]) -> Iterator[None]:
    def once(*_: Any) -> None:
        restore()
        note()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: a handler that was not set from Python

    before = {number: signal.signal(number, once) for number in signals}
    try:
        yield
    finally:
        restore()


Data = Corpus | Chats | Sequence[Corpus | Chats]


def train(
    config: LlamaConfig,
    corpus: Data,
    settings: TrainSettings,
    output_dir: str | os.PathLike,
    *,
    plan: Plan = Plan(),
    init: Llama | None = None,
    lora: LoraConfig | Adapters | None = None,
    progress: bool = True,
    on_step: OnStep | None = None,
    on_change: OnChange = "refuse",
) -> Run:
    """Train on text or chats and evaluate on their held-out part, from the newest snapshot in `output_dir` if any.

    Args:
        config: the model's; of a loaded one `model.config`.
        corpus: of `load_corpus` or `load_chats`. Several adapters may each have their own: a sequence of as many.
        settings: steps, sizes, rates.
        output_dir: gets `metrics.jsonl` (step, loss, val_loss where evaluated, grad_norm, learning_rate,
            tokens_per_second, memory_bytes), `run.json` (data, settings, plan, chip and compiled peak in words),
            `snapshots/`, training checkpoints by Orbax, and `run.lock`, which keeps other processes out.
        plan: how a step is computed. It may change from one call to the next.
        init: a model whose weights the run begins with; without it random ones. It stays as it is, so weights that are
            trained are in memory twice.
        lora: train adapters over the frozen `init` instead of its weights: new ones, or given ones. Several share a
            batch out: row `i` is adapter `i % A`'s; metrics are then means over adapters, with a list of each one's.
        progress: whether to show a bar, or where there is no terminal a line every ten seconds.
        on_step: called on the first host with each step's row of `metrics.jsonl`, after it was written.
        on_change: with other settings, text or base the curve would be another one: "refuse", or "continue" from the
            snapshot and say so.

    A resumed run continues the very same curve: batches depend on the number of sequences read, and what is trained,
    moments and step are restored exactly. With another `batch_size` it goes on with the next unread sequence; another
    text, `seed` or `seq_len` begins another order. Ctrl-C ("interrupt kernel") or SIGTERM finishes the step, saves, and
    says how to go on. A damaged snapshot is named in a warning, and the one before it taken.

    Raise, before anything is computed: ValueError for a sequence beyond `max_seq_len`, a corpus too short or with ids
    outside the vocabulary, a mesh of more devices than there are or among which something does not divide, weights of
    another model, snapshots of another model or other settings or all of them damaged; BlockingIOError for a folder in
    which another process trains, OSError for one that cannot be written. FloatingPointError when the loss, the gradient
    or a parameter is not finite; what is not finite is never a snapshot to resume from. The snapshot from which it came
    is set aside as `snapshots/diverged-STEP`, unless it is the only one or another process wrote it.
    """
    place = place_of(plan)
    _check_sizes(config, settings, place)
    corpora: list[Any] = list(corpus) if isinstance(corpus, list | tuple) else [corpus]
    if other := [data for data in corpora if not isinstance(data, Corpus | Chats)]:
        raise TypeError(f"train(corpus={show(other[0])}): expected what load_corpus or load_chats returns.")
    if not isinstance(init, Llama | None):
        raise TypeError(f"train(init={show(init)}): expected a model, such as llamem.load_pretrained(folder).")
    if init is not None:
        config = config.replace(generation_config=init.config.generation_config)
    batches, heldout = _batches(config, corpora, settings, lora)
    if lora is None:
        trained = trained_weights(config, settings, place, init)
    else:
        trained = trained_adapters(config, settings, place, init, lora)
    rounding = rounding_of(settings, jnp.float32 if lora else config.param_dtype)
    model, decides = _identity(config, settings, corpora)
    decides |= {"rounding": rounding, **trained.identity}
    same = {"configuration": model, "settings": {**decides, **dataclasses.asdict(settings)}, "plan": plan}
    described = {"data": "; ".join(data.described for data in corpora), "settings": str(settings), "plan": str(plan)}
    if lora is None:
        described["types"] = _types_in_words(config, rounding)
    with agreed(same), Snapshots(output_dir, model, decides) as snapshots:
        return _train(trained, settings, place, batches, heldout, snapshots, described, progress, on_step, on_change)


def _train(
    trained: Trained,
    settings: TrainSettings,
    place: Place,
    batches: BatchSource,
    heldout: BatchSource | None,
    snapshots: Snapshots,
    described: dict[str, str],
    progress: bool,
    on_step: OnStep | None,
    on_change: OnChange,
) -> Run:
    done, state = _first_state(trained, settings, batches, snapshots, on_change)
    first, metrics = done, snapshots.cut_metrics(up_to=done)

    def validation_loss(state: TrainState) -> dict[str, Any]:
        if heldout is None:
            return {}
        count = min(settings.eval_batches, -(-heldout.num_sequences // settings.batch_size))
        total = counted = np.zeros(())
        for i in range(count):
            batch = place_batch(heldout, i, place.of_batch)
            loss, tokens = map(np.float64, trained.losses(state.params, *trained.frozen, batch))
            total, counted = total + np.where(tokens > 0, loss * tokens, 0), counted + tokens
        return _numbers("val_loss", total / counted)

    # Compiled before the clock starts, so that the first step's speed is a step's speed.
    step, peak = trained.compile(state, place_batch(batches, done, place.of_batch))
    described |= _on_chip(peak)
    snapshots.describe(described)
    rate_after = jax.jit(make_schedule(settings))
    with interruptible() as interrupted, showing(first, settings.steps, progress, on_step) as show:
        while done < settings.steps and not interrupted(done):
            start = time.perf_counter()
            state, values = step(state, place_batch(batches, done, place.of_batch))
            done += 1
            row = {"step": done, **_numbers("loss", values["loss"]), **_numbers("grad_norm", values["grad_norm"])}
            row["tokens_per_second"] = settings.batch_size * settings.seq_len / (time.perf_counter() - start)
            row |= {"memory_bytes": memory_in_use(), "learning_rate": float(rate_after(done - 1))}
            if not math.isfinite(row["loss"]) or not math.isfinite(row["grad_norm"]):
                # The parameters of the step before gave this, finite as they are: from there it would diverge again.
                snapshots.distrust(done - 1)
                what = f"the loss is {row['loss']} and the gradient's norm {row['grad_norm']}"
                raise _diverged(what, done, snapshots)
            if done == settings.steps or (settings.eval_every and done % settings.eval_every == 0):
                row |= validation_loss(state)
                if not math.isfinite(row.get("val_loss", 0.0)):
                    raise _diverged(f"the validation loss is {row['val_loss']}", done, snapshots)
            metrics.append(row)
            snapshots.append_metrics(row)
            if settings.snapshot_every and done % settings.snapshot_every == 0:
                _save(snapshots, done, state, batches)
            show(row)
    if snapshots.latest() != done:
        _save(snapshots, done, state, batches)
    if done < settings.steps and jax.process_index() == 0:
        print(f"Interrupted, and saved after step {done} of {settings.steps}. The same call goes on from there.")
    model, adapters = trained.result(state)
    return Run(model, metrics, done == settings.steps, adapters, described)


def _first_state(
    trained: Trained, settings: TrainSettings, batches: BatchSource, snapshots: Snapshots, on_change: OnChange
) -> tuple[int, TrainState]:
    if snapshots.latest() is None:
        return 0, trained.begin()
    step, state, about = snapshots.restore(trained.abstract, on_change)
    if step > settings.steps:
        raise ValueError(
            f"the newest snapshot in {snapshots.folder} is of step {step}, beyond steps={settings.steps}: there is "
            "nothing left to train. Ask for more steps, or choose another output folder."
        )

    _go_on_reading(batches, step, about, snapshots.about)

    def put(a: jax.Array) -> jax.Array:  # Orbax read it to where a compiler is told that it lies
        return jax.device_put(a, host_place()) if a.sharding.memory_kind == "pinned_host" else a

    return step, jax.tree.map(put, state)


def _go_on_reading(batches: BatchSource, step: int, stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Let the batches go on after the sequences that were read, or from the start of another order, and say so."""
    before, settings = stored["settings"], now["settings"]
    read = stored.get("read", step * before["batch_size"])
    changed = [name for name in settings if settings[name] != before.get(name)]
    words = ""
    if order := [name for name in changed if name in ("seq_len", "seed") or name.startswith("training data")]:
        words = (
            f"With another {', '.join(order)} the sequences come in another order, and from its beginning: of what the "
            f"{read:,} sequences before held, all comes again."
        )
        read = 0
    elif "batch_size" in changed:
        words = f"The {read:,} sequences that were read are not read again, and none is left out."
    batches.continue_after(step, read)
    if words and jax.process_index() == 0:
        print(words)


def _batches(
    config: LlamaConfig, corpora: list[Corpus | Chats], settings: TrainSettings, lora: LoraConfig | Adapters | None
) -> tuple[BatchSource, BatchSource | None]:
    """Return the batches to train on, and those held out; adapters that share one text read other parts of it.

    Of corpora some of which hold nothing out none is evaluated: their losses are one row.
    """
    count = lora.count if isinstance(lora, Adapters) else len(lora.ranks) if lora is not None else 1
    if len(corpora) not in (1, count):
        raise ValueError(f"{len(corpora)} corpora for {count} adapters: give one for all, or one for each.")
    if settings.batch_size % (count * settings.accumulate):
        raise ValueError(
            f"batch_size={settings.batch_size} does not divide among {count} adapters in "
            f"accumulate={settings.accumulate} parts: choose a multiple of {count * settings.accumulate}."
        )
    size = settings.batch_size // count, settings.seq_len
    pairs = [corpora[i % len(corpora)].batches(*size, settings.seed + i, config.vocab_size) for i in range(count)]
    for data, (train, heldout) in zip(corpora, pairs, strict=False):
        _print_cut(train, "")
        if heldout is not None:
            _print_cut(heldout, "Held out: ")
        note = _rows_without_a_token(data.vocab_size, config.vocab_size)
        if note and jax.process_index() == 0:
            print(note)
    heldouts = [Once(heldout) for _, heldout in pairs if heldout is not None]
    if lora is None:
        return pairs[0][0], heldouts[0] if heldouts else None
    return AdapterBatches([train for train, _ in pairs]), AdapterBatches(heldouts) if len(heldouts) == count else None


def _rows_without_a_token(of_tokenizer: int, of_table: int) -> str:
    if of_tokenizer >= of_table:
        return ""
    return (
        f"The model's table has {of_table:,} entries and the tokenizer {of_tokenizer:,}: the last "
        f"{of_table - of_tokenizer:,} are no token. They are padding, or the tokenizer is another model's."
    )


def _print_cut(batches: BatchSource, which: str) -> None:
    if (cut := getattr(batches, "cut", "")) and jax.process_index() == 0:
        print(f"{which}{cut}")


def _numbers(name: str, value: Any) -> dict[str, Any]:
    """Return a metric as JSON: its mean over adapters, some perhaps without a token, and that of each of several."""
    each = np.asarray(value, np.float64)
    if each.size == 1:
        return {name: float(each.reshape(()))}
    return {name: float(np.mean(each)), f"{name}_of_adapters": each.tolist()}


def _save(snapshots: Snapshots, done: int, state: TrainState, batches: BatchSource) -> None:
    try:
        snapshots.save(done, state, read=batches.read_before(done))
    except FloatingPointError as error:
        raise _diverged(str(error).rstrip("."), done, snapshots) from None


def _diverged(what: str, done: int, snapshots: Snapshots) -> FloatingPointError:
    newest, gentler = snapshots.latest(), "a learning_rate below today's or more warmup_steps"
    if newest is None:
        where = f"There is no good snapshot, so the next call begins at step 0: give it {gentler}."
    elif newest < done - 1:
        where = f"The newest good snapshot is of step {newest}: go on from it, with on_change='continue' and {gentler}."
    else:
        where = (
            f"It came from the weights of the newest snapshot, of step {newest}, which stays. Where another process "
            "went on from such weights before, what is new may be the cause: the chip, its driver, the plan. Otherwise "
            f"begin again in another output folder, or go on with on_change='continue', with {gentler}."
        )
    return FloatingPointError(f"{what} at step {done}. {where}")


def _check_sizes(config: LlamaConfig, settings: TrainSettings, place: Place) -> None:
    if settings.seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len={settings.seq_len} is longer than the model's max_seq_len={config.max_seq_len}: RoPE was not "
            "set up for such positions. Shorten the sequences or choose a model with a longer context."
        )
    mesh = place.plan.mesh
    check_devices(mesh)
    if jax.process_count() > 1 and mesh.devices != jax.device_count():
        raise ValueError(
            f"the plan's mesh {mesh.axes} has {mesh.devices} devices, and the {jax.process_count()} hosts have "
            f"{jax.device_count()} together: some would have nothing to do. Choose a mesh of all of them, such as "
            f"Plan(mesh={{'fsdp': {jax.device_count()}}})."
        )
    place.check(settings)


def _types_in_words(config: LlamaConfig, rounding: Rounding) -> str:
    weights, products = config.param_dtype.name, config.compute_dtype.name
    lost = ", so that updates below their last bit were lost" if jnp.finfo(config.param_dtype).bits < 32 else ""
    rounded = ", rounded stochastically" if rounding == "stochastic" else f", rounded to the nearest{lost}"
    return f"weights and moments {weights}{rounded}; products {products}"


def _on_chip(peak: int | None) -> dict[str, str]:
    """Return the devices of a run in words, and the peak of its step on one of them, by the compiler."""
    hosts = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    words = {"chip": f"{jax.device_count()} x {jax.devices()[0].device_kind}{hosts}"}
    if peak is not None:
        words["compiled peak"] = f"{size_text(peak)} a device"
    return words


def memory_in_use() -> int:
    """Return peak bytes in use on the device so far; without statistics (CPU) bytes of the process now."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    return import_extra("psutil", "the process's memory").Process().memory_info().rss


def _identity(
    config: LlamaConfig, settings: TrainSettings, corpora: list[Corpus | Chats]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what a snapshot's model is, and what of the rest decides the curve."""
    model = {f"model {name}": str(value) for name, value in config.architecture.items()}
    watching = ("eval_every", "snapshot_every")  # when the curve is looked at or stored, not what it is
    decides: dict[str, Any] = {n: v for n, v in dataclasses.asdict(settings).items() if n not in watching}
    for i, data in enumerate(corpora):
        decides |= {f"{name} {i}" if len(corpora) > 1 else name: words for name, words in data.fingerprints().items()}
    return model, decides
