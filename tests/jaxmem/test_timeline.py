"""Timelines: against a dump counted by hand, against another way of counting, against the compilers' own peaks."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compilers import not_of_old_compilers
from jax.ad_checkpoint import checkpoint_name
from timeline_programs import PROGRAMS
from timelines import FILES, MiB, handmade, write_dump

import jaxmem
import llamem
from jaxmem.common.printing import size_text
from jaxmem.reading.dump import read_dump
from jaxmem.reading.provenance import CATEGORIES, Provenance, named_category
from jaxmem.reading.timeline import ROOM, Loop, Pass, Timeline, find_passes
from jaxmem.tracing.arguments import argument_names
from jaxmem.tracing.jaxprs import differentiation_pass
from llamem_course import plots

of_this_machine = pytest.mark.skipif(
    jax.__version_info__ < (0, 10) and jax.default_backend() == "cpu",
    reason="the CPU compiler of JAX 0.7.2 writes no live ranges down, so that there is no timeline",
)


def read(folder, names=("params['w']", "x")) -> Timeline:
    answer = json.loads(json.dumps(read_dump(folder, "tpu")))  # as the cache keeps it
    if "schedule" not in answer:
        raise ValueError(answer["no_schedule"])
    return Timeline.from_schedule(answer["schedule"], "v5e-1", 2800, names, Provenance(("weights", "other")))


@pytest.mark.quick
def test_every_byte_of_a_dump_counted_by_hand(tmp_path):
    timeline = read(write_dump(tmp_path))
    arguments, stack, row = 400 + 200, 1600, 400
    expected = [arguments] * 16
    for first, last, size in ((2, 12, stack), (7, 8, row), (11, 12, row), (12, 13, row), (13, 14, row)):
        for step in range(first, last + 1):
            expected[step] += size
    assert timeline.curve().tolist() == expected
    assert (timeline.peak_step, timeline.peak_bytes) == (12, arguments + stack + 2 * row)
    assert timeline.assigned_bytes == arguments + 2500 and not timeline.fits
    assert timeline.passes == (("forward", 0, 11), ("backward", 11, 13), ("optimizer", 13, 15))
    assert [(loop.first, loop.end, loop.trips) for loop in timeline.loops] == [(4, 10, 4)]


def test_what_each_buffer_is_and_where_it_comes_from(tmp_path):
    timeline = read(write_dump(tmp_path))
    kinds = {(buffer.category, buffer.made_in, buffer.first, buffer.last) for buffer in timeline.buffers}
    assert kinds == {
        ("weights", "", 0, 15),
        ("other", "", 0, 15),  # an argument whose name tells nothing
        ("residuals", "forward", 2, 12),  # one buffer, through the loop that fills it
        ("workspace", "forward", 7, 8),
        ("rematerialised", "run again", 11, 12),
        ("gradients", "backward", 12, 13),
        ("workspace", "optimizer", 13, 14),
    }
    stack = next(buffer for buffer in timeline.buffers if buffer.category == "residuals")
    assert (stack.operation, stack.source) == ("jvp()/while/body/tanh", "model.py:12")  # not the write into the stack
    assert stack.shape == "f32[4,100]" and stack.space == "device"


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_told_and_crash_nothing(name, tmp_path):
    write_dump(tmp_path)
    file = tmp_path / f"module_0001.jit_step.{name}"
    whole = file.read_bytes()
    told = 0
    for damaged in [whole[: len(whole) * part // 8] for part in range(8)] + [bytes(range(256)) * 20, b"\n" * 99]:
        file.write_bytes(damaged)
        try:
            timeline = read(tmp_path)
        except ValueError:
            told += 1
        else:  # what the program's text alone tells is only names
            assert timeline.peak_bytes == 3000
    file.unlink()
    with pytest.raises(ValueError, match=r"dump|live ranges"):
        read(tmp_path)
    assert told >= (1 if name == "after_optimizations.txt" else 8)


def test_who_is_alive_adds_up_to_the_curve_at_every_step(tmp_path):
    for timeline in (read(write_dump(tmp_path)), handmade()):
        for step, size in enumerate(timeline.curve()):
            alive = timeline.alive(step)
            assert sum(buffer.bytes for buffer in alive) == size
            assert [buffer.bytes for buffer in alive] == sorted((buffer.bytes for buffer in alive), reverse=True)
        assert timeline.at_peak() == timeline.alive(timeline.peak_step)
        stacked = sum(timeline.by_category().values())
        np.testing.assert_array_equal(stacked, timeline.curve())
        runs = np.zeros(timeline.steps, np.int64)
        for stretches in timeline.runs().values():
            for first, last, size in stretches:
                runs[first : last + 1] += size
        np.testing.assert_array_equal(runs, timeline.curve())
        with pytest.raises(IndexError, match="has steps 0 to"):
            timeline.alive(timeline.steps)


def test_what_shares_an_address_counts_once():
    rng = np.random.default_rng(0)
    timeline = handmade()
    buffers = tuple(
        dataclasses.replace(
            timeline.buffers[0],
            bytes=int(rng.integers(1, 60)),
            first=int(first),
            last=int(first + rng.integers(0, 9)),
            allocation=int(rng.integers(0, 3)),
            offset=int(rng.integers(0, 90)),
            category=CATEGORIES[int(rng.integers(0, len(CATEGORIES)))],
        )
        for first in rng.integers(0, 20, 200)
    )
    timeline = dataclasses.replace(timeline, buffers=buffers, steps=30, passes=(), loops=())
    painted = np.zeros((30, 3, 200), bool)
    for buffer in buffers:
        where = slice(buffer.offset, buffer.offset + buffer.bytes)
        painted[buffer.first : buffer.last + 1, buffer.allocation, where] = True
    assert timeline.curve().tolist() == painted.sum(axis=(1, 2)).tolist()
    room = dataclasses.replace(buffers[0], name=ROOM, bytes=200, first=0, last=29, allocation=1, offset=0)
    with_room = dataclasses.replace(timeline, buffers=(*buffers, room))  # a result's, which others use before it
    left = [sum(span.bytes for span in with_room.alive(step) if span.name == ROOM) for step in range(30)]
    assert left == (200 - painted[:, 1].sum(axis=1)).tolist()
    np.testing.assert_array_equal(with_room.curve(), timeline.curve() + left)


def test_categories_of_your_own_and_the_host_as_a_curve_of_its_own(as_a_user):
    assert handmade().curve("host").tolist() == [0, 0, *[MiB] * 5, 0, 0, 0]
    timeline = handmade().with_categories({"<made>/residuals": "workspace"})
    assert set(timeline.by_category()) == {"weights", "logits", "gradients", "workspace"}
    with pytest.raises(ValueError, match=r"'activations' is no category\. Known: weights, optimizer"):
        timeline.with_categories({"x": "activations"})  # pyrefly: ignore[bad-assignment]


def test_arguments_are_told_by_the_first_telling_name():
    names = "state.params['wq'].value", "state.opt_state[1][0].mu['params']", "batch[0]", "params_of_something"
    assert [named_category(name) for name in names] == ["weights", "optimizer", "batch", "other"]


def test_borders_of_the_passes_lie_where_fewest_steps_are_wrong():
    marks: dict[str, Pass] = {"f": "forward", "b": "backward", "r": "run again", "o": "optimizer", ".": ""}

    def borders(text, *loops):
        return [(name, first, end) for name, first, end in find_passes([marks[letter] for letter in text], loops)]

    assert borders("oo.ff.bff.fbrrb.fbb.boo") == [("forward", 0, 11), ("backward", 11, 21), ("optimizer", 21, 23)]
    assert borders("ffbbb") == [("forward", 0, 2), ("backward", 2, 5)]
    assert borders("o..oo") == [] and borders("ff") == []
    # The loop over layers is short, and runs often; before it stands what an optimizer computes without gradients.
    ends = borders("ffbboooooorbbooo", Loop(0, 2, 8), Loop(10, 13, 8))
    assert ends == [("forward", 0, 2), ("backward", 2, 13), ("optimizer", 13, 16)]
    assert borders("ffbboooooorbbooo", Loop(10, 13, None))[1] == ("backward", 2, 4)


def test_what_has_no_name_but_that_of_the_sharded_program_is_not_the_optimizers(tmp_path):
    file = write_dump(tmp_path) / "module_0001.jit_step.after_optimizations.txt"
    file.write_text(file.read_text().replace("jit(step)/mul", "jit(call)/shard_map"))
    assert [name for name, _, _ in read(tmp_path).passes] == ["forward", "backward", "optimizer"]
    file.write_text(file.read_text().replace("jit(step)/sub", "jit(call)/shard_map"))
    assert [name for name, _, _ in read(tmp_path).passes] == ["forward", "backward"]


def test_jax_still_writes_how_an_operation_was_derived(remat3):
    """A canary: `differentiation_pass` reads what JAX does not promise."""

    def layer(w, x):
        return jnp.sin(jnp.tanh(x @ w))

    def loss(w, x):
        carry, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, w)
        return jnp.sum(carry**2)

    w, x = jnp.ones((3, 8, 8)), jnp.ones((4, 8))
    text = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x)).lower(w, x).compile().as_text() or ""
    names = {line.split('op_name="')[1].split('"')[0] for line in text.splitlines() if 'op_name="' in line}
    found = {differentiation_pass(name): name for name in names}
    assert set(found) == {"forward", "backward", "run again", ""}, found


def loss(weights, batch):
    hidden = batch
    for w in weights:
        hidden = jnp.tanh(hidden @ w)
    with jax.named_scope("logits"):
        return jnp.mean(jax.nn.logsumexp(hidden @ weights[0].T, axis=-1))


def update(weights, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, batch))


SHAPES = ([jax.ShapeDtypeStruct((96, 96), jnp.float32)] * 3, jax.ShapeDtypeStruct((1000, 96), jnp.float32))


@of_this_machine
def test_a_report_of_this_machine_has_its_timeline():
    report = jaxmem.compile_report(update, *SHAPES, donate_argnums=(0,))
    timeline = report.timeline
    assert timeline is not None, report.no_timeline
    assert timeline.chip == "local" and timeline.capacity_bytes is None
    assert timeline.peak_bytes == pytest.approx(report.peak_bytes, rel=0.005)
    parts = timeline.by_category()
    # What the caller holds is there throughout; the compiler may copy a weight into another layout.
    assert min(parts["weights"]) == 3 * 96 * 96 * 4 and set(parts["batch"]) == {1000 * 96 * 4}
    assert "logits" in parts and "test_timeline.py" in next(
        b.source for b in timeline.buffers if b.category == "logits"
    )


@of_this_machine
def test_what_is_printed_in_order_moves_no_argument():
    """A token stands before the arguments of such a program."""

    def step(tokens, params):
        jax.debug.print("{}", tokens[0, 0], ordered=True)
        return jnp.tanh(tokens.astype(jnp.float32) @ params)

    shapes = jax.ShapeDtypeStruct((64, 96), jnp.int32), jax.ShapeDtypeStruct((96, 160), jnp.float32)
    report = jaxmem.compile_report(step, *shapes)
    if report.timeline is None:
        pytest.skip(report.no_timeline)
    held = {b.operation: (b.bytes, b.category) for b in report.timeline.buffers if b.name == "argument"}
    assert held == {"tokens": (4 * 64 * 96, "batch"), "params": (4 * 96 * 160, "weights")}


def test_an_optimizer_makes_no_logits_however_many_tokens_there_are():
    heads = {"n_heads": 2, "n_kv_heads": 2, "head_dim": 32, "max_seq_len": 256}
    config = llamem.LlamaConfig(vocab_size=640, d_model=256, d_ff=96, n_layers=1, **heads)
    settings = llamem.TrainSettings(batch_size=1, seq_len=256)  # as many tokens as the head has columns
    step, *shapes = llamem.abstract_step(config, settings)
    timeline = jaxmem.compile_report(step, *shapes, donate_argnums=(0,)).timeline
    assert timeline is not None
    made = {buffer.made_in for buffer in timeline.buffers if buffer.category == "logits"}
    assert made and "optimizer" not in made


@of_this_machine
@pytest.mark.parametrize("remat", [None, "nothing"])
def test_residuals_of_a_scan_are_those_that_jax_saves(remat):
    def loss(w, x):
        return jnp.sum(llamem.apply_stack(lambda w, x: jnp.tanh(jnp.sin(x @ w)) + x, w, x, remat=remat) ** 2)

    shapes = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32), jax.ShapeDtypeStruct((300, 64), jnp.float32)
    saved = sum(row.bytes for row in jaxmem.saved_residuals(loss, *shapes).rows if not row.argument)
    timeline = jaxmem.compile_report(jax.value_and_grad(loss), *shapes).timeline
    assert timeline is not None and [name for name, _, _ in timeline.passes] == ["forward", "backward"]
    _, backward, _ = timeline.passes[1]
    # What the loss is still summed from is gone an operation or two later.
    kept = sum(one.bytes for one in timeline.alive(backward) if one.category == "residuals" and one.last > backward + 2)
    assert kept == pytest.approx(saved, rel=0.001)  # and a loop's counter
    assert [loop.trips for loop in timeline.loops] == [5, 5]
    stacks = {buffer.shape for buffer in timeline.buffers if buffer.category == "gradients"}
    assert "f32[5,64,64]" in stacks


@not_of_old_compilers
@pytest.mark.tpu_compile
def test_what_waits_on_the_host_is_what_is_saved_there():
    def loss(w, x):
        layer = lambda w, x: jnp.tanh(checkpoint_name(x, "block_in") @ w) + x  # noqa: E731
        remat = llamem.Policy(offload=("block_in",))
        return jnp.sum(llamem.apply_stack(layer, w, x, remat=remat) ** 2)

    shapes = jax.ShapeDtypeStruct((6, 1024, 1024), jnp.float32), jax.ShapeDtypeStruct((16_384, 1024), jnp.float32)
    report = jaxmem.compile_report(jax.value_and_grad(loss), *shapes, chip="v5e-1")
    timeline = report.timeline
    assert timeline is not None
    assert timeline.curve("host").max() == report.host_bytes > 0
    assert timeline.curve("host")[0] == 0  # nothing waits there before it is made
    assert {buffer.category for buffer in timeline.buffers if buffer.space == "host"} == {"residuals"}


TPU = [not_of_old_compilers, pytest.mark.tpu_compile]


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        pytest.param("stack, unrolled, keep all", "local", marks=of_this_machine),
        pytest.param("cond", "local", marks=of_this_machine),
        pytest.param("stack, scan, remat", "v5e-1", marks=TPU),
        pytest.param("loss, plain", "v5e-1", marks=TPU),
        pytest.param("loss, tiles of tokens", "a100-40", marks=pytest.mark.gpu_compile),
    ],
)
def test_the_highest_point_is_what_the_compiler_set_aside(name, chip):
    program = PROGRAMS[name]()
    report = jaxmem.compile_report(program.fn, *program.args, donate_argnums=program.donate_argnums, chip=chip)
    timeline = report.timeline
    assert timeline is not None, report.no_timeline
    assert timeline.assigned_bytes == report.peak_bytes
    # What is set aside and not in use: gaps between arrays (benchmarks/timeline_peaks.md).
    assert 0 <= timeline.gap_bytes <= 0.04 * timeline.assigned_bytes
    assert timeline.curve("host").max() <= report.host_bytes
    largest = max((b.bytes for b in timeline.buffers if b.space == "device" and b.made_in), default=0)
    if report.buffers and timeline.passes:  # the text's largest arrays, without the padding of tiles
        assert largest >= report.buffers[0].bytes or chip.startswith("v")


def adamw_step(weights, moments, batch):
    """Four layers and their moments, none of which is donated."""

    def loss(weights):
        hidden = batch
        for w in weights:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean(hidden**2)

    gradients = jax.grad(loss)(weights)
    updates, moments = optax.adamw(1e-3).update(gradients, moments, weights)
    return optax.apply_updates(weights, updates), moments


def custom_vjp_layers(weights, batch):
    """Gradients of eight layers that say themselves what they keep."""
    plain = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    layer = jax.custom_vjp(plain)
    layer.defvjp(lambda w, x: (plain(w, x), (w, x)), lambda kept, g: jax.vjp(plain, *kept)[1](g))
    return jax.grad(lambda weights: jnp.sum(functools.reduce(lambda x, w: layer(w, x), weights, batch) ** 2))(weights)


SQUARE, FLAT = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((384, 384), jnp.float32)
WEIGHTS = [SQUARE] * 4
NOT_DONATED = {
    "adamw": (adamw_step, WEIGHTS, jax.eval_shape(optax.adamw(1e-3).init, WEIGHTS), SQUARE),
    "custom_vjp": (custom_vjp_layers, WEIGHTS * 2, jax.ShapeDtypeStruct((4096, 1024), jnp.float32)),
}


@pytest.mark.parametrize("name", NOT_DONATED)
@pytest.mark.parametrize(
    "chip", [pytest.param("v5e-1", marks=TPU), pytest.param("h100", marks=pytest.mark.gpu_compile)]
)
def test_the_room_of_results_is_taken_before_they_are_written(name, chip):
    step, *shapes = NOT_DONATED[name]
    report = jaxmem.compile_report(step, *shapes, chip=chip)
    timeline = report.timeline
    assert timeline is not None, report.no_timeline
    assert 0.97 * report.peak_bytes <= timeline.peak_bytes <= report.peak_bytes
    assert timeline.curve()[0] >= report.argument_bytes + report.output_bytes
    assert timeline.at_peak()[0].bytes > 0 and "gradients" in timeline.by_category()


def small_parts(x, image, key):
    """What a TPU does in pieces of memory of its own."""
    kernel = x[:27].reshape(3, 3, 3, -1)[..., None, :8]
    factor = jnp.linalg.cholesky(x @ x.T + jnp.eye(384))
    convolved = jax.lax.conv_general_dilated(
        image, kernel, (1, 1, 1), "SAME", dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
    )
    return factor, jnp.sort(x), convolved, jax.random.normal(key, (384, 384))


@pytest.mark.parametrize(
    "chip", [pytest.param("v5e-1", marks=TPU), pytest.param("h100", marks=pytest.mark.gpu_compile)]
)
def test_what_no_array_fills_is_a_row_that_closes_the_sum(chip):
    image = jax.ShapeDtypeStruct((2, 8, 16, 16, 1), jnp.float32)
    report = jaxmem.compile_report(small_parts, FLAT, image, jax.random.key(0), chip=chip)
    timeline = report.timeline
    assert timeline is not None, report.no_timeline
    assert sum(span.bytes for span in timeline.at_peak()) + timeline.gap_bytes == report.peak_bytes
    row = f"{size_text(timeline.gap_bytes):>10}  gaps           between arrays"
    assert row in str(timeline) if timeline.gap_bytes else "gaps" not in str(timeline)
    assert timeline.gap_bytes < 0.03 * report.peak_bytes or chip == "v5e-1"


@of_this_machine
def test_a_program_in_jaxs_cache_is_compiled_all_the_same():
    """In the cache of these tests, which keeps each program."""
    for _ in range(2):
        assert jaxmem.compile_report(lambda x: jnp.sin(x) + 2, jnp.ones((3, 5))).timeline is not None
    assert jax.config.jax_enable_compilation_cache  # pyrefly: ignore[missing-attribute] (it is on again)


def test_a_dump_that_cannot_be_read_costs_the_timeline_alone(monkeypatch):
    def unread(*files):
        raise ValueError("the compiler wrote down no live ranges.")

    monkeypatch.setattr("jaxmem.reading.dump.read_schedule", unread)
    report = jaxmem.compile_report(update, *SHAPES)
    assert report.timeline is None and report.peak_bytes
    assert "no live ranges" in report.no_timeline
    with pytest.raises(ValueError, match="the report 'update' has no timeline"):
        plots.timeline({"update": report})


@pytest.mark.parametrize(
    ("fn", "args", "names"),
    [
        (lambda params, batch: 0, ({"w": 1, "b": 2}, 3), ["params['b']", "params['w']", "batch"]),
        (lambda *parts: 0, (1, [2]), ["parts[0]", "parts[1][0]"]),
        (functools.partial(lambda a, b: 0, b=2), (1,), ["a"]),
        (jnp.sin, (1,), ["x"]),
    ],
)
def test_arguments_are_called_as_the_function_calls_them(fn, args, names):
    assert argument_names(fn, args) == names
