"""What the planner says of adapters over a frozen model, in 16 bits and in blocks of fewer."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import llamem
from jaxmem import CHIPS, NothingFits
from llamem import LlamaConfig, LoraConfig, Plan, TrainSettings, estimate, find_plan, longest_context
from llamem.layers.tile_loops import tile_size
from llamem.losses import cross_entropy, tile_choice
from llamem.losses.tile_choice import resolve_tiles
from llamem.planner.roofline import received
from llamem.planner.sizes import Sizes

SIXTEEN = LoraConfig(ranks=(16,))
EIGHT_B = LlamaConfig.from_name("llama3.1-8b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
ONE_B = LlamaConfig.from_name("llama3.2-1b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
QUIETLY: dict[str, Any] = {"compiler": False, "progress": None}


@pytest.mark.parametrize("kind", [None, "q4_0", "q4_1", "q8_0"])
@pytest.mark.parametrize("config", [EIGHT_B, ONE_B.replace(qk_norm=True)], ids=["8B", "tied"])
def test_what_is_held_is_that_of_the_steps_arguments_to_the_byte(config, kind):
    lora = LoraConfig(ranks=(4, 24), target_modules=("q", "gate", "down", "head"))
    settings = TrainSettings(batch_size=2, seq_len=512)
    _, state, base, _ = llamem.abstract_lora_step(config, settings, Plan(), lora, quantize=kind)

    def size(tree):
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    found = estimate(config, Plan(), "l4", seq_len=512, batch_size=2, lora=lora, quantize=kind)
    lines = {line.name: line.bytes for line in found.lines}
    assert lines["weights"] == size(base)
    counters = 4 * 2 * 4 + 2 * 4 * 4 * (3 * config.n_layers + 1)  # updates; scales and ranks of each layer and target
    assert 0 <= size(state) - lines["adapters"] <= counters
    away = estimate(config, Plan(weights="host"), "l4", seq_len=512, batch_size=2, lora=lora, quantize=kind)
    assert away.host_bytes + sum(line.bytes for line in away.lines if line.name == "weights") == size(base)


def test_a_frozen_base_needs_no_gradients_of_its_own_and_less_time():
    whole, adapters = (estimate(ONE_B, Plan(), "h100", seq_len=4096, lora=lora) for lora in (None, SIXTEEN))
    blocks = estimate(ONE_B, Plan(), "h100", seq_len=4096, lora=SIXTEEN, quantize="q4_0")
    assert not any(line.bytes for line in adapters.moments["the loss"] if line.name == "head gradient")
    assert blocks.peak_bytes < adapters.peak_bytes < 0.6 * whole.peak_bytes
    assert 0.6 * whole.seconds.products < adapters.seconds.products < 0.8 * whole.seconds.products
    assert blocks.seconds.traffic > adapters.seconds.traffic
    on_mesh = estimate(EIGHT_B, Plan(mesh={"fsdp": 8}), "v5e-8", seq_len=4096, batch_size=8, lora=SIXTEEN)
    layers = EIGHT_B.n_params - 2 * 128_256 * 4096 - 65 * 4096
    assert received(Sizes(on_mesh.question, on_mesh.plan))["fsdp"] == 7 / 8 * 2 * (2 * layers + 128_256 * 4096)


def test_the_tiles_of_the_loss_are_those_of_the_step(monkeypatch):
    """Few tokens, for which a frozen head alone is cut along the vocabulary: with adapters beside it along tokens."""
    settings, asked = TrainSettings(batch_size=1, seq_len=512), []

    def watched(*args: Any, **options: Any) -> Any:
        asked.append(resolve_tiles(*args, **options))
        return asked[-1]

    monkeypatch.setattr(cross_entropy, "resolve_tiles", watched)
    monkeypatch.setattr(tile_choice, "compiling_for", lambda: CHIPS["h100"].device_kind)
    axes = []
    for targets in (("q",), ("q", "head")):
        lora = LoraConfig(ranks=(16,), target_modules=targets)
        step, *shapes = llamem.abstract_lora_step(ONE_B, settings, Plan(), lora)
        jax.eval_shape(step, *shapes)
        (axis, count), *others = set(asked)
        sizes = Sizes(estimate(ONE_B, Plan(), "h100", seq_len=512, lora=lora).question, Plan())
        tile = (tile_size(512, count), 128_256) if axis == "tokens" else (512, tile_size(128_256, count, 128))
        assert not others and (sizes.loss_axis, sizes.loss_rows, sizes.loss_columns) == (axis, *tile)
        axes.append(axis)
        asked.clear()
    assert axes == ["vocab", "tokens"]


def test_adapters_are_planned_and_the_code_runs_them():
    sizes: Any = {"seq_len": 8192, **QUIETLY}
    for lora in (None, SIXTEEN):
        with pytest.raises(NothingFits):
            find_plan(EIGHT_B, "v5e-1", lora=lora, **sizes)
    found = find_plan(EIGHT_B, "v5e-1", lora=SIXTEEN, quantize="q4_0", **sizes)
    assert found.estimate.fits and found.plan.moments == "device" and found.plan.update == "after"
    assert "Adapters of rank 16" in found.why and "q4_0" in found.why
    names: dict[str, Any] = {"llamem": llamem}
    settings, plan, load, _, lora, run = found.code.splitlines()
    exec("\n".join((settings, plan, lora)), names)
    assert (names["settings"].seq_len, names["plan"], names["lora"]) == (8192, found.plan, SIXTEEN)
    assert "quantize='q4_0'" in load and "init=model, lora=lora, plan=plan" in run


def test_longest_contexts_grow_with_fewer_bits_and_frozen_weights_may_wait_on_the_host():
    long = ONE_B.replace(max_seq_len=2**22)
    lengths = [
        longest_context(long, "l4", lora=lora, quantize=kind, host_bytes=0, **QUIETLY).seq_len
        for lora, kind in ((None, None), (SIXTEEN, None), (SIXTEEN, "q4_0"))
    ]
    assert lengths[0] < lengths[1] < lengths[2] < 2**22
    streamed = find_plan(EIGHT_B, "v5e-1", seq_len=8192, lora=SIXTEEN, host_bytes=32 * 2**30, **QUIETLY)
    assert streamed.plan.weights == "host" and streamed.estimate.host_bytes > 14 * 2**30
    with pytest.raises(NothingFits, match=r"weights on the host it would fit, but the host has 2\.0 GiB"):
        find_plan(EIGHT_B, "v5e-1", seq_len=8192, lora=SIXTEEN, host_bytes=2 * 2**30, **QUIETLY)
    shared = find_plan(EIGHT_B, "v5e-4", seq_len=8192, batch_size=4, lora=SIXTEEN, quantize="q4_0", **QUIETLY)
    assert shared.plan.mesh.axes == {"data": 4}


BAD: dict[str, dict[str, Any]] = {
    "lora='16': expected a": {"lora": "16"},
    "quantize='q4_0' without lora": {"lora": None, "quantize": "q4_0"},
    "quantize='q3': expected one of 'q4_0', 'q4_1', 'q8_0'": {"quantize": "q3"},
    "clip='layer', rounding='auto'\\) for adapters": {"clip": "layer"},
    "moments='host'\\) for adapters": {"plan": Plan(moments="host")},
    "would split blocks of q8_0": {"plan": Plan(mesh={"tensor": 8}), "chip": "v5e-8", "quantize": "q8_0"},
    "blocks have 32 numbers": {"config": ONE_B.replace(d_ff=8200), "quantize": "q4_0"},
}


def test_bad_input_is_named(as_a_user):
    for complaint, change in BAD.items():
        given: dict[str, Any] = {"config": ONE_B, "chip": "v5e-1", "seq_len": 512, "lora": SIXTEEN} | change
        with pytest.raises((ValueError, TypeError), match=complaint):
            estimate(**given)
        if "plan" not in change:
            with pytest.raises((ValueError, TypeError), match=complaint) as error:
                find_plan(**given, **QUIETLY)
            assert not isinstance(error.value, NothingFits)
