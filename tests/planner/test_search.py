"""Finding plans: against all of a finer grid by estimate, and what is done with a compiler that says no."""

import itertools
import random
from typing import Any

import jax.numpy as jnp
import pytest

import llamem
from llamem import LlamaConfig, NothingFits, Plan, Policy, find_plan, largest_batch, longest_context, smallest_chip
from llamem.planner import candidates, search
from llamem.planner.candidates import words

BF16 = {"param_dtype": jnp.bfloat16, "compute_dtype": jnp.bfloat16}
ONE_B = LlamaConfig.from_name("llama3.2-1b", **BF16)


def finer(config, chip, seq_len, batch_size):
    """The fastest plan that fits, of all in a grid with tiles that the search does not try."""
    rng = random.Random(0)
    remats = (
        "nothing",
        "attn",
        "qkv_attn",
        "minimal",
        None,
        Policy(save=("attn_out",)),
        Policy(save=("attn", "attn_out")),
    )
    loss = [(None, "tokens")] + [(n, axis) for n in (2, 5, 16, 60, 250) for axis in ("tokens", "vocab")]
    tools: Any = itertools.product(
        ("device", "host"), (1, 2, 4, 8), (1, 2, 3, 8, 20, 100), ((), ("block_in",)), ("scan", "nested")
    )
    grid: list[Any] = list(itertools.product(remats, tools, loss))
    best = None
    sample: Any = rng.sample(grid, 500)
    for remat, (moments, heads, rows, offload, mode), (tiles, axis) in sample:
        try:
            plan = Plan(
                mode=mode,
                remat=remat,
                moments=moments,
                head_groups=heads,
                mlp_tiles=rows,
                offload=offload,
                loss_tiles=tiles,
                loss_axis=axis if tiles else "auto",
            )
        except ValueError:
            continue
        if config.n_kv_heads % heads:
            continue
        one = llamem.estimate(config, plan, chip, seq_len=seq_len, batch_size=batch_size)
        if one.fits and (best is None or one.seconds.total < best.seconds.total):
            best = one
    return best


def cases():
    rng = random.Random(1)
    models = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "qwen3-0.6b", "small")
    chips = ("v5e-1", "v6e-1", "v5p-1", "a100-40", "a100-80", "h100")
    lengths = (1024, 4096, 8192, 32_768, 131_072)
    for _ in range(30):
        yield rng.choice(models), rng.choice(chips), rng.choice(lengths), rng.choice((1, 1, 2, 8))


THIRTY = list(cases())


def thirty(each_push):
    """The first few on each push, all of them every week."""
    return [
        pytest.param(case, id="-".join(map(str, case)), marks=[] if i < each_push else [pytest.mark.weekly])
        for i, case in enumerate(THIRTY)
    ]


@pytest.mark.parametrize("case", thirty(each_push=3))
def test_the_found_plan_is_within_5_percent_of_a_finer_grids_best(case):
    model, chip, seq_len, batch_size = case
    config = LlamaConfig.from_name(model, **BF16)
    seq_len = min(seq_len, config.max_seq_len)
    best = finer(config, chip, seq_len, batch_size)
    sizes = {"seq_len": seq_len, "batch_size": batch_size}
    try:
        found = find_plan(config, chip, **sizes, compiler=False, progress=None)
    except NothingFits:
        assert best is None, words(best.plan)
        return
    assert found.estimate.fits and found.report is None
    assert best is None or found.estimate.seconds.total <= 1.05 * best.seconds.total, words(best.plan)


def every_plan(config, chip, seq_len, batch_size):
    """The estimates of all combinations of the settings that a search tries, by brute force, with none left out."""
    losses = {}, {"loss_tiles": None}, {"loss_tiles": -(-config.vocab_size // 512), "loss_axis": "vocab"}
    tiles = itertools.product(candidates.ATTENTION_TILES, candidates.MLP_TILES)
    homes = itertools.product(candidates.OFFLOADS, candidates.MOMENTS)
    settings: Any = itertools.product(candidates.KEPT, tiles, homes, losses)
    for (mode, remat), (heads, rows), (offload, moments), loss in settings:
        tools: Any = {"head_groups": heads, "mlp_tiles": rows, "offload": offload, "moments": moments} | loss
        try:
            plan = Plan(mode=mode, remat=remat, **tools)
        except ValueError:
            continue
        if config.n_kv_heads % heads == 0:
            yield llamem.estimate(config, plan, chip, seq_len=seq_len, batch_size=batch_size)


@pytest.mark.parametrize("case", thirty(each_push=10))
def test_the_found_plan_is_within_5_percent_of_the_exhaustive_best(case, compiler):
    model, chip, seq_len, batch_size = case
    config = LlamaConfig.from_name(model, **BF16)
    sizes = {"seq_len": min(seq_len, config.max_seq_len), "batch_size": batch_size}
    fitting = [one.seconds.total for one in every_plan(config, chip, **sizes) if one.fits]
    agreeing = compiler()
    if not fitting:
        with pytest.raises(NothingFits):
            find_plan(config, chip, **sizes, progress=None)
        return
    found = find_plan(config, chip, **sizes, progress=None)
    assert found.report is not None and found.report.fits and len(agreeing.asked) == 1
    assert found.estimate.seconds.total <= 1.05 * min(fitting)


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("model", "chip", "seq_len"),
    [
        pytest.param("llama3.2-1b", "v5e-1", 131_072, marks=[pytest.mark.tpu_compile, pytest.mark.slow]),
        pytest.param("llama3.1-8b", "v5p-1", 8192, marks=[pytest.mark.tpu_compile, pytest.mark.slow]),
        pytest.param("llama3.2-1b", "h100", 32_768, marks=[pytest.mark.gpu_compile, pytest.mark.slow]),
    ],
)
def test_and_so_it_is_with_the_chips_own_compiler(model, chip, seq_len):
    if not llamem.available(chip):
        pytest.skip(f"no compiler for {chip} here")
    config = LlamaConfig.from_name(model, **BF16)
    best = min(one.seconds.total for one in every_plan(config, chip, seq_len, 1) if one.fits)
    found = find_plan(config, chip, seq_len=seq_len, progress=None)
    assert found.report is not None and found.report.fits
    assert found.estimate.seconds.total <= 1.05 * best


class Compiler:
    """Stands in for a chip's: says that plans need `factor` times what was estimated, or dies."""

    def __init__(self, factor=1.0, dies=()):
        self.factor, self.dies, self.asked = factor, dies, []

    def __call__(self, config, plan, chip, *, seq_len, batch_size=1, clip="global"):
        self.asked.append(plan)
        if len(self.asked) in self.dies:
            raise RuntimeError("the compiler died with signal 11")
        guess = llamem.estimate(config, plan, chip, seq_len=seq_len, batch_size=batch_size)
        peak = int(self.factor * guess.peak_bytes)
        return llamem.Report(guess.chip, 0, 0, 0, 0, peak, 0, 0, 0.0)


@pytest.fixture
def compiler(monkeypatch):
    def install(**how):
        one = Compiler(**how)
        monkeypatch.setattr(search, "ask", one)
        monkeypatch.setattr(search, "find_chip", lambda name: llamem.CHIPS[name])
        return one

    return install


def test_the_compiler_disposes(compiler):
    easy = compiler()
    first = find_plan(ONE_B, "v5e-1", seq_len=32_768, progress=None)
    assert len(easy.asked) == first.asked == 1 and first.report is not None and first.report.fits
    strict = compiler(factor=1.25)
    second = find_plan(ONE_B, "v5e-1", seq_len=32_768, progress=None)
    assert len(strict.asked) > 1 and second.plan != first.plan
    assert second.report is not None and second.report.fits
    assert second.estimate.seconds.total >= first.estimate.seconds.total


def test_nothing_that_the_compiler_refuses_is_returned(compiler):
    refusing = compiler(factor=100.0)
    with pytest.raises(NothingFits, match="nothing fits: 1 x 32,768 tokens on v5e-1") as error:
        find_plan(ONE_B, "v5e-1", seq_len=32_768, progress=None)
    assert 1 <= len(refusing.asked) <= search.ASKS
    assert error.value.closest is not None and "The least, by estimate" in str(error.value)


def test_a_compiler_that_dies_is_asked_about_another_plan(compiler):
    dying = compiler(dies=(1,))
    found = find_plan(ONE_B, "v5e-1", seq_len=8192, progress=None)
    assert len(dying.asked) == 2 and dying.asked[0] != found.plan


def test_progress_says_what_is_asked_and_what_came(compiler):
    compiler()
    said = []
    find_plan(ONE_B, "v5e-1", seq_len=8192, progress=said.append)
    assert "asking v5e-1's compiler" in said[0] and "fits" in said[1]


def test_what_is_found_explains_itself():
    found = find_plan(ONE_B, "v5e-1", seq_len=65_536, compiler=False, progress=None)
    assert "v5e-1" in found.why and "would be faster" in found.why
    costs = [(e.seconds.total, e.peak_bytes) for e in found.alternatives]
    assert costs == sorted(costs) and len(costs) > 2
    assert all(later[1] < earlier[1] for earlier, later in itertools.pairwise(costs)), "one is beaten in both"
    assert "Found first" in str(found) and "<table>" in found._repr_html_()
    short = find_plan(ONE_B, "v5p-1", seq_len=1024, compiler=False, progress=None)
    assert "memory is no constraint" in short.why


@pytest.mark.parametrize("factor", [1.1, 2.2])
def test_an_estimate_far_too_low_shortens_the_context_and_does_not_end_the_search(compiler, factor):
    compiler(factor=factor)
    found = longest_context(ONE_B, "v5e-1", progress=None)
    assert found.report is not None and found.report.fits


def test_longest_context_and_largest_batch_are_as_long_as_they_say():
    longest = longest_context(ONE_B, "v5e-1", compiler=False, progress=None)
    assert longest.seq_len % 1024 == 0
    config = LlamaConfig.from_name("llama3.2-3b", **BF16)
    for chip in ("v6e-1", "a100-40"):
        longest = longest_context(config, chip, compiler=False, progress=None)
        assert longest.estimate.fits
        longer = longest.seq_len + max(2048, longest.seq_len // 16)
        if longer <= config.max_seq_len:
            with pytest.raises(NothingFits):
                find_plan(config, chip, seq_len=longer, compiler=False, progress=None)
    batch = largest_batch(ONE_B, "v5e-1", seq_len=2048, compiler=False, progress=None)
    assert batch.batch_size > 4 and batch.estimate.fits


def test_the_smallest_chip_is_the_first_that_is_enough():
    found = smallest_chip(LlamaConfig.from_name("llama3.1-8b", **BF16), seq_len=8192, compiler=False, progress=None)
    assert found.estimate.fits
    for chip in llamem.CHIPS.values():
        memory = (chip.capacity_bytes or 0) * chip.devices
        if memory < (found.estimate.capacity_bytes or 0) * found.estimate.chip.devices:
            with pytest.raises(NothingFits):
                find_plan(found.estimate.config, chip.name, seq_len=8192, compiler=False, progress=None)


EIGHT_B = LlamaConfig.from_name("llama3.1-8b", param_dtype=jnp.float32, compute_dtype=jnp.bfloat16)


def test_what_no_plan_holds_on_the_chip_goes_to_a_host_that_is_large_enough():
    sizes: Any = {"seq_len": 131_072, "compiler": False, "progress": None}
    with pytest.raises(NothingFits) as without:
        find_plan(EIGHT_B, "v5e-1", **sizes)
    assert "host" not in str(without.value).split("The least")[0]
    found = find_plan(EIGHT_B, "v5e-1", host_bytes=256 * 2**30, clip="layer", **sizes)
    assert found.plan.weights == "host" and found.plan.update == "in_backward" and found.estimate.fits
    assert 90 * 2**30 < found.estimate.host_bytes < 256 * 2**30
    # The norm of all gradients: they go to the host and come back, which is faster than a second backward pass.
    by_all = find_plan(EIGHT_B, "v5e-1", host_bytes=256 * 2**30, **sizes)
    assert by_all.plan.update == "after" and by_all.estimate.host_bytes > found.estimate.host_bytes
    twice = llamem.estimate(EIGHT_B, found.plan, "v5e-1", seq_len=131_072)
    assert twice.seconds.total > 1.4 * by_all.estimate.seconds.total
    with pytest.raises(NothingFits, match=r"the host has 48\.0 GiB and would have to hold"):
        find_plan(EIGHT_B, "v5e-1", host_bytes=48 * 2**30, **sizes)


def test_a_link_slower_than_the_arithmetic_is_told():
    sizes: Any = {"host_bytes": 256 * 2**30, "clip": "layer", "compiler": False, "progress": None}
    short, long = (find_plan(EIGHT_B, "v5e-1", seq_len=length, **sizes) for length in (1024, 131_072))
    assert "The link to the host takes" in short.why and "The link to the host takes" not in long.why


def test_what_fits_on_the_chip_stays_there_however_large_the_host():
    one, other = (
        find_plan(ONE_B, "v5e-1", seq_len=8192, compiler=False, progress=None, host_bytes=host)
        for host in (None, 2**40)
    )
    assert one.plan == other.plan and one.plan.weights == "device"
    small = find_plan(ONE_B, "v5e-1", seq_len=131_072, host_bytes=6 * 2**30, compiler=False, progress=None)
    assert small.estimate.host_bytes <= 6 * 2**30


def test_several_chips_share_what_one_cannot_hold():
    config = LlamaConfig.from_name("llama3.1-8b", **BF16)
    with pytest.raises(NothingFits):
        find_plan(config, "v5e-1", seq_len=8192, compiler=False, progress=None)
    found = find_plan(config, "v5e-8", seq_len=8192, batch_size=8, compiler=False, progress=None)
    assert found.plan.mesh.devices == 8
    fixed = find_plan(config, "v5e-8", seq_len=8192, mesh={"context": 8}, compiler=False, progress=None)
    assert fixed.plan.mesh.context == 8


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"chip": "v9"}, "no chip is called 'v9'"),
        ({"seq_len": -1}, "seq_len=-1"),
        ({"batch_size": True}, "batch_size=True"),
        ({"seq_len": 200_000}, "beyond this model's max_seq_len=131,072"),
    ],
)
def test_bad_questions_are_refused(change, complaint, as_a_user):
    with pytest.raises(ValueError, match=complaint):
        find_plan(ONE_B, **({"chip": "v5e-1", "seq_len": 512, "compiler": False} | change))


def test_a_mesh_is_chosen_for_a_pod():
    config = LlamaConfig.from_name("llama3.1-70b", **BF16)
    found = find_plan(config, "v5p:4x4x4", seq_len=8192, batch_size=16, compiler=False, progress=None)
    mesh = found.plan.mesh
    # Sixteen sequences cannot be shared by 64 chips: something else than FSDP takes the rest.
    assert mesh.devices == 64 and mesh.fsdp == 16 and found.estimate.fits
