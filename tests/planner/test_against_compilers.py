"""The estimate beside chips' compilers: a handful of the cases that benchmarks/estimates.py has many of."""

import jax.numpy as jnp
import pytest
from compilers import not_of_old_compilers

import llamem
from llamem import LlamaConfig, Plan
from llamem.planner import ask

BF16, F32 = jnp.bfloat16, jnp.float32
TPU, GPU = (pytest.mark.tpu_compile, pytest.mark.slow), (pytest.mark.gpu_compile, pytest.mark.slow)
EVERYTHING = Plan(head_groups=8, mlp_tiles=32, offload=("block_in",))
CASES = {
    "the defaults": ("llama3.2-1b", BF16, "v5e-1", 8192, 1, Plan(), TPU),
    "131,072 tokens with every tool": ("llama3.2-1b", BF16, "v5e-1", 131_072, 1, EVERYTHING, TPU),
    "f32 weights": ("llama3.2-1b", F32, "v5p-1", 8192, 1, Plan(), TPU),
    "scores written down": ("qwen3-0.6b", BF16, "a100-40", 1024, 8, Plan(), GPU),
}


@not_of_old_compilers
@pytest.mark.parametrize("case", [pytest.param(name, marks=case[-1], id=name) for name, case in CASES.items()])
def test_the_peak_is_the_compilers_within_5_percent_and_not_3_too_low(case):
    model, dtype, chip, seq_len, batch_size, plan, _ = CASES[case]
    if not llamem.available(chip):
        pytest.skip(f"no compiler for {chip} here")
    config = LlamaConfig.from_name(model, param_dtype=dtype, compute_dtype=BF16)
    sizes = {"seq_len": seq_len, "batch_size": batch_size}
    found, report = llamem.estimate(config, plan, chip, **sizes), ask(config, plan, chip, **sizes)
    error = found.peak_bytes / report.peak_bytes - 1
    assert -0.03 <= error <= 0.05, f"{error:+.1%}\n{found.beside(report)}"
    assert abs(found.host_bytes - report.host_bytes) <= 0.01 * report.host_bytes
    ledger = found.beside(report)
    assert ledger.estimated_bytes == found.peak_bytes and ledger.compiled_bytes == report.peak_bytes
    held = {row.name: row for row in ledger.rows}
    for name in ("weights", "moments"):
        assert abs(held[name].estimated - held[name].compiled) <= 0.001 * report.peak_bytes


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_a_plan_is_found_that_the_compiler_accepts_and_found_again():
    if not llamem.available("v5e-1"):
        pytest.skip("no compiler for v5e-1 here")
    config = LlamaConfig.from_name("llama3.2-1b", param_dtype=BF16, compute_dtype=BF16)
    first, again = (llamem.find_plan(config, "v5e-1", seq_len=8192, progress=None) for _ in range(2))
    assert first.report is not None and first.report.fits and first.report.peak_bytes <= 15.75 * 2**30
    assert first.plan == again.plan and first.plan != Plan(remat=None, loss_tiles=None)
