"""A step whose layers are fetched and updated one by one: the numbers of the plain step, whatever waits on the host."""

from typing import Any

import jax
import jax.numpy as jnp
import models
import pytest
from compilers import with_host_memory
from norms import errors_by_name
from stopping import stopped_after
from test_loop import assert_same_model, corpus, losses

import jaxmem
import llamem
from jaxmem.reading.hlo import compiled_matmul_flops, optimised_text, parse
from jaxmem.tracing.arguments import on_host
from jaxmem.tracing.jaxprs import equations
from llamem import Plan, TrainSettings
from llamem.host.memory import host_place, same_places, waits_on_host
from llamem.runs import abstract_step, init_state, make_train_step
from llamem.runs.loop import train

SETTINGS = TrainSettings(batch_size=2, seq_len=16, steps=10, learning_rate=1e-3, warmup_steps=1, clip_norm=0.5)
LAYERS = {"clip": "layer"}
STREAMED: dict[str, Any] = {"weights": "host", "moments": "host", "update": "in_backward", "offload": ("block_in",)}


TILES = {"head_groups": 2, "mlp_tiles": 3}


def tiles_of(plan):
    """What of a plan changes the order of sums: the step to compare with has it, too."""
    return {name: plan[name] for name in TILES if name in plan}


def settings_of(**changes):
    return TrainSettings(**{**vars(SETTINGS), **changes})


def batch_of(config, seed=1, B=2):
    tokens = models.tokens_of(config, T=17, B=B, seed=seed)
    return tokens[:, :-1], tokens[:, 1:]


def run(config, plan, steps=10, **changes):
    """The state after some steps, and their metrics."""
    settings = settings_of(**changes)
    state = init_state(config, settings, plan)
    make = make_train_step(config, settings, plan)
    step = jax.jit(make, donate_argnums=0, out_shardings=same_places(state))
    metrics: list[dict[str, float]] = []
    for i in range(steps):
        state, values = step(state, batch_of(config, seed=i))
        metrics.append({name: float(value) for name, value in values.items()})
    return state, metrics


# What streams: alone and together with the other tools.
PLANS: dict[str, dict[str, Any]] = {
    "all": STREAMED,
    "weights": {"weights": "host"},
    "tiles": {**STREAMED, **TILES},
    "groups": {**STREAMED, "mode": "nested"},
    "in the backward pass": {"update": "in_backward"},
    "moments": {"moments": "host"},
}
CLIPS: dict[str, dict[str, Any]] = {"layer": LAYERS, "none": {"clip_norm": None}, "whole": {}}
CASES = [
    ("tied, 101 rows", "moments", "whole"),
    ("tied, 101 rows", "all", "layer"),
    ("four layers", "groups", "layer"),
    ("untied, 96 rows", "in the backward pass", "none"),
]
WEEKLY = [
    ("untied, 96 rows", "all", "none"),
    ("untied, 96 rows", "weights", "layer"),
    ("tied, 101 rows", "tiles", "none"),
    ("untied, 96 rows", "moments", "layer"),
    ("no layers", "all", "layer"),
]


@pytest.mark.parametrize(
    ("name", "plan", "clip"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.weekly) for case in WEEKLY)],
)
def test_parameters_after_ten_steps_are_those_of_the_plain_step(name, plan, clip):
    """Parameters and moments relative to their size, metrics, and where everything lies."""
    config, plan = models.ON_HOST[name], PLANS[plan]
    expected = run(config, Plan(**tiles_of(plan)), **CLIPS[clip])
    mine = run(config, Plan(**plan), **CLIPS[clip])
    assert jax.tree.structure(expected[0]) == jax.tree.structure(mine[0])
    far = errors_by_name(mine[0].params, expected[0].params)
    assert max(far.values()) < 1e-6, far
    far = errors_by_name(mine[0].opt_state, expected[0].opt_state)
    assert max(far.values()) < 1e-5, far
    assert mine[1] == [pytest.approx(row, rel=1e-5) for row in expected[1]]
    assert expected[1][0]["grad_norm"] > 0.5  # so that clipping has something to do
    for path, leaf in jax.tree.leaves_with_path(mine[0]):
        name = jax.tree_util.keystr(path)
        home = plan.get("moments" if "opt_state" in name else "weights", "device")
        on_host = home == "host" and waits_on_host(path)
        assert leaf.sharding == host_place() if on_host else leaf.sharding.memory_kind != "pinned_host", name


@pytest.mark.parametrize(
    ("rounding", "plan"),
    [("stochastic", "all"), ("nearest", "moments"), pytest.param("nearest", "all", marks=pytest.mark.weekly)],
)
def test_bf16_is_the_plain_step_up_to_its_rounding(rounding, plan):
    """With stochastic rounding, too: what is drawn does not depend on how the step is cut."""
    config = models.ON_HOST["untied, 96 rows"].replace(param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    (one, expected), (mine, got) = (
        run(config, Plan(**one), steps=3, rounding=rounding, **LAYERS) for one in ({}, PLANS[plan])
    )
    assert max(errors_by_name(mine.params, one.params).values()) < 2**-8
    assert got == [pytest.approx(row, rel=2e-2) for row in expected]


def test_matrices_wait_on_the_host_and_vectors_do_not():
    moments = init_state(models.ON_HOST["untied, 96 rows"], SETTINGS, Plan(moments="host")).opt_state
    there = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(moments) if waits_on_host(p)]
    assert len(there) == 2 * (7 + 2) and not any("norm" in name or "count" in name for name in there)


def placed_step(config, plan):
    """The step, with a state that lies where it will, and a batch."""
    settings = settings_of(**LAYERS)
    return make_train_step(config, settings, plan), init_state(config, settings, plan), batch_of(config)


def products(config, plan):
    """FLOPs of the step's matrix products as the compiler leaves them: what nobody reads it does not compute."""
    step, *arguments = placed_step(config, plan)
    return compiled_matmul_flops(parse(optimised_text(jax.jit(step).lower(*arguments).compile())))


def test_products_are_those_of_the_plain_rematerialised_step():
    config = models.ON_HOST["untied, 96 rows"]
    once = products(config, Plan())
    assert once and products(config, Plan(**STREAMED)) == pytest.approx(once, rel=0.02)


def crossing_bytes(jaxpr):
    """Bytes that a program moves between the host's memory and the device's, both ways, loops multiplied out."""
    total = 0
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name == "device_put":
            for source, result in zip(eqn.invars, eqn.outvars, strict=True):
                aval: Any = result.aval
                if on_host(source.aval) != on_host(aval):
                    total += times * aval.size * aval.dtype.itemsize
    return total


@with_host_memory
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("untied, 96 rows", "all"),
        ("tied, 101 rows", "all"),
        ("four layers", "groups"),
        ("four layers", "in the backward pass"),
    ],
)
def test_what_crosses_the_link_is_what_the_estimate_says(name, plan):
    config = models.ON_HOST[name]
    expected = llamem.estimate(
        config, Plan(**PLANS[plan]), "v5e-1", seq_len=16, batch_size=SETTINGS.batch_size, clip="layer"
    )
    step, *arguments = placed_step(config, Plan(**PLANS[plan]))
    counted = crossing_bytes(jax.make_jaxpr(step)(*arguments).jaxpr)
    assert counted == pytest.approx(expected.link_bytes, rel=0.02)
    assert (counted == 0) == (plan == "in the backward pass")


def go(folder, **plan):
    """Four steps of a small run, or what is left of them."""
    config = models.ON_HOST["untied, 96 rows"].replace(n_layers=2)
    settings = TrainSettings(batch_size=2, seq_len=16, steps=4, eval_every=2, snapshot_every=0, clip="layer")
    return train(config, corpus(96), settings, folder, plan=Plan(**plan), progress=False)


def test_a_run_stops_and_goes_on_bit_by_bit_or_with_its_state_elsewhere(tmp_path):
    for name, plan in (("parts", STREAMED), ("moved", {})):
        with stopped_after(2):
            assert not go(tmp_path / name, **plan).finished
    parts, moved, whole = (go(tmp_path / name, **STREAMED) for name in ("parts", "moved", "whole"))
    assert losses(parts.metrics) == losses(whole.metrics) and len(parts.metrics) == 4
    assert_same_model(parts, whole)
    found, expected = ([row["loss"] for row in run.metrics] for run in (moved, whole))
    assert found == pytest.approx(expected, rel=1e-5)
    # A model whose weights are on the host also answers.
    logits = parts.model(jnp.asarray([[1, 2, 3]], jnp.int32))
    assert logits.shape == (1, 3, 96) and bool(jnp.isfinite(logits).all())


@pytest.mark.parametrize(
    ("plan", "settings", "lora", "says"),
    [
        (STREAMED, {}, (), "the norm of all gradients is known when .* Choose clip='layer'"),
        (STREAMED, {"accumulate": 2, **LAYERS}, (), "Choose accumulate=1"),
        ({}, {"rounding": "stochastic"}, (), "with weights in float32"),
        ({"mesh": {"fsdp": 2}}, LAYERS, (), "on a mesh"),
        ({"update": "in_backward"}, {}, (2,), "weights='host' is for the frozen model"),
        ({}, LAYERS, (2,), "clipped by the norm of its own gradients"),
        ({}, {"rounding": "stochastic"}, (2,), "its weights are f32"),
    ],
)
def test_what_a_step_cannot_do_is_refused(plan, settings, lora, says):
    given = models.ON_HOST["tied, 101 rows"], settings_of(**settings), Plan(**plan)
    with pytest.raises(ValueError, match=says):
        llamem.abstract_lora_step(*given, llamem.LoraConfig(ranks=lora)) if lora else abstract_step(*given)


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_adapters_of_llama_8b_train_on_131072_tokens_on_one_v5e_and_30_gib_of_host():
    config = llamem.LlamaConfig.from_name("llama3.1-8b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    plan = Plan(weights="host", offload=("block_in",), mode="nested", head_groups=8, mlp_tiles=32)
    settings = TrainSettings(batch_size=1, seq_len=131_072)
    step, *shapes = llamem.abstract_lora_step(config, settings, plan, llamem.LoraConfig(ranks=(16,)))
    report = jaxmem.compile_report(step, *shapes, donate_argnums=(0,), chip="v5e-1")
    assert report.fits and report.peak_bytes <= 13.3 * 2**30 and report.host_bytes <= 30 * 2**30


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_llama_8b_trains_in_f32_on_131072_tokens_on_one_v5e():
    config = llamem.LlamaConfig.from_name("llama3.1-8b", param_dtype=jnp.float32, compute_dtype=jnp.bfloat16)
    plan = Plan(head_groups=8, mlp_tiles=32, **STREAMED)
    settings = TrainSettings(batch_size=1, seq_len=131_072, clip="layer")
    step, state, batch = abstract_step(config, settings, plan)
    report = jaxmem.compile_report(step, state, batch, donate_argnums=(0,), chip="v5e-1")
    assert report.fits and report.peak_bytes <= 13.0 * 2**30
    expected = llamem.estimate(config, plan, "v5e-1", seq_len=131_072, clip="layer")
    assert report.host_bytes == pytest.approx(expected.host_bytes, rel=0.02)
    assert report.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.15)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.tpu_compile
def test_llama_1b_trains_on_1048576_tokens_on_one_v6e():
    """Longer than RoPE was set up for: a statement about memory."""
    config = llamem.LlamaConfig.from_name("llama3.2-1b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    settings = TrainSettings(batch_size=1, seq_len=2**20, clip="layer", rounding="stochastic")
    plan = Plan(head_groups=8, mlp_tiles=32, **STREAMED)
    step, *shapes = abstract_step(config.replace(max_seq_len=2**20), settings, plan)
    report = jaxmem.compile_report(step, *shapes, donate_argnums=(0,), chip="v6e-1", depth="memory")
    assert report.fits and report.peak_bytes <= 30 * 2**30
