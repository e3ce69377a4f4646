"""Reports: what they say, against hand counts, against the process's real memory, and for chips that are not there."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import compiling as memory
from jaxmem import cross_compile as absent
from jaxmem.chips import compilers
from jaxmem.reading.dump import memory_is_assigned, read_dump
from jaxmem.reading.hlo import largest_buffers, parse
from jaxmem.tracing.arguments import read_leaves, shard_bytes

HERE = Path(__file__).resolve().parent
F32 = jnp.float32
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere the host's memory is another")
needs_tpu_compiler = pytest.mark.skipif(not jaxmem.available("v5e-1"), reason="needs libtpu")


def shape(*sizes: int, dtype=F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path))
    return tmp_path


def two_outputs(w, x):
    return {"y": x @ w, "z": w + 1}


def test_arguments_and_outputs_are_the_shapes():
    report = jaxmem.compile_report(two_outputs, shape(300, 500), shape(7, 300))
    assert report.argument_bytes == 4 * (300 * 500 + 7 * 300)
    assert 0 <= report.output_bytes - 4 * (7 * 500 + 300 * 500) < 64  # and a table of pointers
    assert report.alias_bytes == 0 and report.fits and report.capacity_bytes is None
    assert report.peak_bytes == report.argument_bytes + report.output_bytes + report.temp_bytes + report.constant_bytes


def test_a_donated_argument_is_counted_once():
    def update(state, x):
        return jax.tree.map(lambda a: a + x.sum(), state)

    state = {"a": shape(256, 256), "b": shape(100)}
    kept = jaxmem.compile_report(update, state, shape(3))
    donated = jaxmem.compile_report(update, state, shape(3), donate_argnums=(0,))
    assert donated.alias_bytes == 4 * (256 * 256 + 100)
    assert kept.peak_bytes - donated.peak_bytes == donated.alias_bytes


@pytest.mark.parametrize("chip", ["local", pytest.param("v5e-1", marks=[needs_tpu_compiler, pytest.mark.tpu_compile])])
def test_of_equal_arrays_it_says_how_many_live_at_once(chip):
    """Blocks of logits that a Python loop leaves for the backward pass, and one at a time in a scan."""
    n, args = 21, (shape(21 * 250, 256), shape(33_000, 256))

    def block(x, w):
        return jnp.sum(jax.nn.logsumexp(x @ w.T, axis=-1))

    def loop(x, w):
        return sum(block(part, w) for part in jnp.split(x, n))

    def scan(x, w):
        return jax.lax.scan(
            lambda total, part: (total + jax.checkpoint(block)(part, w), None), 0.0, x.reshape(n, 250, 256)
        )[0]

    reports = [jaxmem.compile_report(jax.grad(fn, (0, 1)), *args, chip=chip) for fn in (loop, scan)]
    assert all(report.timeline is not None for report in reports)
    # Compilers may turn them round.
    sizes = [[(set(re.findall(r"\b\d+", row.shape)), row.at_once or 1) for row in report.buffers] for report in reports]
    counts = [[count for found, count in rows if found == {"250", "33000"}] for rows in sizes]
    assert n - 1 <= max(counts[0]) <= n and max(counts[1], default=1) == 1, reports
    assert "at once" in str(reports[0]) and "<th>at once</th>" in reports[0]._repr_html_()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_of_gradients_are_said_and_those_of_one_array_are_not(dtype):
    params = {"a": shape(300, 500, dtype=dtype), "b": shape(500, 300, dtype=dtype)}
    state, parts = {"params": params, "m": params, "v": params}, shape(3, 7, 300)

    def gradients(params, part):
        return jax.grad(lambda p: jnp.sum(jnp.tanh(part @ p["a"].astype(F32)) @ p["b"].astype(F32)))(params)

    def step(state, parts, summed=("a", "b")):
        params = state["params"]

        def add(total, part):
            grads = gradients(params, part)
            return {name: total[name] + grads[name].astype(F32) for name in summed}, None

        zeros = {name: jnp.zeros(params[name].shape) for name in summed}
        total = params | jax.lax.scan(add, zeros, parts)[0]
        return jax.tree.map(lambda a, g: a - g.astype(a.dtype), state, dict.fromkeys(state, total))

    def warned(fn):
        return [words for words in jaxmem.compile_report(fn, state, parts).warnings if "a loop adds up" in words]

    (words,) = warned(step)
    assert "1.14 MiB in float32" in words and "2 parts can need more memory than 1" in words
    assert not warned(functools.partial(step, summed=("a",)))


def test_inside_of_a_shard_map_a_shape_is_one_devices():
    mesh, sizes = jax.sharding.AbstractMesh((4, 2), ("fsdp", "tensor")), []

    def own(x):
        sizes.append((jax.typeof(x).shape, shard_bytes(jax.typeof(x))))
        return x

    whole = jax.sharding.PartitionSpec("fsdp", "tensor")
    jax.eval_shape(jax.shard_map(own, mesh=mesh, in_specs=whole, out_specs=whole), shape(12, 10))
    assert sizes == [((3, 5), 60)]


@pytest.mark.quick
def test_the_largest_buffer_and_the_line_that_asked_for_it():
    def program(x, w):
        wide = jnp.sort(x @ w)  # a product that no fusion swallows
        return wide[:, :3].sum()

    report = jaxmem.compile_report(program, shape(64, 32), shape(32, 4096))
    top = report.buffers[0]
    assert top.shape == "f32[64,4096]" and top.bytes == 4 * 64 * 4096
    line = program.__code__.co_firstlineno + 1
    assert f"test_memory.py:{line}" in {row.source for row in report.buffers}
    assert "f32[64,4096]" in str(report) and "<td>f32[64,4096]</td>" in report._repr_html_()


def closing_over(where, big):
    """A program that uses `big` without taking it as an argument, directly or inside another program."""
    inner = jax.jit(lambda x: x @ big)
    own = jax.custom_vjp(lambda x: x @ big)
    own.defvjp(lambda x: (jnp.tanh(x) @ big, x), lambda x, g: (g @ big.T * x,))
    return {
        "plain": lambda x: x @ big,
        "inner jit, in a loop": lambda x: jax.lax.map(inner, x[None]),
        "custom_vjp": lambda x: jax.grad(lambda x: jnp.sum(own(x) ** 2))(x),
        "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c @ big), None), x, None, length=3)[0],
    }[where]


@pytest.mark.quick
@pytest.mark.parametrize("where", ["plain", "inner jit, in a loop", "custom_vjp", "scan"])
def test_closed_over_arrays_count_and_are_named(where):
    big = np.random.default_rng(0).normal(size=(600, 600)).astype(np.float32)
    report = jaxmem.compile_report(closing_over(where, big), shape(3, 600))
    assert 0 <= report.constant_bytes - big.nbytes < 256 + (where == "custom_vjp") * big.nbytes  # and its transpose
    held = report.argument_bytes + report.output_bytes + report.temp_bytes
    assert report.peak_bytes == held + report.constant_bytes == sum(report.parts.values())
    (note,) = report.warnings
    assert re.search(r"are constants: .*\(float32\[600, 600\] in test_memory\.py:\d+[,)]", note), note
    if report.timeline:
        assert report.timeline.assigned_bytes == report.peak_bytes
    assert not jaxmem.compile_report(lambda x, big: x @ big, shape(3, 600), shape(600, 600)).warnings


OPTIMISED = """\
HloModule jit_f

FileNames
1 "/elsewhere/model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=42 end_line=42 column=2 end_column=3}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%fused (p.0: f32[9,9]) -> f32[9,9] {
  %p.0 = f32[9,9]{1,0} parameter(0)
  ROOT %inside = f32[999,999]{1,0} negate(%p.0)
}

ENTRY %main (a: f32[10,20]) -> bf16[5] {
  %a = f32[10,20]{1,0} parameter(0)
  %b = f32[10,20]{1,0:T(8,128)S(1)} copy(%a)
  %c = s4[6,7]{1,0} convert(%a), metadata={op_name="jit(f)/while/body/round" stack_frame_id=1}
  %d = f8e4m3fn[100]{0} fusion(%c), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/x/cast"}
  %f = (bf16[50,60]{1,0:T(8,128)(2,1)}, f32[70]{0:T(1024)S(1)}) fusion(%d), kind=kOutput, calls=%fused
  %h = (f32[99,99]{1,0:T(8,128)S(5)}, f32[98,98]{1,0}, u32[]) copy-start(%d)
  %g = bf16[50,60]{1,0} get-tuple-element(%f), index=0
  ROOT %e = bf16[5]{0} slice(%d)
}
"""


def test_reading_optimised_programs():
    rows = {row.shape: row for row in largest_buffers(parse(OPTIMISED), 9)}
    # No parameter, no fusion's inside, nothing in VMEM or on the host; but each array of a fusion that writes several.
    assert set(rows) == {"s4[6,7]", "f8e4m3fn[100]", "bf16[50,60]", "bf16[5]"}
    assert [row.bytes for row in largest_buffers(parse(OPTIMISED), 9)] == [6000, 100, 21, 10]
    assert rows["s4[6,7]"].source == "model.py:42" and rows["s4[6,7]"].operation.endswith("body/round")


@pytest.mark.skipif(sys.platform != "linux" or jax.default_backend() != "cpu", reason="measures resident memory")
def test_reports_agree_with_the_process():
    # Freed memory goes back at once, so that the next program has to ask for its own.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(HERE / "real_peaks.py"), "stack", "loss", "donated", "closed over"]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    rows = {row["name"]: row for row in map(json.loads, out.splitlines())}
    differences = {name: row["rose_MB"] - row["said_MB"] for name, row in rows.items()}
    closed = rows["closed over"]
    assert closed["constant_MB"] == pytest.approx(2048 * 4096 * 4 / 1e6, rel=1e-3)
    if any("kernels of its own" in note for note in closed["notes"]):  # and what those need is not in the numbers
        assert differences.pop("closed over") > 0
    # A plan is what is needed at least.
    assert len(differences) >= 3 and min(differences.values()) > -5 and max(differences.values()) < 64, differences


def plain_loss(hidden, head):
    return jax.nn.logsumexp(hidden @ head.T, axis=-1).sum()


LOSS_SHAPES = shape(8192, 512, dtype=jnp.bfloat16), shape(128_256, 512, dtype=jnp.bfloat16)


@needs_tpu_compiler
@pytest.mark.tpu_compile
def test_a_tpu_that_is_not_there(empty_cache, monkeypatch):
    left: list[str] = []

    def reading(dump, platform):
        left.extend(file.name for folder in (dump, dump.parent) for file in folder.iterdir())
        return read_dump(dump, platform)

    monkeypatch.setattr(absent, "read_dump", reading)
    report = jaxmem.compile_report(jax.grad(plain_loss), *LOSS_SHAPES, chip="v5e-1")
    # The compiler was ended when memory was assigned.
    assert report.depth == "memory" and any(name.endswith("buffer-assignment.txt") for name in left)
    assert "answer.json" not in left and not any("after_codegen" in name for name in left)
    assert report.fits and report.argument_bytes == 2 * 512 * (8192 + 128_256) and report.host_bytes == 0
    assert report.peak_bytes > report.argument_bytes + 2 * 8192 * 128_256
    assert {"8192", "128256"} == set(re.findall(r"\d+", report.buffers[0].shape.split("[")[1])), report.buffers[0]
    line = plain_loss.__code__.co_firstlineno + 1
    assert f"test_memory.py:{line}" == report.buffers[0].source, report.buffers
    assert report.matmul_flops == 2 * 2 * 8192 * 512 * 128_256

    # The second time from the cache, without a compiler.
    monkeypatch.setattr(memory, "compile_absent", lambda *_: pytest.fail("compiled again"))
    again = jaxmem.compile_report(jax.grad(plain_loss), *LOSS_SHAPES, chip="v5e-1")
    assert again.peak_bytes == report.peak_bytes
    monkeypatch.undo()
    assert len(list((empty_cache / "reports").glob("*.json"))) == 1


def square(w, x):
    return jnp.tanh(w * x), x + 1


@needs_tpu_compiler
@pytest.mark.tpu_compile
def test_the_quick_answer_is_the_whole_one(empty_cache):
    shapes, options = (shape(5000, 7000), shape(5000, 7000)), {"chip": "v5e-1", "donate_argnums": (0, 1)}
    quick, whole = (jaxmem.compile_report(square, *shapes, depth=depth, **options) for depth in ("memory", "code"))
    assert (quick.depth, whole.depth) == ("memory", "code")
    assert quick.alias_bytes == quick.argument_bytes >= 2 * 4 * 5000 * 7000  # both results lie in donated arguments
    assert any("VMEM" in warning for warning in quick.warnings)  # so small
    for name in ("argument_bytes", "output_bytes", "alias_bytes", "host_bytes", "compiled_matmul_flops", "buffers"):
        assert getattr(quick, name) == getattr(whole, name), name
    few = 2**15 if jax.__version_info__ >= (0, 10) else 2**16
    assert abs(whole.temp_bytes - quick.temp_bytes) <= few  # a few KB come and go while code is made
    assert quick.peak_bytes == pytest.approx(whole.peak_bytes, rel=1e-3)


ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 1000, page 0, parameter 1, shape |f32[250]| at ShapeIndex {}, maybe-live-out:
 value: <12 add.1 @0> (size=1000,offset=0): f32[250]{0}
allocation 1: size 600, page 0, parameter 0, shape |f32[150]| at ShapeIndex {}:
allocation 2: size 8, page 0, output shape is |(f32[250], f32[10])|, maybe-live-out:
allocation 3: size 40, page 0, maybe-live-out:
allocation 4: size 7, page 0, constant:
allocation 5: size 5000, page 0, preallocated-temp:
 value: <3 color 5 @0> (size=300,offset=128): f32[75]{0}
allocation 6: size 90, color 1, page 0, preallocated-temp:
allocation 7: size 2000, color 5, page 0, parameter 2, shape |f32[500]| at ShapeIndex {}, maybe-live-out:
allocation 8: size 3000, color 5, page 0, preallocated-temp:
allocation 9: size 11, page 0, thread-local:
"""


def test_reading_how_memory_was_assigned(tmp_path):
    expected = {"argument": 1600, "output": 1048, "alias": 1000, "temp": 5000, "constant": 7, "host": 5000}
    assert not memory_is_assigned(tmp_path) and "temp_bytes" not in read_dump(tmp_path, "tpu")
    stem = "module_0003.jit_call.cl_1.after_optimizations"
    (tmp_path / f"{stem}-buffer-assignment.txt").write_text(ASSIGNMENT)
    assert not memory_is_assigned(tmp_path)  # somebody may still be writing it
    assert read_dump(tmp_path, "tpu").items() >= {f"{name}_bytes": size for name, size in expected.items()}.items()
    (tmp_path / f"{stem}.txt").write_text("HloModule jit_f\n\nENTRY %main () -> f32[] {\n}\n")
    (tmp_path / f"{stem}_after_buffer_assignment.txt").write_text("HloMod")
    assert memory_is_assigned(tmp_path) and read_dump(tmp_path, "tpu")["compiled_matmul_flops"] == 0


def test_a_gpu_has_assigned_memory_when_it_writes_its_first_kernel(tmp_path):
    (tmp_path / "module_0001.jit_call.0.ptx").write_text("//")
    assert not memory_is_assigned(tmp_path)
    stem = "module_0001.jit_call.sm_9.0a_gpu_after_optimizations"
    (tmp_path / f"{stem}-buffer-assignment.txt").write_text(ASSIGNMENT)
    assert memory_is_assigned(tmp_path)


@needs_tpu_compiler
@pytest.mark.tpu_compile
def test_too_big_is_a_report(empty_cache):
    shapes = shape(65_536, 512, dtype=jnp.bfloat16), LOSS_SHAPES[1]
    report = jaxmem.compile_report(jax.grad(plain_loss), *shapes, chip="v5e-1")
    assert not report.fits and report.refused == (jax.__version_info__ >= (0, 10))  # older ones lay it out, too big
    assert report.capacity_bytes and report.peak_bytes > report.capacity_bytes > 15 * 2**30
    assert "DOES NOT FIT" in str(report)
    # The message says "HLO temporaries" of what is the whole peak: a roomy chip needs the same for this program.
    roomy = jaxmem.compile_report(jax.grad(plain_loss), *shapes, chip="v5p-1")
    assert roomy.fits and report.peak_bytes == pytest.approx(roomy.peak_bytes, rel=0.1)
    assert report.argument_bytes == roomy.argument_bytes and report.temp_bytes < report.peak_bytes


def test_reports_side_by_side(as_a_user):
    shapes = shape(512, 256), shape(256, 512)
    whole = jaxmem.compile_report(lambda a, b: a @ b, *shapes)
    tall = jaxmem.compile_report(lambda a, b: jnp.sort((a @ b).ravel())[:1], *shapes)
    for report in (whole, tall):
        assert sum(report.parts.values()) == report.peak_bytes and min(report.parts.values()) >= 0
    assert whole.parts["outputs"] == 512 * 512 * 4 > tall.parts["outputs"]
    assert tall.parts["temporaries"] >= 512 * 512 * 4 > whole.parts["temporaries"]
    table = jaxmem.compare({"whole": whole, "tall": tall})
    lines = str(table).splitlines()
    assert [line.split()[0] for line in lines] == ["program", "whole", "tall"] and len({*map(len, lines[1:])}) == 1
    assert table._repr_html_().count("<tr>") == 3
    for wrong in ({}, [whole, tall], {"whole": 3}):
        with pytest.raises(ValueError, match=r"compare of a .*at least one report, each by a name of yours"):
            jaxmem.compare(wrong)  # pyrefly: ignore[bad-argument-type]


@pytest.fixture
def compiled(empty_cache, monkeypatch):
    """Stands for the compiler: the chip's name and the donated leaves of each program that reached it."""
    calls = []
    names = ("argument", "output", "alias", "temp", "host")
    empty: dict = {"buffers": [], "collectives": [], "compiled_matmul_flops": None, "compile_seconds": 0.0}
    empty["no_schedule"] = "no compiler ran"
    answer = {f"{name}_bytes": 0 for name in names} | empty
    monkeypatch.setattr(
        memory,
        "compile_absent",
        lambda request: calls.append((request.chip.name, request.donated)) or answer,
    )
    return calls


def cell(n_lines_above: int):
    """The same function, further down in its notebook."""
    namespace = {}
    exec(compile("\n" * n_lines_above + "def cell(a, b):\n    return a @ b", "cell.py", "exec"), namespace)
    return namespace["cell"]


@needs_tpu_compiler
@pytest.mark.tpu_compile
def test_the_cache_knows_a_program_by_what_it_computes_and_for_which_chip(compiled):
    def asked(fn=None, sizes=(8, 8), chip="v5e-1", **options) -> int:
        jaxmem.compile_report(fn or cell(0), shape(*sizes), shape(8, 8), chip=chip, **options)
        return len(compiled)

    assert asked() == 1
    assert asked() == asked(cell(9)) == 1  # the source line is not the program
    assert asked(sizes=(7, 8)) == 2
    assert asked(donate_argnums=(0,)) == 3 and asked(donate_argnums=(1,)) == 4
    assert asked(chip="v5p-1") == 5
    assert asked(lambda a, b: b @ a) == 6
    assert asked(cache=False) == 7 and asked(depth="code") == 8
    assert (
        asked() == asked(sizes=(7, 8)) == asked(donate_argnums=(1,)) == asked(chip="v5p-1") == asked(depth="code") == 8
    )
    assert compiled[2:5] == [("v5e-1", (0,)), ("v5e-1", (1,)), ("v5p-1", ())]


@needs_tpu_compiler
@pytest.mark.tpu_compile
def test_a_broken_cache_file_is_replaced(compiled, empty_cache):
    def report():
        return jaxmem.compile_report(cell(0), shape(8, 8), shape(8, 8), chip="v5e-1")

    report()
    (file,) = empty_cache.glob("reports/*")
    for number, content in enumerate(["", file.read_text()[:90], "\x00"], 2):
        file.write_text(content)
        assert report().temp_bytes == report().temp_bytes == 0
        assert len(compiled) == number and [file] == list(empty_cache.glob("reports/*"))


@needs_tpu_compiler
@pytest.mark.tpu_compile
def test_without_a_cache_folder_it_compiles_each_time_and_says_so_once(compiled, tmp_path, monkeypatch):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / "a file"))  # where no folder can be made
    with pytest.warns(UserWarning, match="cannot be kept in .*a file.*Set JAXMEM_CACHE to a folder") as heard:
        for _ in range(3):
            jaxmem.compile_report(cell(0), shape(8, 8), shape(8, 8), chip="v5e-1")
    assert len(compiled) == 3 and len(heard) == 1


@on_cpu
@pytest.mark.parametrize("donate", [(), (0,)])
def test_arguments_in_the_host_s_memory_for_the_device_at_hand(donate):
    """They are the weights here, as arrays and as shapes."""
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    w, x = np.ones((64, 32), np.float32), np.ones((8, 64), np.float32)

    def step(w, x):
        return jax.device_put(w + 1, jax.memory.Space.Host), x @ jax.device_put(w, jax.memory.Space.Device)

    for there in (jax.device_put(w, host), jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=host)):
        report = jaxmem.compile_report(step, there, x, donate_argnums=donate)
        assert report.argument_bytes == w.nbytes + x.nbytes
        assert any("in the host's memory count as the device's" in warning for warning in report.warnings)


def product(x, w):
    return jnp.sum(jnp.tanh(x @ w).astype(F32) ** 2)


@pytest.mark.parametrize("name", ["v5e-8", "h100-8"])
@pytest.mark.tpu_compile
@pytest.mark.gpu_compile
def test_several_chips_hold_their_shards_and_say_what_they_send(empty_cache, name):
    if not jaxmem.available(name):
        pytest.skip(f"no compiler for {name} here")
    chip = jaxmem.find_chip(name)
    mesh = chip.mesh(data=2, model=chip.devices // 2)
    P = jax.sharding.PartitionSpec

    def sharded(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec))

    x, w = sharded(P("data"), 4096, 2048), sharded(P("data", "model"), 2048, 8192)
    report = jaxmem.compile_report(jax.grad(product, argnums=(0, 1)), x, w, chip=name)
    assert report.argument_bytes == 2 * (4096 * 2048 // 2 + 2048 * 8192 // chip.devices)
    assert report.matmul_flops == 3 * 2 * 4096 * 2048 * 8192
    assert report.compiled_matmul_flops == report.matmul_flops // chip.devices
    sent = {row.operation: row.bytes for row in report.collectives}
    assert sent["all-gather"] == 2 * 2048 * 8192 // (chip.devices // 2)  # the weights of its columns, whole
    assert "all-reduce" in sent and "all-gather" in str(report) and "all-gather" in report._repr_html_()
    if name == "v5e-8":  # what has no sharding lies on every chip whole
        whole = jaxmem.compile_report(product, x, shape(2048, 8192, dtype=jnp.bfloat16), chip=name)
        assert whole.argument_bytes == 2 * (4096 * 2048 // 2 + 2048 * 8192)
        rows = jax.sharding.NamedSharding(mesh, P("data"))
        said = jaxmem.compile_report(
            lambda x, w: product(jax.lax.with_sharding_constraint(x, rows), w), x, w, chip=name
        )
        assert any("open them around it" in note for note in whole.warnings) and "contexts" not in str(said)


@needs_tpu_compiler
def test_shardings_that_do_not_fit_the_chips_are_explained(as_a_user):
    with pytest.raises(ValueError, match=r"v5e-8 has 8 chips, and the arguments' shardings name 0 meshes"):
        jaxmem.compile_report(product, shape(8, 8), shape(8, 8), chip="v5e-8")
    four = jaxmem.find_chip("v5e-4").mesh(data=4)
    x = jax.ShapeDtypeStruct((8, 8), F32, sharding=jax.sharding.NamedSharding(four, jax.sharding.PartitionSpec("data")))
    with pytest.raises(ValueError, match=r"mesh\(\{'data': 4\}\) needs 4 chips; v5e-8 has 8"):
        jaxmem.compile_report(product, x, x, chip="v5e-8")


@needs_tpu_compiler
@pytest.mark.tpu_compile
def test_a_compiler_that_dies_leaves_this_process_alone(empty_cache, monkeypatch, tmp_path):
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\necho its last words >&2\nkill -SEGV $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr(compilers.sys, "executable", str(crash))
    with pytest.raises(RuntimeError, match=r"died with signal 11.*(?s:.*)its last words"):
        jaxmem.compile_report(lambda a: a + 1, shape(3), chip="v5e-1")
    assert not list(empty_cache.glob("reports/*"))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_every_kind_given_or_closed_over(impl):
    key = jax.random.key(0, impl=impl)

    def draw(key, x):
        return jax.random.split(key)[0], x + jax.random.normal(key, (128, 128))

    data = jax.random.key_data(key).nbytes
    for given in (key, jax.ShapeDtypeStruct((), key.dtype)):
        report = jaxmem.compile_report(draw, given, shape())
        assert report.argument_bytes == data + 4
        assert 0 <= report.output_bytes - (data + 4 * 128 * 128) <= 32
    closed = jaxmem.compile_report(lambda x: draw(key, x)[1], shape())
    assert closed.argument_bytes == 4 and not closed.warnings
    kept = jaxmem.saved_residuals(lambda keys, x: jnp.sum(jnp.sin(x) * draw(keys[0], x)[1]), key[None], jnp.float32(1))
    assert kept.bytes >= 4 * 128 * 128


@pytest.mark.parametrize("number", [2.0, True, np.float64(2), jnp.float32(2)], ids=repr)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_outputs_have_the_types_that_jit_gives_them(number, dtype):
    def scale(x, by):
        return x * by

    report = jaxmem.compile_report(scale, shape(64, 128, dtype=dtype), number)
    out = jax.jit(scale)(jnp.ones((64, 128), dtype), number)
    assert report.output_bytes == out.nbytes


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((1.0, "bf16"), {}, TypeError, r"args\[1\] is 'bf16', of type str: .*functools\.partial"),
        ((1.0, 2.0), {"donate_argnums": 0}, ValueError, r"donate_argnums=0: expected .* such as donate_argnums=\(0,\)"),
        ((1.0, 2.0), {"donate_argnums": (0, 5)}, ValueError, r"expected a tuple of positions among the 2"),
        ((1.0, 2.0), {"chip": 3}, ValueError, r"chip=3: expected a name such as 'v5e-1'"),
        ((1.0, 2.0), {"depth": "peak"}, ValueError, r"depth='peak': expected 'memory', .* or 'code'"),
    ],
)
def test_arguments_that_are_none(as_a_user, args, options, error, message):
    with pytest.raises(error, match=message):
        jaxmem.compile_report(lambda x, y: x, *args, **options)


@pytest.mark.parametrize("other", [lambda a: a, lambda a: jax.device_put(a, jax.devices()[0])], ids=["same", "alias"])
@pytest.mark.parametrize("donated", [(0, 1), (0,), (1,)])
def test_an_array_that_is_given_twice_and_overwritten_is_refused_as_in_a_run(other, donated):
    def step(state, ema):
        return {"w": state["w"] + 1}, {"w": ema["w"] * 2}

    a = jnp.ones((300, 300))
    args = {"w": a}, {"w": other(a)}
    with pytest.raises(ValueError, match=r"`state\['w'\]` and `ema\['w'\]` are one array in memory, .*jnp\.copy"):
        jaxmem.compile_report(step, *args, donate_argnums=donated)
    assert jaxmem.compile_report(step, *args).fits
    one = shape(300, 300)
    assert jaxmem.compile_report(step, {"w": one}, {"w": one}, donate_argnums=donated).fits  # shapes lie nowhere
    with pytest.raises(Exception, match=r"(?i)donate"):
        jax.block_until_ready(jax.jit(step, donate_argnums=donated)(*args))


@needs_tpu_compiler
@pytest.mark.tpu_compile
def test_operands_in_two_memories_are_named_with_what_to_do():
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = {"w": jax.ShapeDtypeStruct((128, 128), F32, sharding=host)}
    with pytest.raises(ValueError, match=r"In the host's memory: `state\['w'\]`\..* jax\.memory\.Space\.Device"):
        jaxmem.compile_report(lambda state, grads: state["w"] - grads, state, shape(128, 128), chip="v5e-1")


def test_what_jit_was_told_of_arguments_has_to_be_told_to_the_report():
    step = jax.jit(lambda state, n: state * n, donate_argnums=0)
    for told in ((), (0,)):
        report = jaxmem.compile_report(step, shape(300, 500), 2.0, donate_argnums=told)
        assert (report.alias_bytes > 0) == bool(told) == ("Tell the report" not in str(report))
    with pytest.raises(ValueError, match=r"(?s)static arguments.*leave static_argnums out, and close over"):
        jaxmem.compile_report(jax.jit(lambda state, n: state * n, static_argnums=1), shape(3), 2)


@needs_tpu_compiler
@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.debug.print("{}", x),
        jax.checkpoint(lambda x: jax.pure_callback(np.sin, shape(3), x)),
        lambda x: jax.experimental.io_callback(print, None, x),
        lambda x: jax.debug.callback(print, x),
    ],
    ids=["print", "in a checkpoint", "io_callback", "callback"],
)
def test_a_chip_that_is_not_there_has_no_python_to_call(call):
    def calling(x):
        return x, call(x)

    assert jaxmem.compile_report(calling, shape(3)).fits
    with pytest.raises(ValueError, match=r"calls back into Python \(.+\).*v5e-1.*leave out jax\.debug\.print"):
        jaxmem.compile_report(calling, shape(3), chip="v5e-1")


@pytest.mark.tpu_compile
@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", ["v5e-1", "l4"])
def test_a_mesh_of_one_chip_and_four_bits(empty_cache, name):
    """A `shard_map` over one chip, beside an argument on the host and one of half a byte an element."""
    if not jaxmem.available(name):
        pytest.skip(f"no compiler for {name}")
    mesh = jaxmem.find_chip(name).mesh(data=1, model=1)
    P = jax.sharding.PartitionSpec

    def step(w, x, h, quarter):
        def block(x, w):
            return jax.lax.psum(jnp.tanh(x @ w), "model")

        block = jax.shard_map(block, mesh=mesh, in_specs=(P("data", "model"), P("model")), out_specs=P("data"))
        return block(x, w) + jax.device_put(h, jax.memory.Space.Device) + quarter.astype(F32)

    def on_mesh(spec, *sizes, dtype=F32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    args = (
        on_mesh(P("model"), 384, 640),
        on_mesh(P("data", "model"), 768, 384),
        jax.ShapeDtypeStruct((768, 640), F32, sharding=host),
        on_mesh(P("data"), 768, 640, dtype=jnp.int4),
    )
    report = jaxmem.compile_report(step, *args, chip=name)
    expected = 4 * (384 * 640 + 768 * 384) + 768 * 640 // 2
    assert report.argument_bytes == expected and report.host_bytes == 4 * 768 * 640
    assert read_leaves(step, args, (), jaxmem.CHIPS[name])[3].bytes == 768 * 640 // 2  # what refused programs are told
