"""The roofline of many chips: bytes beside what the compiler planned, seconds by hand, what it refuses."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from llamem import LlamaConfig
from llamem.losses import choose_tiles
from llamem.planner import pace

PODS = Path(__file__).parents[2] / "benchmarks" / "pods.md"
BF16 = {"param_dtype": jnp.bfloat16, "compute_dtype": jnp.bfloat16}


def compiled():
    """Rows of the pods' table: model, mesh, sequences, their length, GiB that arrive on a chip."""
    for row in PODS.read_text().splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if cells[0] in ("8B", "70B") and (mesh := re.findall(r"(fsdp|tensor|context) (\d+)", cells[2])):
            batch, length = (int(part.replace(",", "")) for part in cells[3].split(" x "))
            yield cells[0], {name: int(size) for name, size in mesh}, batch, length, float(cells[10])


def test_a_chip_receives_what_its_compiler_planned():
    """Weights and their gradients, sums of tensor parallelism, keys and values: by hand, and in the programs."""
    rows = list(compiled())
    assert len(rows) == 12
    for model, mesh, batch, length, arriving in rows:
        config = LlamaConfig.from_name(f"llama3.1-{model.lower()}", **BF16)
        received = pace(config, "v5p", mesh, batch_size=batch, seq_len=length).received
        assert sum(received.values()) / 2**30 == pytest.approx(arriving, rel=0.02), (model, mesh)


def test_one_chip_by_hand():
    config = LlamaConfig.from_name("llama3.1-8b", **BF16)
    found = pace(config, "v5e", {}, batch_size=2, seq_len=1024)
    D, F, N = 4096, 14_336, 2048
    # Forward, again, and two gradients; `down` is not computed again, and of the head tiles of the vocabulary are.
    layer = 4 * (2 * D * D + 2 * D * 1024 + 2 * D * F) + 3 * D * F
    head = 4 if choose_tiles(N, D, 128_256, chip="v5e-1").axis == "vocab" else 3
    products = 2 * N * (32 * layer + head * 128_256 * D) / (0.6 * 197e12)
    # Half of the scores; a kernel's backward pass makes them twice: 1 + 1 + 3.5 forward passes of two products.
    scores = 5.5 * 32 * 4 * 2 * 1024 * 1024 / 2 * D / (0.5 * 197e12)
    assert found.products == pytest.approx(products + scores)
    assert found.links == {} and found.tokens == 2048
    asked = 3 * (2 * N * (32 * layer / 15 * 4 + 128_256 * D)) / 197e12  # of four passes one is the rematerialisation's
    assert found.mfu == pytest.approx(asked / found.products, rel=0.1)


def test_the_network_is_used_where_the_fast_links_end():
    config = LlamaConfig.from_name("llama3.1-8b", **BF16)
    one = pace(config, "h100", {"data": 2, "fsdp": 4}, batch_size=8, seq_len=1024)
    two = pace(config, "h100", {"data": 2, "fsdp": 8}, batch_size=16, seq_len=1024)
    grads = 2 * config.n_params
    assert one.received["data"] == pytest.approx(grads / 4, rel=1e-3)
    assert one.links["data"] == pytest.approx(grads / 4 / 450e9, rel=1e-3)
    assert two.links["data"] == pytest.approx(grads / 8 / 50e9, rel=1e-3)
    assert two.links["fsdp"] == pytest.approx(two.received["fsdp"] / 450e9)


def test_what_is_wrong_is_said(as_a_user):
    for chip, mesh, batch, words in (
        ("t4", {}, 1, "chip='t4': expected one of 'v5e'"),
        ("h100", {"fsdp": 16}, 16, "join 8 chips of h100.*'data': 2"),
        ("v5e", {"data": 2, "fsdp": 4}, 12, "batch_size=12 does not divide among 8"),
        ("v5e", {"model": 4}, 4, "no mesh axis"),
    ):
        with pytest.raises(ValueError, match=words):
            pace(LlamaConfig.from_name("tiny"), chip, mesh, batch_size=batch, seq_len=128)
