"""FLOPs of traced programs: of loops, branches and convolutions, against counting every product of ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxmem
from jaxmem.tracing.flops import count_products, matmul_flops, matmul_flops_again


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def flops(fn, *args):
    return matmul_flops(jax.make_jaxpr(fn)(*args).jaxpr)


@pytest.mark.quick
def test_loops_are_multiplied_out():
    x, w = shape(11, 16), shape(5, 16, 16)
    unit = 2 * 11 * 16 * 16

    def scanned(x, w, remat=False):
        def body(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(jax.checkpoint(body) if remat else body, x, w)[0].sum()

    assert flops(scanned, x, w) == 5 * unit
    assert flops(jax.grad(scanned, argnums=(0, 1)), x, w) == 15 * unit
    # tanh keeps its result, so that the backward pass needs the product once more.
    gradient = jax.grad(lambda x, w: scanned(x, w, True), argnums=(0, 1))
    assert flops(gradient, x, w) == 20 * unit
    assert matmul_flops_again(jax.make_jaxpr(gradient)(x, w).jaxpr) == 5 * unit

    def nested(x, w):
        return jax.lax.scan(lambda c, _: (scanned(x, w) + c, None), 0.0, None, length=3)[0]

    assert flops(nested, x, w) == 15 * unit
    assert flops(lambda x, w: jax.lax.map(lambda row: row @ w[0], x), x, w) == unit


def test_batched_products_and_branches_are_counted():
    assert flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), shape(3, 4, 5), shape(3, 5, 6)) == 2 * 3 * 4 * 5 * 6

    def branches(p, a):
        return jax.lax.cond(p, lambda a: a @ a, lambda a: a @ a @ a, a)

    assert flops(branches, shape(dtype=bool), shape(4, 4)) == 2 * 2 * 4**3


def random_convolution(rng):
    """A convolution of random sizes, strides, padding, holes and groups, and the shapes of its arguments."""
    spatial = int(rng.integers(1, 3))
    groups, batch_groups = [(1, 1), (3, 1), (1, 2)][rng.integers(3)]
    sizes, kernels = rng.integers(4, 9, spatial).tolist(), rng.integers(1, 4, spatial).tolist()
    options = {
        "window_strides": rng.integers(1, 3, spatial).tolist(),
        "padding": [tuple(rng.integers(0, 3, 2).tolist()) for _ in range(spatial)],
        "lhs_dilation": rng.integers(1, 3, spatial).tolist(),
        "rhs_dilation": rng.integers(1, 3, spatial).tolist(),
        "feature_group_count": groups,
        "batch_group_count": batch_groups,
    }
    shapes = shape(4, 2 * groups, *sizes), shape(6, 2, *kernels)
    return lambda x, k: jax.lax.conv_general_dilated(x, k, **options), shapes


def test_convolutions_and_their_gradients_are_counted_product_by_product():
    rng = np.random.default_rng(0)
    for _ in range(6):
        convolve, shapes = random_convolution(rng)
        # Among ones every product adds 1 to the result; with padding and in holes there are zeros.
        products = float(jnp.sum(convolve(*(jnp.ones(s.shape) for s in shapes))))
        assert flops(convolve, *shapes) == 2 * products
        gradients = jax.grad(lambda x, k, convolve=convolve: jnp.sum(convolve(x, k) ** 2), argnums=(0, 1))
        # Each product comes again in both gradients; what a stride leaves over meets padding.
        assert flops(gradients, *shapes) == pytest.approx(3 * 2 * products, rel=0.35)


@pytest.mark.parametrize("chip", ["cpu", pytest.param("l4", marks=pytest.mark.gpu_compile)])
def test_compiled_convolutions_are_those_of_the_trace(chip):
    """Those of cuDNN too, which writes gradients with the labels of the convolution."""
    if not jaxmem.available(chip):
        pytest.skip(f"no compiler for {chip} here")

    def network(kernels, x):
        for kernel in kernels:
            labels = ("NHWC", "HWIO", "NHWC")
            x = jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=labels))
        return jnp.sum(x**2)

    kernels = [shape(3, 3, 8, 16), shape(1, 5, 16, 24)]
    report = jaxmem.compile_report(jax.grad(network), kernels, shape(4, 30, 31, 8), chip=chip)
    assert report.compiled_matmul_flops == report.matmul_flops > 2 * 4 * 30 * 31 * 5 * 16 * 24


def test_products_in_groups_of_rows_count_each_row_once():
    """As a mixture of experts multiplies: both gradients, too."""
    rows, experts, counts = shape(35, 16), shape(3, 16, 8), jnp.array([20, 15, 0])
    one = 2 * 35 * 16 * 8
    assert flops(lambda x, w: jax.lax.ragged_dot(x, w, counts), rows, experts) == one
    loss = jax.grad(lambda x, w: jnp.sum(jax.lax.ragged_dot(x, w, counts) ** 2), argnums=(0, 1))
    assert flops(loss, rows, experts) == pytest.approx(3 * one, rel=0.03)  # 35 rows of 3 groups: rounded


def test_what_is_not_counted_is_said():
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...]

    def program(x):
        call = pl.pallas_call(kernel, out_shape=x, interpret=True)
        x = jax.lax.scan(lambda x, _: (call(x), None), x, None, length=5)[0]
        return jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x @ x, x) @ x

    found = count_products(jax.make_jaxpr(program)(shape(8, 8)).jaxpr)
    assert (found.flops, found.kernels, found.loops) == (2 * 2 * 8**3, 5, 1)
    report = jaxmem.compile_report(program, shape(8, 8))
    assert report.kernels == 5 and "without those in 5 calls of kernels" in str(report)
    assert "0.00 + kernels" in str(jaxmem.compare({"program": report}))
    assert any("1 of its loops do not say how often" in note for note in report.warnings)
