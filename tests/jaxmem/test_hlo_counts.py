"""What optimised programs compute and send: counted in texts of real compilers, and in programs compiled here."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import compiling
from jaxmem.reading.dump import read_dump
from jaxmem.reading.hlo import Collective, collectives, compiled_matmul_flops, kernel_constant_bytes, parse

# Lines that three compilers wrote, cut to what matters. A batch of 2 x 8 products [1024, 128] @ [128, 1024].
TPU_BATCH = """
ENTRY %main (q: bf16[2,1024,8,128]) -> bf16[2,8,1024,1024] {
  %fusion.7 = bf16[2,1024,8,128]{3,1,2,0} fusion(%q), kind=kLoop
  %fusion.5 = bf16[2,1024,8,128]{3,1,2,0} fusion(%q), kind=kLoop
  ROOT %convolution-base-dilated.1 = bf16[2,8,1024,1024]{2,3,1,0:T(8,128)} convolution(%fusion.7, %fusion.5), \
window={size=2x8 stride=1x7 lhs_dilate=2x8}, dim_labels=0b1f_0o1i->01bf, metadata={op_name="dot_general"}
}
"""
CUBLAS_BATCH = """
ENTRY %main (a: bf16[16,1024,128], b: bf16[16,128,1024]) -> bf16[16,1024,1024] {
  %a = bf16[16,1024,128]{2,1,0} parameter(0)
  %b = bf16[16,128,1024]{2,1,0} parameter(1)
  ROOT %custom-call.2 = (bf16[16,1024,1024]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"alpha_real":1,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],\
"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
}
"""
LOOP = """
%body.1 (t: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %t = (s32[], f32[8,16]{1,0}) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%t), index=1
  %all-gather.3 = f32[16,16]{1,0} all-gather(%x), dimensions={0}
  %dot.1 = f32[8,16]{1,0} dot(%x, %all-gather.3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %i.1 = s32[]{:T(128)} get-tuple-element(%t), index=0
  %one = s32[]{:T(128)} constant(1)
  %add.1 = s32[]{:T(128)} add(%i.1, %one)
  ROOT %tuple.2 = (s32[]{:T(128)}, f32[8,16]{1,0}) tuple(%add.1, %dot.1)
}

%condition.1 (t: (s32[], f32[8,16])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  %t.1 = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

ENTRY %main (x: f32[8,16]) -> f32[8,16] {
  %x.1 = f32[8,16]{1,0} parameter(0)
  %start = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[], u32[]) collective-permute-start(%x.1), source_target_pairs={{0,1}}
  %done = f32[8,16]{1,0} collective-permute-done(%start)
  %zero = s32[]{:T(128)} constant(0)
  %copy.1 = s32[]{:T(128)} copy(%zero)
  %tuple.1 = (s32[]{:T(128)}, f32[8,16]{1,0}) tuple(%copy.1, %done)
  %while.1 = (s32[], f32[8,16]{1,0}) while(%tuple.1), condition=%condition.1, body=%body.1
}
"""
# The same, where the elements of tuples are not taken out by lines of their own (libtpu 0.0.52).
SHORT_LOOP = "\n".join(line for line in LOOP.splitlines() if "get-tuple-element" not in line)
for taken_out, element in (("%x", "%t#1"), ("%i.1", "%t#0"), ("%i", "%t.1#0")):
    SHORT_LOOP = re.sub(rf"{taken_out}(?=[,)])", element, SHORT_LOOP)
# An asynchronous collective of a TPU: in the fusion that starts it, in one that computes meanwhile, and at its end.
ASYNCHRONOUS = """
%start (p: s32[4096]) -> (s32[4096], s32[8192]) {
  %p = s32[4096]{0} parameter(0)
  %all-gather.35 = s32[8192]{0} all-gather(%p), channel_id=3, dimensions={0}, frontend_attributes={chain_id="0"}
}

%async_collective_fusion.45 (p: s32[4096]) -> (bf16[8192], s32[8192]) {
  %p = s32[4096]{0} parameter(0)
  %all-gather.37 = s32[8192]{0:S(1)} all-gather(%p), channel_id=3, dimensions={0}, frontend_attributes={chain_id="0"}
}

%done (p: s32[4096]) -> s32[8192] {
  %p = s32[4096]{0} parameter(0)
  %all-gather.39 = s32[8192]{0} all-gather(%p), channel_id=3, dimensions={0}, frontend_attributes={chain_id="0"}
}

%body (t: (s32[], s32[4096])) -> (s32[], s32[4096]) {
  %t = (s32[], s32[4096]{0}) parameter(0)
  %async-collective-start = (s32[4096]{0}, s32[8192]{0}) fusion(%t), kind=kCustom, calls=%start
  %all-gather.42 = bf16[8192,4096]{1,0} all-gather(%t), channel_id=4, dimensions={0}
  %fusion.45 = (bf16[8192]{0}, s32[8192]{0}) fusion(%t), kind=kOutput, calls=%async_collective_fusion.45
  %async-collective-done = s32[8192]{0} fusion(%fusion.45), kind=kCustom, calls=%done
}

ENTRY %main (x: s32[4096]) -> s32[4096] {
  %while.1 = (s32[], s32[4096]{0}) while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"6"}}
}
"""


@pytest.mark.parametrize("text", [TPU_BATCH, CUBLAS_BATCH])
def test_batched_products_as_compilers_write_them(text):
    assert compiled_matmul_flops(parse(text)) == 16 * 2 * 1024 * 1024 * 128


@pytest.mark.parametrize("loop", [LOOP, SHORT_LOOP], ids=["a line for each element", "elements by number"])
def test_what_a_loop_holds_counts_as_often_as_it_runs(loop):
    assert compiled_matmul_flops(parse(loop)) == 5 * 2 * 8 * 16 * 16
    assert collectives(parse(loop)) == [
        Collective("all-gather", times=5, bytes=5 * 16 * 16 * 4, arriving=0),  # of one device: no groups are written
        Collective("collective-permute", times=1, bytes=8 * 16 * 4, arriving=8 * 16 * 4),
    ]
    peeled = loop.replace("constant(0)", "constant(1)")  # its first turn stands before it
    assert compiled_matmul_flops(parse(peeled)) == 4 * 2 * 8 * 16 * 16
    nobody_knows = loop.replace("constant(5)", "parameter(0)")
    assert compiled_matmul_flops(parse(nobody_knows)) is None and compiled_matmul_flops(parse("")) is None
    assert (
        compiled_matmul_flops(parse(nobody_knows.replace("body=", 'known_trip_count":{"n":"7"}, body=')))
        == 7 * 2 * 8 * 256
    )


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("constant(5)", "constant(inf)"),
        ("constant(0)", "constant(-1)"),
        ("constant(1)", "constant(7)"),
        ("add(%i.1, %one)", "multiply(%i.1, %one)"),
        ("tuple(%copy.1, %done)", "parameter(1)"),
    ],
)
def test_a_loop_that_does_not_count_by_1_between_integers_does_not_say_how_often_it_runs(line, other):
    assert line in LOOP
    program = parse(LOOP.replace(line, other))
    assert program.executions is None and compiled_matmul_flops(program) is None and collectives(program) is None


def test_an_asynchronous_collective_is_counted_once_however_many_fusions_it_stands_in():
    assert collectives(parse(ASYNCHRONOUS)) == [
        Collective("all-gather", times=6 + 6, bytes=6 * (2 * 8192 * 4096 + 4 * 8192), arriving=0)
    ]


def test_collectives_that_share_a_channel_are_counted_each():
    """As `jax.shard_map` sends everything."""
    line = "  %all-gather.3 = f32[16,16]{1,0} all-gather(%x), dimensions={0}\n"
    first = line.replace("dimensions", "channel_id=1, dimensions")
    both = LOOP.replace(line, first + first.replace("all-gather.3", "all-gather.4"))
    found = collectives(parse(both))
    assert found and found[0] == Collective("all-gather", times=10, bytes=10 * 16 * 16 * 4, arriving=0)


# A TPU's kernel that adds and writes its part alone, padded to tiles; a whole sum; ways in which groups are written.
SUMS = """HloModule jit_call, is_scheduled=true, num_partitions=8

%all-reduce-scatter.1 (input: bf16[64,128]) -> bf16[24,128] {
  %input = bf16[64,128]{1,0} parameter(0)
  %pad = bf16[96,128]{1,0} pad(%input, %zero), padding=0_32x0_0
  %all-reduce.1 = bf16[96,128]{1,0} all-reduce(%pad), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %dynamic-slice.1 = bf16[24,128]{1,0} dynamic-slice(%all-reduce.1, %i, %zero), dynamic_slice_sizes={24,128}
}

ENTRY %main (x: bf16[64,128]) -> bf16[24,128] {
  %x = bf16[64,128]{1,0} parameter(0)
  %all-reduce.2 = bf16[64,128]{1,0} all-reduce(%x), channel_id=2, replica_groups=[1,8]<=[8], to_apply=%add
  %all-gather-start = (bf16[8,128], bf16[16,128]) all-gather-start(%x), replica_groups=[4,2]<=[8], dimensions={0}
  %all-gather-done = bf16[16,128]{1,0} all-gather-done(%all-gather-start)
  %all-to-all.1 = bf16[64,128]{1,0} all-to-all(%x), replica_groups={}, dimensions={0}
  %reduce-scatter.1 = bf16[8,128]{1,0} reduce-scatter(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %fusion.1 = bf16[24,128]{1,0} fusion(%all-reduce.2), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_what_arrives_is_twice_for_a_whole_sum_what_it_is_for_a_scattered_one():
    row = 128 * 2
    found = {row.operation: (row.times, row.bytes // (128 * 2), row.arriving) for row in collectives(parse(SUMS)) or ()}
    assert found == {
        "all-reduce": (1, 64, 2 * 56 * row),
        "all-to-all": (1, 64, 56 * row),
        "reduce-scatter": (2, 8 + 24, (8 * 7 + 24 * 3) * row),
        "all-gather": (1, 16, 8 * row),
    }


def chain(x, w):
    """Batched and plain products, in a loop within a loop, forward and backward."""

    def inner(c, _):
        return jnp.tanh(jnp.einsum("bij,bjk->bik", c, w)), None

    def outer(c, _):
        return jax.lax.scan(jax.checkpoint(inner), c, None, length=3)[0], None

    return jnp.sum(jax.lax.scan(outer, x, None, length=2)[0] ** 2)


@pytest.mark.parametrize("name", ["cpu", "v5e-1", "a100-40"])
def test_the_compiled_count_is_the_traced_one_where_nothing_is_undone(name):
    if not jaxmem.available(name):
        pytest.skip(f"no compiler for {name} here")
    shapes = [jax.ShapeDtypeStruct((4, *s), "float32") for s in ((640, 256), (256, 256))]
    report = jaxmem.compile_report(jax.grad(chain, argnums=(0, 1)), *shapes, chip=name)
    one = 2 * 4 * 640 * 256 * 256
    assert report.matmul_flops == report.compiled_matmul_flops == 6 * one * (1 + 1 + 2)


# jax 0.10.2, of `jnp.tanh(x @ big).sum()` on a CPU, `big` closed over: one kernel, in which `big` and the product are.
CPU_KERNEL = """HloModule jit_f, is_scheduled=true

%fused_computation (param_0.3: f32[1024,2048]) -> f32[] {
  %param_0.3 = f32[1024,2048]{1,0} parameter(0)
  %constant.1 = f32[2048,4096]{1,0} constant({...})
  %dot_general.0 = f32[1024,4096]{1,0} dot(%param_0.3, %constant.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %tanh.0 = f32[1024,4096]{1,0} tanh(%dot_general.0)
  %constant.0 = f32[] constant(0)
  ROOT %reduce_sum.5 = f32[] reduce(%tanh.0, %constant.0), dimensions={0,1}, to_apply=%region_0.1
}

ENTRY %main.2 (x.1: f32[1024,2048]) -> f32[] {
  %x.1 = f32[1024,2048]{1,0} parameter(0), metadata={op_name="x"}
  ROOT %ynn_fusion = f32[] fusion(%x.1), kind=kCustom, calls=%fused_computation, \
backend_config={"outer_dimension_partitions":[],"fusion_config":{"kind":"__ynn_fusion"}}
}
"""
PLACES = """BufferAssignment:
allocation 0: size 8388608, parameter 0, shape |f32[1024,2048]| at ShapeIndex {}:
 value: <5 x.1 @0> (size=8388608,offset=0): f32[1024,2048]{1,0}
allocation 1: size 4, output shape is |f32[]|, maybe-live-out:
 value: <6 ynn_fusion @0> (size=4,offset=0): f32[]
"""


def test_what_a_cpus_kernel_holds_is_counted_or_told(tmp_path, monkeypatch):
    (tmp_path / "module_0001.jit_f.cpu_after_optimizations.txt").write_text(CPU_KERNEL)
    (tmp_path / "module_0001.jit_f.cpu_after_optimizations-buffer-assignment.txt").write_text(PLACES)
    answer = read_dump(tmp_path, "cpu")
    big = 2048 * 4096 * 4
    assert answer["constant_bytes"] == big + 4 and answer["kernel_array_bytes"] == big
    monkeypatch.setattr(compiling, "_compiled_here", lambda lowered, chip: answer | {"compile_seconds": 0.0})
    report = jaxmem.compile_report(lambda x: jnp.tanh(x).sum(), jax.ShapeDtypeStruct((1024, 2048), jnp.float32))
    assert report.peak_bytes == 8388608 + 4 + big + 4 and report.constant_bytes == big + 4
    assert "what those need while they run is not in these numbers: an array of 32.00 MiB" in str(report)
    plain = parse(CPU_KERNEL.replace("__ynn_fusion", "loop").replace('"kind":"loop"', '"kinds":"loop"'))
    assert kernel_constant_bytes(plain) == 0
