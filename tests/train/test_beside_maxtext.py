"""A training step beside MaxText's in the same plan, by the chip's compiler: never more memory."""

import jax.numpy as jnp
import pytest
from compilers import not_of_old_compilers

import jaxmem
import llamem
from llamem import LlamaConfig, Plan
from llamem.train import TrainSettings

pytestmark = [pytest.mark.tpu_compile, not_of_old_compilers]
AWAY = Plan(offload=("block_in",))
WEEKLY = [pytest.mark.weekly, pytest.mark.slow]
# GiB of MaxText 0.2.5 with full remat, scan, Splash attention, tiles of the vocabulary where they help; all state bf16,
# AdamW, one sequence on a v5e, or one on each of eight with FSDP. Compiled by libtpu 0.0.52, 23 November 2026. At 8,192
# tokens both hold Splash's f32[32,8192,128] through the feed-forward's backward pass; 13 MiB are the schedulers'.
ROWS = [
    pytest.param("llama3.2-1b", 8192, Plan(), 10.575 + 0.015, marks=WEEKLY),
    pytest.param("llama3.2-1b", 16_384, Plan(), 11.928, marks=WEEKLY),
    pytest.param("llama3.2-1b", 32_768, Plan(), 14.353),
    pytest.param("llama3.2-1b", 49_152, AWAY, 13.995, marks=WEEKLY),
    pytest.param("llama3.2-1b", 98_304, Plan(offload=("block_in",), moments="host"), 12.882, marks=WEEKLY),
    pytest.param("llama3.1-8b", 8192, Plan(mesh={"fsdp": 8}), 11.774, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "seq_len", "plan", "theirs"), ROWS)
def test_no_more_memory_than_maxtext(model, seq_len, plan, theirs):
    chip = f"v5e-{plan.mesh.devices}"
    if not jaxmem.available(chip):
        pytest.skip(f"no compiler for {chip} here")
    config = LlamaConfig.from_name(model, param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    settings = TrainSettings(batch_size=plan.mesh.devices, seq_len=seq_len)
    step, state, batch = llamem.abstract_step(config, settings, plan)
    report = jaxmem.compile_report(step, state, batch, donate_argnums=(0,), chip=chip)
    assert report.peak_bytes <= theirs * 2**30, str(report.timeline)
