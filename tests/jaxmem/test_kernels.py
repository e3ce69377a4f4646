"""Pallas's kernels for GPUs that are not there: their compiler answers, with the bytes counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import jaxmem

triton = pytest.importorskip("jax.experimental.pallas.triton", exc_type=ImportError)
mosaic_gpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", exc_type=ImportError)


def increment(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1.0


def called(x, params, rows, columns):
    grid = x.shape[0] // rows, x.shape[1] // columns
    block = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
    return pl.pallas_call(
        increment, jax.typeof(x), grid=grid, in_specs=[block], out_specs=block, compiler_params=params
    )(x)


def by_triton(x):
    y = called(x, triton.CompilerParams(num_warps=4), 64, 64)
    return (y @ y.T).sum(1)


def by_mosaic(x):
    return called(x, mosaic_gpu.CompilerParams(), 64, 128)


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("fn", "sizes", "expected"),
    [(by_triton, (1024, 576), 4 * (2 * 1024 * 576 + 1024**2 + 1024)), (by_mosaic, (4096, 128), 4 * 2 * 4096 * 128)],
    ids=["Triton", "Mosaic"],
)
def test_kernels_for_an_absent_gpu_are_answered(fn, sizes, expected):
    if not jaxmem.available("h100"):
        pytest.skip("no compiler for the H100 here")
    report = jaxmem.compile_report(fn, jax.ShapeDtypeStruct(sizes, jnp.float32), chip="h100", cache=False)
    assert abs(report.peak_bytes - expected) < 64 * 2**10 and report.kernels == 1


def test_a_kernel_of_the_users_own_is_refused_in_a_sentence():
    def called(x):
        return jax.ffi.ffi_call("mine", jax.typeof(x))(x) + 1

    with pytest.raises(ValueError, match=r"^the program calls mine, and the compiler for h100 .*chip='local'\.$"):
        jaxmem.compile_report(called, jax.ShapeDtypeStruct((3, 5), jnp.float32), chip="h100")
