import asyncio
import dataclasses
import gc
import json
import logging
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from norms import errors_by_name

import jaxmem
from llamem import LlamaConfig, TrainSettings, abstract_step
from llamem.runs import init_state, loop, loss_fn, make_train_step
from llamem.runs.loop import interruptible, train
from llamem.runs.weights_or_adapters import Trained
from llamem.train import make_model
from llamem.train.data import Batches, Corpus
from llamem.train.snapshots import Snapshots

CONFIG = LlamaConfig(
    vocab_size=90, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, max_seq_len=64, tied_head=True
)
SETTINGS = TrainSettings(
    steps=12,
    batch_size=4,
    seq_len=16,
    learning_rate=1e-2,
    warmup_steps=3,
    eval_every=4,
    eval_batches=2,
    snapshot_every=1,
)


def corpus(vocab_size=90, seed=0):
    """Tokens that can be learned: mostly each is the one before plus three."""
    rng = np.random.default_rng(seed)
    steps = np.where(rng.random(4000) < 0.9, 3, rng.integers(0, vocab_size, 4000))
    tokens = (np.cumsum(steps) % vocab_size).astype(np.uint32)
    return Corpus(tokens[:3500], tokens[3500:], 1, vocab_size)


def losses(metrics):
    return [(row["step"], row["loss"], row.get("val_loss"), row["grad_norm"]) for row in metrics]


def assert_same_model(one, other):
    for a, b in zip(*(jax.tree.leaves(nnx.state(run.model)) for run in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def child(folder, **changes):
    """The same run, with other settings, in a process of its own, to be killed. What it says lies beside the folder."""
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
import jax, dataclasses; jax.config.update("jax_platforms", "cpu")
from test_loop import CONFIG, SETTINGS, corpus
from llamem.runs.loop import train
from llamem.train.snapshots import Snapshots
run = train(CONFIG, corpus(), dataclasses.replace(SETTINGS, **{changes!r}), {str(folder)!r}, progress=False)
print("finished", run.finished, flush=True)
"""
    with open(f"{folder}.words", "w") as words:  # nobody reads a pipe in time, and XLA may say much
        return subprocess.Popen([sys.executable, "-c", code], stdout=words, stderr=words)


def rows_in(folder):
    path = Path(folder) / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_rows(process, folder, count):
    while rows_in(folder) < count and process.poll() is None:
        time.sleep(0.002)


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def uninterrupted(whole_folder):
    return train(CONFIG, corpus(), SETTINGS, whole_folder, progress=False)


@pytest.fixture
def finished(uninterrupted, whole_folder, tmp_path):
    """A folder of its own with that finished run in it."""
    return shutil.copytree(whole_folder, tmp_path / "finished")


@pytest.mark.quick
def test_it_learns(uninterrupted):
    assert uninterrupted.finished
    assert [row["step"] for row in uninterrupted.metrics] == list(range(1, 13))
    assert uninterrupted.metrics[0]["loss"] == pytest.approx(np.log(90), abs=0.3)
    assert uninterrupted.metrics[-1]["val_loss"] < uninterrupted.metrics[3]["val_loss"] < 4.5
    assert all(row["memory_bytes"] > 0 and row["tokens_per_second"] > 0 for row in uninterrupted.metrics)


def test_every_step_s_row_is_handed_on_and_a_log_has_lines(uninterrupted, finished, capsys):
    """Twice as many steps, gone on with half way: a row each, with the rate of its update; no carriage returns."""
    seen, longer = [], dataclasses.replace(SETTINGS, steps=24)
    run = train(CONFIG, corpus(), longer, finished, on_step=seen.append, on_change="continue")
    assert seen == run.metrics[12:] and [row["step"] for row in seen] == list(range(13, 25))
    wanted = optax.warmup_cosine_decay_schedule(1e-2 / 3, 1e-2, 3, 24, 1e-3)
    assert [row["learning_rate"] for row in seen] == pytest.approx(
        [float(np.asarray(wanted(step))) for step in range(12, 24)]
    )
    assert losses(run.metrics[:12]) == losses(uninterrupted.metrics)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == [f"step {n} of 24" for n in (13, 16, 20, 24)]
    assert re.fullmatch(r"step 24 of 24: loss \d\.\d{3}, [\d,]+ tokens/s, \d+\.\d GiB, held out \d\.\d{3}", lines[-1])


def test_a_run_says_its_plan_its_chip_and_its_compiled_peak(uninterrupted, whole_folder, tmp_path):
    told = json.loads((whole_folder / "run.json").read_text())
    assert told["plan"] == "Plan()" and "steps=12" in told["settings"] and "1 x cpu" in told["chip"].lower()
    step, state, batch = abstract_step(CONFIG, SETTINGS)
    report = jaxmem.compile_report(step, state, batch, donate_argnums=(0,), chip="local")
    peak = float(re.fullmatch(r"([\d.]+) KiB a device", told["compiled peak"])[1])  # pyrefly: ignore
    assert peak == pytest.approx(report.peak_bytes / 2**10, rel=0.01)
    assert uninterrupted.described == told
    card = (uninterrupted.save(tmp_path / "model") / "README.md").read_text()
    assert f"| compiled peak | {told['compiled peak']} |" in card and f"| chip | {told['chip']} |" in card


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.weekly)])
def test_killed_the_curve_is_the_same_bit_for_bit(kills, uninterrupted, tmp_path):
    random_ = random.Random(time.time_ns())
    for kill in range(kills):
        process = child(tmp_path)
        # A step and its snapshot take some 50 ms here: the delay falls anywhere between them.
        wait_for_rows(process, tmp_path, min(kill * 2 + 1, SETTINGS.steps - 1))
        time.sleep(random_.uniform(0, 0.1))
        process.kill()
        process.wait()
    child(tmp_path).wait()
    words = Path(f"{tmp_path}.words").read_text()
    assert "finished True" in words, words
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert losses(metrics) == losses(uninterrupted.metrics)


def test_resuming_a_finished_run_computes_nothing(uninterrupted, finished):
    # What a killed save leaves behind is not a snapshot.
    (finished / "snapshots" / "19.orbax-checkpoint-tmp-1").mkdir()
    again = train(CONFIG, corpus(), SETTINGS, finished, progress=False)
    assert losses(again.metrics) == losses(uninterrupted.metrics)
    assert_same_model(again, uninterrupted)


def test_snapshots_of_another_run_are_refused(finished):
    with pytest.raises(ValueError, match="another run: model d_ff: snapshot '24', now '40'"):
        train(CONFIG.replace(d_ff=40), corpus(), SETTINGS, finished, progress=False)
    with pytest.raises(ValueError, match="seed: snapshot 0, now 1"):
        train(CONFIG, corpus(), dataclasses.replace(SETTINGS, seed=1), finished, progress=False)
    with pytest.raises(ValueError, match="training data"):
        train(CONFIG, corpus(seed=5), SETTINGS, finished, progress=False)
    with pytest.raises(ValueError, match="is of step 12, beyond steps=9"):
        less = dataclasses.replace(SETTINGS, steps=9)
        train(CONFIG, corpus(), less, finished, progress=False, on_change="continue")


def test_in_batches_of_another_size_no_sequence_is_left_out_or_read_twice(tmp_path, monkeypatch, capsys):
    """Three sizes that do not divide what was read, a stop among them, and the second epoch."""
    seen, place = {}, loop.place_batch

    def recorded(batches, step, where):
        if batches.num_sequences == 218:  # not the held-out part
            seen[step] = batches.sequences_of(step, slice(None))  # a step's batch, read once more for its shape
        return place(batches, step, where)

    monkeypatch.setattr(loop, "place_batch", recorded)
    for steps, batch_size, read in ((3, 5, 15), (5, 48, 111), (7, 48, 207), (20, 2, 233)):
        now = dataclasses.replace(SETTINGS, steps=steps, batch_size=batch_size, eval_every=0)
        train(CONFIG, corpus(), now, tmp_path, progress=False, on_change="continue")
        assert sum(map(len, list(seen.values())[:steps])) == read
    order = [n for step in range(2) for n in Batches(corpus().train, 218, 16).sequences_of(step, slice(None))]
    assert [n for step in range(20) for n in seen[step]] == order[:233]
    assert "The 15 sequences that were read are not read again, and none is left out." in capsys.readouterr().out
    shorter = dataclasses.replace(SETTINGS, steps=21, seq_len=8)
    train(CONFIG, corpus(), shorter, tmp_path, progress=False, on_change="continue")
    assert "With another seq_len the sequences come in another order, and from its beginning" in capsys.readouterr().out


def test_rows_whose_snapshots_were_deleted_are_kept_beside(finished):
    metrics, begun_again = finished / "metrics.jsonl", dataclasses.replace(SETTINGS, steps=1, eval_every=0)
    for name in ("metrics-as-it-was.jsonl", "metrics-as-it-was-2.jsonl"):
        before = metrics.read_bytes()
        shutil.rmtree(finished / "snapshots")
        with pytest.warns(UserWarning, match=rf"{metrics}: no snapshot .* begins at step 0.* is kept as {name}"):
            train(CONFIG, corpus(), begun_again, finished, progress=False)
        assert (finished / name).read_bytes() == before != b"" and rows_in(finished) == 1


@pytest.mark.quick
def test_a_damaged_snapshot_is_named_and_the_one_before_it_taken(uninterrupted, finished):
    for file in (finished / "snapshots" / "12").rglob("*"):
        if file.is_file() and "identity" not in str(file):
            file.write_bytes(b"")
    with pytest.warns(UserWarning, match=r"snapshots/12 is damaged .*the one before it is taken"):
        again = train(CONFIG, corpus(), SETTINGS, finished, progress=False)
    assert losses(again.metrics) == losses(uninterrupted.metrics)
    assert_same_model(again, uninterrupted)
    folders = {path.name for path in (finished / "snapshots").iterdir() if path.is_dir()}
    assert folders == {"11", "12", "damaged-12"}


def test_of_a_damaged_snapshot_our_warning_is_all_that_is_said(finished, monkeypatch, caplog):
    """As Orbax does, by chance of its threads: it logs, and a read that is given up raises when it is collected."""
    read = Snapshots._read

    async def given_up():
        try:
            await asyncio.sleep(0)
        finally:
            raise OSError("a truncated file")

    def read_as_orbax(self, step, *args):
        if step == 12:
            given_up().send(None)
            logging.getLogger("absl").error("no metadata")
            raise OSError("a truncated file")
        return read(self, step, *args)

    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(Snapshots, "_read", read_as_orbax)
    with pytest.warns(UserWarning, match=r"snapshots/12 is damaged .*the one before it is taken") as told:
        train(CONFIG, corpus(), SETTINGS, finished, progress=False)
    gc.collect()
    assert len(told) == 1 and not unraisable and not caplog.records
    logging.getLogger("absl").error("of another matter")
    assert len(caplog.records) == 1 and sys.unraisablehook == unraisable.append


@pytest.mark.parametrize(
    ("config", "settings", "tokens", "words"),
    [
        (CONFIG, {"seq_len": 65}, corpus(), "seq_len=65.*max_seq_len=64"),
        (CONFIG.replace(vocab_size=80), {}, corpus(), "vocabulary has 80"),
        (CONFIG, {}, dataclasses.replace(corpus(), heldout=np.zeros(9, np.uint32)), "9 tokens"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(config, settings, tokens, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(config, tokens, dataclasses.replace(SETTINGS, **settings), tmp_path / "new", progress=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": True}, "steps=True"),
        ({"snapshot_every": 2.0}, r"snapshot_every=2\.0"),
        ({"seed": -1}, "seed=-1"),
        ({"batch_size": 6, "accumulate": 4}, "batch_size=6.*accumulate=4"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": "1e-3"}, "learning_rate='1e-3'"),
        ({"clip_norm": float("inf")}, "clip_norm=inf"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1.*at least 0"),
        ({"clip": "tensor"}, "expected one of 'global', 'layer'"),
        ({"rounding": "up"}, "'nearest', 'stochastic'"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        TrainSettings(**settings)


def snapshots_in(folder):
    return {path.name for path in (folder / "snapshots").iterdir() if path.is_dir()}


def test_a_diverged_run_goes_on_from_the_last_good_snapshot(finished, tmp_path):
    """A rate that ruins the parameters: the snapshot that holds them, finite as they are, is no place to go on from."""
    ruinous = dataclasses.replace(SETTINGS, learning_rate=1e30, steps=20)
    with pytest.raises(FloatingPointError, match=r"at step 2\. It came from .* of step 1, which stays\. .*'continue'"):
        train(CONFIG, corpus(), ruinous, tmp_path / "new", progress=False)
    assert snapshots_in(tmp_path / "new") == {"1"}
    with pytest.raises(FloatingPointError, match=r"at step 14\. The newest good snapshot is of step 12: .*'continue'"):
        train(CONFIG, corpus(), ruinous, finished, progress=False, on_change="continue")
    assert snapshots_in(finished) == {"12", "diverged-13"}


def test_a_broken_chip_costs_no_snapshot_however_often_the_run_is_started(finished, monkeypatch):
    """A scheduler that starts it again and again deletes a whole run's snapshots in minutes, were they deleted."""
    longer, compiled = dataclasses.replace(SETTINGS, steps=14), Trained.compile

    def broken(self, state, batch):
        step, peak = compiled(self, state, batch)
        return lambda *given: (given[0], {**step(*given)[1], "loss": jnp.nan}), peak

    with monkeypatch.context() as chip:
        chip.setattr(Trained, "compile", broken)
        for _ in range(3):
            with pytest.raises(FloatingPointError, match=r"at step 13\. It came from .* of step 12, which stays\."):
                train(CONFIG, corpus(), longer, finished, progress=False, on_change="continue")
            assert snapshots_in(finished) == {"11", "12"}
    run = train(CONFIG, corpus(), longer, finished, progress=False, on_change="continue")
    assert [row["step"] for row in run.metrics] == list(range(1, 15))


def batch_of(config):
    tokens = jax.random.randint(jax.random.key(0), (4, 17), 0, config.vocab_size)
    return tokens[:, :-1], tokens[:, 1:]


def one_step(config=CONFIG, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return jax.jit(make_train_step(config, settings))(init_state(config, settings), batch_of(config))


@pytest.mark.quick
def test_accumulated_steps_equal_whole_ones():
    (whole, a), (parts, b) = one_step(), one_step(accumulate=4)
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-5)
    moments = [jax.tree.leaves(state.opt_state) for state in (whole, parts)]
    for x, y in zip(*moments, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-7)


def test_three_steps_are_optax_s_adamw_without_decay_of_norms():
    settings = dataclasses.replace(SETTINGS, steps=3, warmup_steps=1, clip_norm=0.1, weight_decay=0.5)
    rate, batch = settings.learning_rate, batch_of(CONFIG)
    state, step = init_state(CONFIG, settings), jax.jit(make_train_step(CONFIG, settings))
    graphdef, params = nnx.split(make_model(CONFIG, settings))
    decayed = jax.tree.map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)
    schedule = optax.join_schedules([optax.constant_schedule(rate), optax.cosine_decay_schedule(rate, 2, 0.1)], [1])
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.5, mask=decayed)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), adamw)
    moments = optimizer.init(params)
    for _ in range(3):
        state, metrics = step(state, batch)
        grads = jax.grad(lambda params: loss_fn(graphdef, params, *batch))(params)
        updates, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in jax.tree.leaves(grads)))
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5) and norm > 0.1
    assert max(errors_by_name(state.params, params).values()) < 1e-5


def test_bf16_weights_follow_updates_below_their_last_bit():
    """By default, on average, those of f32 weights that begin at the same numbers; f32 ones are rounded as ever."""
    settings = dataclasses.replace(SETTINGS, learning_rate=1e-5, warmup_steps=0, weight_decay=0.0)
    narrow = CONFIG.replace(param_dtype=jnp.bfloat16, d_model=64, d_ff=160)
    begin = nnx.state(make_model(narrow, settings), nnx.Param)

    def moved(config, **changes):
        params = jax.tree.map(lambda a: a.astype(config.param_dtype), begin)
        own = dataclasses.replace(settings, **changes)
        state, _ = jax.jit(make_train_step(config, own))(init_state(config, own, params=params), batch_of(config))
        pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(begin), strict=True)
        return np.concatenate([np.subtract(a, b, dtype=np.float64).ravel() for a, b in pairs])

    wanted = moved(narrow.replace(param_dtype=jnp.float32))
    follow, stay = (moved(narrow, **own) @ wanted / (wanted @ wanted) for own in ({}, {"rounding": "nearest"}))
    assert follow == pytest.approx(1, abs=0.1) and stay < 0.5
    same = moved(narrow.replace(param_dtype=jnp.float32), rounding="nearest")
    np.testing.assert_array_equal(wanted, same)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_weights_that_cannot_hold_adamw_s_eps_are_refused_before_anything_is_written(dtype, tmp_path):
    """All of them would be NaN after one update: the squares of gradients and 1e-8 are 0 in these types."""
    config = CONFIG.replace(param_dtype=dtype, compute_dtype="float16")
    for begin in (init_state, abstract_step):
        with pytest.raises(ValueError, match=rf"is {dtype}, and cannot be trained .*Choose LlamaConfig\(param_dtype="):
            begin(config, SETTINGS)
    with pytest.raises(ValueError, match=rf"is {dtype}, and cannot be trained"):
        train(config, corpus(), SETTINGS, tmp_path / "new", progress=False)
    assert not (tmp_path / "new").exists()
    wide = CONFIG.replace(compute_dtype="float16")
    state, metrics = jax.jit(make_train_step(wide, SETTINGS))(init_state(wide, SETTINGS), batch_of(wide))
    assert all(bool(jnp.isfinite(a).all()) for a in jax.tree.leaves((state.params, metrics)))


def test_how_weights_are_rounded_is_in_the_card_and_part_of_a_run_s_identity(tmp_path):
    narrow, short = CONFIG.replace(param_dtype=jnp.bfloat16), dataclasses.replace(SETTINGS, steps=1, eval_every=0)
    nearest = dataclasses.replace(short, rounding="nearest")
    run = train(narrow, corpus(), nearest, tmp_path / "nearest", progress=False)
    card = (run.save(tmp_path / "model") / "README.md").read_text()
    assert (
        "| types | weights and moments bfloat16, rounded to the nearest, so that updates below their last bit" in card
    )
    with pytest.raises(
        ValueError, match=r"another run: rounding: snapshot 'nearest', now 'stochastic'\. Use the settings"
    ):
        train(narrow, corpus(), short, tmp_path / "nearest", progress=False)
    wide = train(CONFIG, corpus(), nearest, tmp_path / "wide", progress=False)
    again = train(CONFIG, corpus(), short, tmp_path / "wide", progress=False)  # "auto" is no change for f32
    assert losses(again.metrics) == losses(wide.metrics)
    assert again.described["types"] == "weights and moments float32, rounded to the nearest; products float32"


def test_abstract_step_has_the_shapes_of_the_real_one():
    settings = dataclasses.replace(SETTINGS, accumulate=2)
    step, state, batch = abstract_step(CONFIG, settings)
    new_state, metrics = jax.eval_shape(step, state, batch)
    for other in (init_state(CONFIG, settings), new_state):
        assert jax.tree.structure(state) == jax.tree.structure(other)
        assert [(a.shape, a.dtype) for a in jax.tree.leaves(state)] == [
            (a.shape, a.dtype) for a in jax.tree.leaves(other)
        ]
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_acts_as_before(number):
    before = signal.getsignal(number)
    seen = []
    signal.signal(number, lambda *_: seen.append(number))
    try:
        with interruptible() as stop:
            assert not stop(1)
            signal.raise_signal(number)
            assert stop(2) and not seen
            signal.raise_signal(number)
            assert seen == [number]
    finally:
        signal.signal(number, before)
