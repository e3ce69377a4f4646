"""Moments on the host: which they are, and what that takes off a chip. Their numbers: `test_streamed_step.py`."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import models
import pytest
from stopping import stopped_after
from test_loop import corpus

import llamem
from llamem import Plan, TrainSettings
from llamem.llama.host_memory import host_sharding, waits_on_host
from llamem.train.loop import train
from llamem.train.step import abstract_step, init_state

SETTINGS = TrainSettings(batch_size=2, seq_len=16)


def test_matrices_wait_on_the_host_and_vectors_do_not():
    state = init_state(models.ON_HOST["untied, 96 rows"], SETTINGS, Plan(moments="host"))
    there = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(state.opt_state) if waits_on_host(p)]
    assert len(there) == 2 * (7 + 2) and not any("norm" in name or "count" in name for name in there)
    assert host_sharding().memory_kind == "pinned_host"


def test_a_run_stops_and_goes_on_with_its_moments_elsewhere(tmp_path):
    config = models.ON_HOST["untied, 96 rows"].replace(n_layers=1)
    losses, result = {}, None
    runs: dict[str, list[Any]] = {"device": ["device"], "both": ["host", "device", "host"]}
    for name, plans in runs.items():
        for done, moments in enumerate(plans, start=1):
            part = TrainSettings(batch_size=2, seq_len=16, steps=6, eval_every=0, snapshot_every=0)
            with stopped_after(2 * done) if done < len(plans) else contextlib.nullcontext():
                result = train(config, corpus(96), part, tmp_path / name, plan=Plan(moments=moments), progress=False)
        assert result is not None
        losses[name] = [row["loss"] for row in result.metrics]
    assert len(losses["both"]) == 6 and losses["both"] == pytest.approx(losses["device"], rel=1e-6)


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_moments_leave_the_chip():
    types = {"param_dtype": jnp.bfloat16, "compute_dtype": jnp.bfloat16}
    config = llamem.LlamaConfig.from_name("llama3.2-1b", n_layers=4, **types)
    reports = {}
    for moments in ("device", "host"):
        plan = Plan(moments=moments)
        step, state, batch = abstract_step(config, TrainSettings(batch_size=1, seq_len=2048), plan)
        reports[moments] = llamem.compile_report(step, state, batch, chip="v5e-1", donate_argnums=(0,))
    device, host = reports["device"], reports["host"]
    matrices = sum(a.size * a.dtype.itemsize for p, a in jax.tree.leaves_with_path(state.opt_state) if waits_on_host(p))
    assert host.host_bytes >= matrices and device.argument_bytes - host.argument_bytes == matrices
    assert host.peak_bytes < device.peak_bytes - matrices / 2
