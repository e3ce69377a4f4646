"""The closed form of a step's bytes and seconds: what it must equal, how each tool moves it, what it refuses."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from llamem import LlamaConfig, Plan, Policy, TrainSettings, estimate, find_plan
from llamem.planner.sizes import Sizes
from llamem.runs import abstract_state

BF16 = {"param_dtype": jnp.bfloat16, "compute_dtype": jnp.bfloat16}
ONE_B = LlamaConfig.from_name("llama3.2-1b", **BF16)
LONG = {"seq_len": 131_072}


def line(found, name):
    return sum(part.bytes for part in found.lines if part.name == name)


def bytes_of(tree):
    shapes = [(getattr(leaf.sharding, "shard_shape", tuple)(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "dtype", "chip", "mesh"),
    [
        ("llama3.2-1b", jnp.bfloat16, "v5e-1", {}),
        ("llama3.1-8b", jnp.float32, "h100", {}),
        ("qwen3-0.6b", jnp.bfloat16, "v6e-1", {}),
        ("llama3.1-8b", jnp.bfloat16, "v5e-8", {"fsdp": 4, "tensor": 2}),
        ("llama3.2-3b", jnp.float32, "v5e-8", {"data": 2, "context": 4}),
    ],
)
def test_weights_and_moments_are_those_of_the_state_to_the_byte(name, dtype, chip, mesh):
    config = LlamaConfig.from_name(name, param_dtype=dtype, compute_dtype=jnp.bfloat16)
    plan = Plan(mesh=mesh)
    state = abstract_state(config, TrainSettings(batch_size=8, seq_len=4096), plan)
    found = estimate(config, plan, chip, seq_len=4096, batch_size=8)
    assert line(found, "weights") == bytes_of(state.params)
    counters = 64  # the step, and the optimizer's own
    assert abs(line(found, "moments") - bytes_of(state.opt_state)) <= counters


TOOLS = {
    "head_groups": (Plan(head_groups=8), "attention"),
    "mlp_tiles": (Plan(mlp_tiles=64), "feed-forward"),
    "offload": (Plan(offload=("block_in",)), "residuals"),
    "moments": (Plan(moments="host"), "moments"),
    "nested": (Plan(mode="nested"), "residuals"),
}


@pytest.mark.parametrize("chip", ["v5e-1", "a100-80"])
def test_each_tool_lowers_its_line_and_the_time_grows(chip):
    def largest(found, name):
        return max(sum(part.bytes for part in lines if part.name == name) for lines in found.moments.values())

    for tool, (plan, name) in TOOLS.items():
        before, after = (estimate(ONE_B, p, chip, **LONG) for p in (Plan(), plan))
        assert largest(after, name) < 0.7 * largest(before, name), tool
        assert after.peak_bytes <= before.peak_bytes, tool
        assert after.seconds.total > before.seconds.total or tool == "mlp_tiles", tool


def test_groups_of_layers_leave_their_inputs_and_one_group_the_rest_while_it_is_at_work():
    found = estimate(ONE_B, Plan(mode="nested", remat=Policy(save=("attn_out",))), "a100-80", **LONG)
    stream, groups = 131_072 * 2048 * 2, 4
    there = {moment: sum(x.bytes for x in lines if x.name == "residuals") for moment, lines in found.moments.items()}
    assert there["the loss"] == groups * stream
    assert there["a layer's backward pass"] == groups * stream + 4 * 2 * stream


def test_a_context_mesh_prices_the_attention_that_the_program_has():
    for length, taken in ((2048, "splash"), (1536, "tiled"), (512, "xla")):
        found = estimate(ONE_B, Plan(mesh={"context": 2, "fsdp": 4}), "v5e-8", seq_len=2 * length, batch_size=4)
        assert Sizes(found.question, found.plan).attention == taken


def test_what_leaves_the_device_arrives_on_the_host():
    away = estimate(ONE_B, Plan(offload=("block_in",), moments="host"), "v5e-1", **LONG)
    home = estimate(ONE_B, Plan(), "v5e-1", **LONG)
    stream = 16 * 131_072 * 2048 * 2
    assert line(home, "residuals") - line(away, "residuals") == stream
    assert home.host_bytes == 0
    assert away.host_bytes == stream + line(home, "moments") - line(away, "moments")
    assert away.seconds.host_link == pytest.approx(2 * away.host_bytes / 16e9)


def test_nested_the_host_holds_what_entered_the_groups_and_one_group_s_layers():
    config = LlamaConfig.from_name("llama3.1-8b", **BF16)  # 32 layers, of which the longest sequences make 8 groups
    plan = Plan(offload=("block_in",), mode="nested")
    scan, nested = (estimate(config, p, "v5p-1", **LONG) for p in (plan.replace(mode="scan"), plan))
    stream = 131_072 * 4096 * 2
    assert (scan.host_bytes, nested.host_bytes) == (32 * stream, (8 + 4) * stream)
    # Of groups there and back; of layers as well, though not from the first forward pass.
    assert (scan.link_bytes, nested.link_bytes) == (2 * 32 * stream, 2 * (8 + 32) * stream)
    assert line(nested, "residuals") == line(scan, "residuals") == 0


def test_what_is_kept_is_paid_for_in_bytes_and_saves_products():
    for policy in ("attn", "qkv_attn", "minimal", None, Policy(save=("gate", "up")), "dots_saveable"):
        nothing, kept = (estimate(ONE_B, Plan(remat=r), "v5p-1", seq_len=8192) for r in ("nothing", policy))
        assert line(kept, "residuals") > line(nothing, "residuals"), policy
        before, after = (e.seconds.products + e.seconds.attention for e in (nothing, kept))
        assert after < before, policy


WIDE = LlamaConfig.from_name("llama3.2-1b", head_dim=256, compute_dtype=jnp.bfloat16)
BAD: dict[str, dict[str, Any]] = {
    "no chip is called 'v9'": {"chip": "v9"},
    "seq_len=0": {"seq_len": 0},
    "batch_size=2.0": {"batch_size": 2.0},
    "clip='x'": {"clip": "x"},
    "expected a llamem.LlamaConfig": {"config": "llama"},
    "chip=3: expected a name": {"chip": 3},
    "mesh {'fsdp': 8} has 8 devices": {"plan": Plan(mesh={"fsdp": 8})},
    "has 1 devices, and v5e-8 has 8": {"chip": "v5e-8"},
    "head_groups=16) of a model with 8 key/value heads": {"plan": Plan(head_groups=16)},
    "attention='cudnn') for 512 tokens on v5e-1: 'splash' is for TPUs": {"plan": Plan(attention="cudnn")},
    "attention='cudnn') for 512 tokens on t4": {"plan": Plan(attention="cudnn"), "chip": "t4"},
    "attention='cudnn') for 512 tokens on h100": {"config": WIDE, "plan": Plan(attention="cudnn"), "chip": "h100"},
    "attention='splash') for 512 tokens on h100": {"plan": Plan(attention="splash"), "chip": "h100"},
    "attention='splash') for 1,000 tokens on v5e-1": {"plan": Plan(attention="splash"), "seq_len": 1000},
    "Choose clip='layer'": {"plan": Plan(weights="host")},
    "clip='layer' on v5e-8, 8 chips": {"plan": Plan(mesh={"fsdp": 8}), "chip": "v5e-8", "clip": "layer"},
    "d_model=2048 does not divide among 12": {
        "plan": Plan(mesh={"fsdp": 12}),
        "chip": "v5p:2x2x3",
        "batch_size": 12,
    },
    "batch_size=3 does not divide among 8": {"plan": Plan(mesh={"fsdp": 8}), "chip": "v5e-8", "batch_size": 3},
}


def test_bad_input_is_named(as_a_user):
    for complaint, change in BAD.items():
        given: dict[str, Any] = {"config": ONE_B, "seq_len": 512} | change
        with pytest.raises((ValueError, TypeError), match=re.escape(complaint)):
            estimate(**given)


def test_the_tables_say_what_is_estimated():
    found = estimate(ONE_B, Plan(), "v5e-1", **LONG)
    for words in ("estimated", "not measured", "weights", "DOES NOT FIT"):
        assert words in str(found) and words in found._repr_html_()
    assert "estimated: fits" in str(estimate(ONE_B, chip="local", seq_len=512))  # by the default plan's own tiles
    assert "by a roofline" in str(found) and "roofline" in str(find_plan(ONE_B, "v5e-1", seq_len=512, compiler=False))


def test_a_chip_that_is_defined_again_is_another_chip(monkeypatch):
    """Its losses are cut for its own memory, in one process and in either order."""

    def tile(gib):
        mine = dataclasses.replace(jaxmem.CHIPS["rtx4090"], name="mine", capacity_bytes=gib * 2**30)
        monkeypatch.setitem(jaxmem.CHIPS, "mine", mine)
        sizes = Sizes(estimate(ONE_B, Plan(), "mine", seq_len=8192).question, Plan())
        return sizes.loss_axis, sizes.loss_rows, sizes.loss_columns

    small, large = tile(2), tile(96)
    assert small != large and (tile(2), tile(96)) == (small, large)
