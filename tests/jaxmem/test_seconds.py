"""Seconds by a TPU compiler's own estimate: loops as often as they run, what has no estimate is named."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem import CHIPS, Report, compile_report
from jaxmem.reading.cost import estimated_cycles
from jaxmem.reading.hlo import parse

PROGRAM = """HloModule jit_call

%body (p: (s32[], f32[256,256])) -> (s32[], f32[256,256]) {
  %p = (s32[], f32[256,256]) parameter(0)
  %x = f32[256,256]{1,0} get-tuple-element(%p), index=1
  %product = f32[256,256]{1,0} fusion(%x), kind=kOutput, calls=%inner, metadata={op_name="jit(call)/call_exported/jit(flat)/while/body/dot_general"}, backend_config={"estimated_cycles":"100"}
  %kernel = f32[256,256]{1,0} custom-call(%product), custom_call_target="tpu_custom_call", metadata={op_name="jit(call)/call_exported/jit(flat)/while/body/splash"}
  ROOT %t = (s32[], f32[256,256]) tuple(%x, %kernel)
}

%condition (p: (s32[], f32[256,256])) -> pred[] {
  %p = (s32[], f32[256,256]) parameter(0)
  ROOT %less = pred[] compare(%p, %p), direction=LT
}

ENTRY %main (a: f32[256,256]) -> f32[256,256] {
  %a = f32[256,256]{1,0} parameter(0)
  %loop = (s32[], f32[256,256]) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %out = f32[256,256]{1,0} fusion(%loop), kind=kLoop, calls=%inner, metadata={op_name="jit(call)/call_exported/jit(flat)/add"}, backend_config={"estimated_cycles":"30"}
}
"""  # noqa: E501  (as compilers write it)


@pytest.mark.quick
def test_an_operation_in_a_loop_counts_as_often_as_it_runs_and_a_kernel_is_named():
    program = parse(PROGRAM)
    cycles = estimated_cycles(program, program)
    assert cycles and cycles["step"] == {"product": 700, "out": 30}
    rows = {row["operation"]: (row["times"], row["cycles"]) for row in cycles["costs"]}
    assert rows == {"while/body/dot_general": (7, 700), "add": (1, 30)}
    assert cycles["untimed"] == {"while/body/splash": 7}
    # A loop that says how often it runs only before its code was made, and one that never does.
    silent = parse(PROGRAM.replace("known_trip_count", "no_trip_count"))
    assert estimated_cycles(silent, program) == cycles
    assert estimated_cycles(silent, silent) is None
    assert estimated_cycles(parse(""), program) is None


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_a_product_takes_about_what_the_data_sheet_says_and_seven_take_seven_times_that():
    def products(n):
        def f(x, w):
            return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 2048), (n, 2048, 2048))]
        return compile_report(f, *shapes, chip="v5e-1", depth="code")

    seven, two = products(7), products(2)
    assert seven.seconds and two.seconds
    in_all = [sum(row.seconds for row in report.costs if "dot_general" in row.operation) for report in (two, seven)]
    assert in_all[1] == pytest.approx(3.5 * in_all[0], rel=0.05)
    speed = 7 * 2 * 2048**3 / in_all[1]
    assert 0.7 < speed / (CHIPS["v5e-1"].peak_flops or 0) < 1.02
    assert seven.slowest[0].seconds == max(row.seconds for row in seven.costs) and "dot" in seven.slowest[0].operation
    if seven.timeline:
        assert sum(seven.timeline.seconds) == pytest.approx(seven.seconds)
    assert Report.from_json(seven.to_json()) == seven
    assert "by the compiler's estimate" in str(seven)


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_who_is_asked_for_memory_alone_estimates_nothing():
    report = compile_report(lambda x: x @ x, jax.ShapeDtypeStruct((512, 512), jnp.bfloat16), chip="v5e-1")
    assert report.seconds is None and not report.slowest and "estimate" not in str(report)
