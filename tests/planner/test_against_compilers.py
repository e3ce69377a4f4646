"""The estimate beside chips' compilers: a handful of the cases that `benchmarks/estimates.md` has many of."""

from typing import Any

import jax.numpy as jnp
import pytest
from compilers import not_of_old_compilers

import jaxmem
import llamem
from llamem import LlamaConfig, Plan

BF16, F32 = jnp.bfloat16, jnp.float32
TPU, GPU = (pytest.mark.tpu_compile, pytest.mark.slow), (pytest.mark.gpu_compile, pytest.mark.slow)
GROUPS = Plan(head_groups=8, mlp_tiles=16)
EVERYTHING = Plan(head_groups=8, mlp_tiles=32, offload=("block_in",))
LORA: dict[str, Any] = {"lora": llamem.LoraConfig(ranks=(16,))}
FOUR_BITS: dict[str, Any] = {**LORA, "quantize": "q4_0"}
SMOLLM = LlamaConfig(49_152, 576, 30, 9, 3, 64, 1536, max_seq_len=8192, tied_head=True)
PRESET = LlamaConfig.from_name
WEEKLY = pytest.mark.weekly
CASES = {
    "the defaults": (PRESET("llama3.2-1b"), BF16, "v5e-1", 8192, 1, Plan(), {}, (*TPU, WEEKLY)),
    "131,072 tokens with every tool": (PRESET("llama3.2-1b"), BF16, "v5e-1", 131_072, 1, EVERYTHING, {}, TPU),
    "f32 weights": (PRESET("llama3.2-1b"), F32, "v5p-1", 8192, 1, Plan(), {}, (*TPU, WEEKLY)),
    "scores written down": (PRESET("qwen3-0.6b"), BF16, "a100-40", 1024, 8, Plan(), {}, (*GPU, WEEKLY)),
    "no preset, an odd length": (SMOLLM, BF16, "l4", 1500, 7, Plan(remat="qkv_attn", loss_tiles=None), {}, GPU),
    "nothing rematerialised": (SMOLLM, BF16, "v6e-1", 1024, 5, Plan(remat=None), {}, (*TPU, WEEKLY)),
    "four bits": (PRESET("llama3.1-8b"), BF16, "v5e-1", 8192, 1, Plan(), FOUR_BITS, TPU),
    "four bits in groups": (PRESET("llama3.1-8b"), BF16, "l4", 8192, 1, GROUPS, FOUR_BITS, GPU),
    "adapters": (PRESET("llama3.1-8b"), BF16, "l4", 8192, 1, Plan(remat="attn"), LORA, (*GPU, WEEKLY)),
}


@not_of_old_compilers
@pytest.mark.parametrize("case", [pytest.param(name, marks=case[-1], id=name) for name, case in CASES.items()])
def test_the_peak_is_the_compilers_within_15_percent(case):
    model, dtype, chip, seq_len, batch_size, plan, how, _ = CASES[case]
    if not jaxmem.available(chip):
        pytest.skip(f"no compiler for {chip} here")
    config = model.replace(param_dtype=dtype, compute_dtype=BF16)
    found = llamem.estimate(config, plan, chip, seq_len=seq_len, batch_size=batch_size, **how)
    report = found.compile()
    assert abs(found.peak_bytes / report.peak_bytes - 1) <= 0.15, f"{report.peak_bytes:,}\n{found}"
    assert abs(found.host_bytes - report.host_bytes) <= 0.01 * report.host_bytes
    if plan is GROUPS:  # not 12.2 GiB, with the blocks of all layers once more in another order
        assert report.peak_bytes < 9.5 * 2**30
    if plan is EVERYTHING:
        assert report.fits and report.peak_bytes <= 13.5 * 2**30


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_a_plan_is_found_that_the_compiler_accepts_and_found_again():
    if not jaxmem.available("v5e-1"):
        pytest.skip("no compiler for v5e-1 here")
    config = LlamaConfig.from_name("llama3.2-1b", param_dtype=BF16, compute_dtype=BF16)
    first, again = (llamem.find_plan(config, "v5e-1", seq_len=8192, progress=None) for _ in range(2))
    assert first.report is not None and first.report.fits and first.report.peak_bytes <= 15.75 * 2**30
    assert first.plan == again.plan and first.plan != Plan(remat=None, loss_tiles=None)
