"""The closed form of a step's bytes and seconds: what it must equal, how each tool moves it, what it refuses."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llamem import LlamaConfig, Plan, Policy, TrainSettings, estimate
from llamem.memory import CHIPS
from llamem.planner import LINES
from llamem.planner.links import received
from llamem.planner.question import Question
from llamem.planner.share import share_of
from llamem.train import abstract_state

BF16 = {"param_dtype": jnp.bfloat16, "compute_dtype": jnp.bfloat16}
LONG = {"seq_len": 131_072}


def line(found, name):
    return sum(part.bytes for part in found.lines if part.name == name)


def bytes_of(tree):
    def one(leaf):
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(one, jax.tree.leaves(tree)))


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


@pytest.mark.parametrize("chip", [name for name, chip in CHIPS.items() if chip.devices == 1])
def test_the_peak_is_a_moment_and_not_a_sum_of_everything(chip):
    found = estimate(LlamaConfig.from_name("llama3.2-1b", **BF16), Plan(), chip, seq_len=8192)
    sums = {name: sum(part.bytes for part in lines) for name, lines in found.moments.items()}
    assert found.peak_bytes == max(sums.values()) == sums[found.peak_at]
    assert {part.name for lines in found.moments.values() for part in lines} <= set(LINES)
    assert all(part.bytes >= 0 and part.why for lines in found.moments.values() for part in lines)


TOOLS = {
    "head_groups": (Plan(head_groups=8), "attention"),
    "mlp_tiles": (Plan(mlp_tiles=64), "feed-forward"),
    "offload": (Plan(offload=("block_in",)), "residuals"),
    "moments": (Plan(moments="host"), "moments"),
    "nested": (Plan(mode="nested"), "residuals"),
}


@pytest.mark.parametrize("chip", ["v5e-1", "a100-80"])
def test_each_tool_lowers_its_line_and_the_time_grows(chip):
    config = LlamaConfig.from_name("llama3.2-1b", **BF16)

    def largest(found, name):
        return max(sum(part.bytes for part in lines if part.name == name) for lines in found.moments.values())

    for tool, (plan, name) in TOOLS.items():
        before, after = (estimate(config, p, chip, **LONG) for p in (Plan(), plan))
        assert largest(after, name) < 0.7 * largest(before, name), tool
        assert after.peak_bytes <= before.peak_bytes, tool
        assert after.seconds.total > before.seconds.total or tool == "mlp_tiles", tool


def of_moment(found, moment, name):
    return sum(part.bytes for part in found.moments[moment] if part.name == name)


def test_groups_of_layers_leave_their_inputs_and_one_group_the_rest_while_it_is_at_work():
    config = LlamaConfig.from_name("llama3.2-1b", **BF16)
    found = estimate(config, Plan(mode="nested", remat=Policy(save=("attn_out",))), "a100-80", **LONG)
    stream, groups = 131_072 * 2048 * 2, 4
    assert of_moment(found, "the loss", "residuals") == groups * stream
    assert of_moment(found, "a layer's backward pass", "residuals") == groups * stream + 4 * 2 * stream


def test_a_mixture_holds_all_experts_and_works_on_the_rows_that_were_routed():
    mixture = LlamaConfig.from_name("qwen3-30b-a3b", **BF16)
    found = estimate(mixture, Plan(mesh={"fsdp": 8}), "v5e-8", seq_len=4096, batch_size=8)
    state = abstract_state(mixture, TrainSettings(batch_size=8, seq_len=4096), found.plan)
    assert line(found, "weights") == bytes_of(state.params)
    share = share_of(found.question, found.plan)
    # 8 choices of 4,096 tokens in groups of 256 rows, and at most one group more for each of 128 experts.
    assert share.mlp_rows(4096) == 4096 * 8 + 128 * 256
    dense = estimate(mixture.replace(n_experts=0, experts_per_token=0, moe_d_ff=0), Plan(), "v5e-1", seq_len=4096)
    assert found.seconds.products < 8 * dense.seconds.products


def test_one_model_of_links_for_a_small_model_with_a_large_vocabulary():
    """The program gathers the head once and scatters its gradient once, and each layer's weights twice and once."""
    config = LlamaConfig.from_name("llama3.2-1b", **BF16)
    found = estimate(config, Plan(mesh={"fsdp": 8}), "v5e-8", seq_len=1024, batch_size=8)
    layers = config.n_params - 128_256 * 2048 - 33 * 2048
    by_hand = 7 / 8 * 2 * (3 * layers + 2 * 128_256 * 2048)
    assert received(share_of(found.question, found.plan))["fsdp"] == pytest.approx(by_hand)
    assert found.seconds.chip_link == pytest.approx(by_hand / 200e9)


@pytest.mark.parametrize(("length", "taken"), [(2048, "splash"), (1536, "tiled"), (512, "xla")])
def test_a_context_mesh_prices_the_attention_that_the_program_has(length, taken):
    config = LlamaConfig.from_name("llama3.2-1b", **BF16)
    found = estimate(config, Plan(mesh={"context": 2, "fsdp": 4}), "v5e-8", seq_len=2 * length, batch_size=4)
    assert share_of(found.question, found.plan).attention == taken


def test_what_leaves_the_device_arrives_on_the_host():
    config = LlamaConfig.from_name("llama3.2-1b", **BF16)
    away = estimate(config, Plan(offload=("block_in",), moments="host"), "v5e-1", **LONG)
    home = estimate(config, Plan(), "v5e-1", **LONG)
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


@pytest.mark.parametrize("policy", ["attn", "qkv_attn", "minimal", None, Policy(save=("gate", "up"))])
def test_what_is_kept_is_paid_for_in_bytes_and_saves_products(policy):
    config = LlamaConfig.from_name("llama3.1-8b", **BF16)
    nothing, kept = (estimate(config, Plan(remat=r), "v5p-1", seq_len=8192) for r in ("nothing", policy))
    assert line(kept, "residuals") > line(nothing, "residuals")
    assert kept.seconds.products + kept.seconds.attention < nothing.seconds.products + nothing.seconds.attention


def test_devices_share_the_work_of_a_mesh():
    config = LlamaConfig.from_name("llama3.1-8b", **BF16)
    one = share_of(Question(config, CHIPS["v5e-1"], 8192, 8), Plan())
    eight = share_of(Question(config, CHIPS["v5e-8"], 8192, 8), Plan(mesh={"fsdp": 2, "tensor": 2, "context": 2}))
    assert one.N == 4 * eight.N and one.H == 2 * eight.H and one.V == 2 * eight.V
    assert one.layer_weights == 2 * eight.layer_weights
    # Norms are whole on every device.
    assert one.params / eight.params == pytest.approx(8, rel=1e-3)


WIDE_HEADS = LlamaConfig.from_name("llama3.2-1b", head_dim=256, compute_dtype=jnp.bfloat16)
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
    "attention='cudnn') for 512 tokens on h100": {
        "config": WIDE_HEADS,
        "plan": Plan(attention="cudnn"),
        "chip": "h100",
    },
    "attention='splash') for 512 tokens on h100": {"plan": Plan(attention="splash"), "chip": "h100"},
    "attention='splash') for 1,000 tokens on v5e-1": {"plan": Plan(attention="splash"), "seq_len": 1000},
    "Choose clip='layer'": {"plan": Plan(weights="host")},
    "batch_size=3 does not divide among 8": {"plan": Plan(mesh={"fsdp": 8}), "chip": "v5e-8", "batch_size": 3},
}


@pytest.mark.parametrize("complaint", BAD)
def test_bad_input_is_named(complaint, as_a_user):
    given: dict[str, Any] = {
        "config": LlamaConfig.from_name("llama3.2-1b", **BF16),
        "plan": Plan(),
        "chip": "v5e-1",
        "seq_len": 512,
    }
    given |= BAD[complaint]
    with pytest.raises((ValueError, TypeError), match=re.escape(complaint)):
        estimate(given.pop("config"), given.pop("plan"), given.pop("chip"), **given)


def test_no_config_and_no_plan_are_refused(as_a_user):
    with pytest.raises(TypeError, match="expected a llamem"):
        estimate("llama3.2-1b", Plan(), "v5e-1", seq_len=512)  # pyrefly: ignore[bad-argument-type]


def test_the_tables_say_what_is_estimated():
    found = estimate(LlamaConfig.from_name("llama3.2-1b", **BF16), Plan(), "v5e-1", **LONG)
    text, page = str(found), found._repr_html_()
    for words in ("estimated", "not measured", "weights", "DOES NOT FIT"):
        assert words in text
    assert "<table>" in page and "DOES NOT FIT" in page
    assert dataclasses.is_dataclass(found)
