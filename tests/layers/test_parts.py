"""Parts one after the other against everything at once: values, gradients, bits, and who is asked for a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norms import relative_errors

from jaxmem.compiling import matmul_flops
from llamem.layers.partial_sums import sum_parts
from llamem.layers.tiling import tiled_map

N, D, F, H = 1000, 12, 20, 6


def arrays(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 6)
    params = {"up": jax.random.normal(keys[0], (D, F)), "down": jax.random.normal(keys[1], (F, D)) / F}
    heads = {"in": jax.random.normal(keys[2], (H, D, 5)) / D, "out": jax.random.normal(keys[3], (H, 5, D))}
    x, weights = jax.random.normal(keys[4], (N, D)), jax.random.normal(keys[5], (N, D))
    return jax.tree.map(lambda a: a.astype(dtype), (params, heads, x, weights))


def feed_forward(params, x):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def head(x, w, dtype):
    return jnp.einsum("nf,fd->nd", jnp.tanh(x @ w["in"]), w["out"], preferred_element_type=dtype)


def in_rows(tiles):
    return lambda params, heads, x: tiled_map(feed_forward, params, x, tiles)


def in_parts(params, heads, x):
    return sum_parts(head, x, heads, x.dtype)


def rows_at_once(params, heads, x):
    return feed_forward(params, x)


def parts_at_once(params, heads, x):
    return jnp.einsum("nhf,hfd->nd", jnp.tanh(jnp.einsum("nd,hdf->nhf", x, heads["in"])), heads["out"])


def gradients(fn, params, heads, x, weights):
    grad = jax.value_and_grad(lambda *args: jnp.sum((fn(*args) * weights).astype(jnp.float32)), argnums=(0, 1, 2))
    return jax.tree.map(lambda a: np.asarray(a, np.float64), jax.jit(grad)(params, heads, x))


CASES = [(in_rows(1), rows_at_once), (in_rows(7), rows_at_once), (in_rows(N), rows_at_once), (in_parts, parts_at_once)]


@pytest.mark.parametrize(("fn", "plain"), CASES, ids=["1 tile", "7 tiles", "rows alone", "parts"])
def test_values_and_gradients_equal_everything_at_once(fn, plain):
    assert max(relative_errors(gradients(fn, *arrays()), gradients(plain, *arrays()))) < 1e-5
    remat = jax.checkpoint(fn)
    assert max(relative_errors(gradients(remat, *arrays()), gradients(plain, *arrays()))) < 1e-5


@pytest.mark.parametrize(("fn", "plain"), [(in_rows(128), rows_at_once), (in_parts, parts_at_once)])
def test_bf16_loses_no_more_bits_than_everything_at_once(fn, plain):
    """Both against f32 arithmetic on the same bf16 numbers."""
    exact = gradients(plain, *jax.tree.map(lambda a: a.astype(jnp.float32), arrays(jnp.bfloat16)))
    mine, theirs = (relative_errors(gradients(f, *arrays(jnp.bfloat16)), exact) for f in (fn, plain))
    assert max(mine[1:]) <= 1.1 * max(theirs[1:]), (mine, theirs)


@pytest.mark.parametrize("fn", [in_rows(8), in_parts])
def test_what_is_frozen_costs_no_products(fn):
    params, heads, x, weights = arrays()

    def products(argnums):
        grad = jax.grad(lambda *args: jnp.sum(fn(*args) * weights), argnums=argnums)
        return matmul_flops(jax.make_jaxpr(grad)(params, heads, x).jaxpr)

    # Forward 2 products, again 2 of them, backward 2 for each of the two kinds.
    assert products(2) == 0.75 * products((0, 1, 2))
    integers = jnp.arange(N)  # no gradient could be asked for
    rows = tiled_map(lambda p, tile: feed_forward(p, tile[0]) * (tile[1] % 2)[:, None], params, (x, integers), 3)
    np.testing.assert_allclose(rows, feed_forward(params, x) * (integers % 2)[:, None], rtol=1e-5, atol=1e-5)
