"""Moments on the host against moments on the device: the same numbers, and where they lie."""

import signal
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

import llamem
from llamem import Plan, TrainSettings
from llamem.llama.host_memory import host_place, host_sharding, same_places, waits_on_host
from llamem.train.data import Corpus
from llamem.train.loop import train
from llamem.train.snapshots import Snapshots
from llamem.train.step import abstract_step, init_state, make_train_step

SETTINGS = TrainSettings(batch_size=2, seq_len=16, steps=5, learning_rate=1e-2, warmup_steps=1, clip_norm=0.5)


def run(config, plan, steps=3):
    state = init_state(config, SETTINGS, plan)
    step = jax.jit(make_train_step(config, SETTINGS, plan), donate_argnums=0, out_shardings=same_places(state))
    metrics = []
    for i in range(steps):
        tokens = models.tokens_of(config, T=17, seed=i)
        state, values = step(state, (tokens[:, :-1], tokens[:, 1:]))
        metrics.append({name: float(value) for name, value in values.items()})
    return state, metrics


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tied, 101 rows", jnp.float32),
        ("untied, 96 rows", jnp.bfloat16),
        *(pytest.param(name, jnp.float32, marks=pytest.mark.weekly) for name in models.ON_HOST if "101" not in name),
    ],
)
def test_parameters_moments_and_metrics_are_those_of_the_plain_update(name, dtype):
    config = models.ON_HOST[name].replace(param_dtype=dtype, compute_dtype=dtype)
    (plain, expected), (mine, got) = run(config, Plan()), run(config, Plan(moments="host"))
    assert jax.tree.structure(plain) == jax.tree.structure(mine)
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-8  # of one rounding
    for (path, a), b in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(mine), strict=True):
        a, b = (np.asarray(leaf, np.float64) for leaf in (a, b))
        # AdamW makes a whole step of a gradient that is all rounding: of JAX 0.12's, the farthest in a thousand may.
        few = a.size // 1000 if jax.__version_info__ >= (0, 11) else 0
        far = np.sort(np.abs(a - b), axis=None)[: a.size - few]
        assert np.linalg.norm(far) <= tolerance * np.linalg.norm(a), jax.tree_util.keystr(path)
    assert got == [pytest.approx(row, rel=1e-5 if dtype == jnp.float32 else 1e-2) for row in expected]
    for path, leaf in jax.tree.leaves_with_path(mine):
        in_moments = waits_on_host(path) and "opt_state" in jax.tree_util.keystr(path)
        there = leaf.sharding == host_place() if in_moments else leaf.sharding.memory_kind != "pinned_host"
        assert there, jax.tree_util.keystr(path)


def test_matrices_wait_on_the_host_and_vectors_do_not():
    state = init_state(models.ON_HOST["untied, 96 rows"], SETTINGS, Plan(moments="host"))
    there = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(state.opt_state) if waits_on_host(p)]
    assert len(there) == 2 * (7 + 2) and not any("norm" in name or "count" in name for name in there)
    assert host_sharding().memory_kind == "pinned_host"


WRITE = Snapshots.append_metrics


def stopping_after(step):
    """As by Ctrl-C during that step."""

    def write_and_stop(self, row):
        WRITE(self, row)
        if row["step"] == step:
            signal.raise_signal(signal.SIGINT)

    return write_and_stop


def test_a_run_stops_and_goes_on_with_its_moments_elsewhere(tmp_path, monkeypatch):
    config = models.ON_HOST["untied, 96 rows"].replace(n_layers=1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 2000).astype(np.uint32)
    corpus = Corpus(tokens[:1500], tokens[1500:], 1, config.vocab_size)
    losses, result = {}, None
    runs: dict[str, list[Any]] = {"device": ["device"], "both": ["host", "device", "host"]}
    for name, plans in runs.items():
        for done, moments in enumerate(plans, start=1):
            part = TrainSettings(batch_size=2, seq_len=16, steps=6, eval_every=0, snapshot_every=0)
            with monkeypatch.context() as patch:
                patch.setattr(Snapshots, "append_metrics", stopping_after(2 * done) if done < len(plans) else WRITE)
                result = train(config, corpus, part, tmp_path / name, plan=Plan(moments=moments), progress=False)
        assert result is not None
        losses[name] = [row["loss"] for row in result.metrics]
    assert len(losses["both"]) == 6 and losses["both"] == pytest.approx(losses["device"], rel=1e-6)


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.skipif(not llamem.available("v5e-1"), reason="needs libtpu")
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.weekly), jnp.bfloat16])
def test_moments_leave_the_chip(dtype):
    config = llamem.LlamaConfig.from_name("llama3.2-1b", n_layers=4, param_dtype=dtype, compute_dtype=jnp.bfloat16)
    reports = {}
    for moments in ("device", "host"):
        plan = Plan(moments=moments)
        step, state, batch = abstract_step(config, TrainSettings(batch_size=1, seq_len=2048), plan)
        reports[moments] = llamem.compile_report(step, state, batch, chip="v5e-1", donate_argnums=(0,))
    device, host = reports["device"], reports["host"]
    matrices = sum(a.size * a.dtype.itemsize for p, a in jax.tree.leaves_with_path(state.opt_state) if waits_on_host(p))
    assert host.host_bytes >= matrices and device.argument_bytes - host.argument_bytes == matrices
    assert host.peak_bytes < device.peak_bytes - matrices / 2
