"""Tiled primitives equal the plain function: values and every gradient, however the tiles fall."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from llamem.layers.custom_rules import WantedGradients
from llamem.layers.tile_loops import fold_tiles
from llamem.layers.tiling import tiled_map, tiled_sum

KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (13, 5))
PARAMS = {"w": jax.random.normal(KEYS[1], (5, 7)), "b": jax.random.normal(KEYS[2], (7,)), "step": jnp.int32(3)}
LABELS = jax.random.randint(KEYS[3], (13,), 0, 7)


def scalar_of(params, tile):
    """Not linear, not symmetric, and different for every row."""
    x, labels = tile
    out = jnp.tanh(x @ params["w"] + params["b"]) * params["step"]
    return jnp.sum(jnp.sin(out) * (labels[:, None] + 1.0))


def tiled(num_tiles):
    return lambda params, x: tiled_sum(scalar_of, params, (x, LABELS), num_tiles)


def plain(params, x):
    return scalar_of(params, (x, LABELS))


def assert_trees_close(actual, expected, rtol=1e-4, atol=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(e, np.float64), rtol, atol)


def matrix_products(fn, *args) -> int:
    return str(jax.make_jaxpr(fn)(*args)).count("dot_general")


@pytest.mark.quick
@pytest.mark.parametrize("num_tiles", [1, 2, 4, 13, 50])
@pytest.mark.parametrize("outer", [lambda s: s, lambda s: -7.5 * s, lambda s: jnp.sin(s)], ids=["1", "-7.5", "sin"])
def test_sum_and_every_gradient_equal_the_plain_ones(num_tiles, outer):
    def grad(f):
        return jax.value_and_grad(lambda p, x: outer(f(p, x)), argnums=(0, 1), allow_int=True)(PARAMS, X)

    assert_trees_close(grad(tiled(num_tiles)), grad(plain))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_sum_under_transformations(wrap):
    def grad(f):
        return jax.grad(f, argnums=(0, 1), allow_int=True)(PARAMS, X)

    assert_trees_close(grad(wrap(tiled(4))), grad(plain))


def test_sum_under_vmap_and_scan():
    many = jnp.stack([X, 2 * X, X - 1])

    def grad(f):
        return jax.grad(lambda x: f(PARAMS, x))

    expected = jax.vmap(grad(plain))(many)
    assert_trees_close(jax.vmap(grad(tiled(4)))(many), expected)
    assert_trees_close(jax.lax.scan(lambda c, x: (c, grad(tiled(4))(x)), 0, many)[1], expected)

    def twice(f):
        return jax.grad(lambda w: jax.lax.scan(lambda c, x: (c + f(PARAMS | {"w": w}, x), None), 0.0, many)[0])

    assert_trees_close(twice(tiled(4))(PARAMS["w"]), twice(plain)(PARAMS["w"]))


def test_second_derivatives_by_forward_over_reverse():
    def hessian(f):
        return jax.hessian(lambda w: f(PARAMS | {"w": w}, X))(PARAMS["w"])

    assert_trees_close(hessian(tiled(4)), hessian(plain), 1e-4, 1e-4)


def test_what_is_frozen_costs_nothing():
    floats = {k: PARAMS[k] for k in ("w", "b")}

    def full(params, x):
        return tiled(1)(params | {"step": PARAMS["step"]}, x)

    assert matrix_products(full, floats, X) == 1
    assert matrix_products(jax.grad(full, argnums=(0, 1)), floats, X) == 3
    assert matrix_products(jax.grad(full), floats, X) == 2
    assert matrix_products(jax.grad(lambda x: full(floats, x)), X) == 2
    assert matrix_products(jax.grad(lambda p, x: full(jax.lax.stop_gradient(p), x), argnums=(0, 1)), floats, X) == 2


def test_parameter_gradients_grow_in_float32():
    # 4096 tiles add 1 each: a bfloat16 sum stops at 256.
    xs = jnp.ones((4096, 1), jnp.bfloat16)

    def fn(p, x):
        return jnp.sum(p * x)

    grad = jax.grad(lambda p: tiled_sum(fn, p, xs, 4096))(jnp.bfloat16(1))
    assert grad.dtype == jnp.bfloat16 and grad == 4096


def test_map_keeps_one_tile_of_activations():
    x, w = jax.ShapeDtypeStruct((4096, 64), jnp.float32), jax.ShapeDtypeStruct((64, 2048), jnp.float32)

    def wide_mlp(w, x):
        return jnp.tanh(x @ w) @ w.T

    def temporaries(f):
        loss = jax.grad(lambda w, x: jnp.sum(f(w, x) ** 2))
        analysis: Any = jax.jit(loss).lower(w, x).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    untiled, tiles = temporaries(wide_mlp), temporaries(lambda w, x: tiled_map(wide_mlp, w, x, 16))
    activations = 4096 * 2048 * 4
    assert tiles < activations / 3 < activations < untiled


def test_fold_joins_rows_and_carries():
    def step(total, tile):
        return total + jnp.sum(tile["x"]), tile["x"] * 2

    total, rows = jax.jit(lambda x: fold_tiles(step, jnp.float32(0), {"x": x}, 3, align=4))(X)
    np.testing.assert_allclose(total, X.sum(), rtol=1e-5)
    np.testing.assert_array_equal(rows, X * 2)


def test_no_rows_is_a_sum_of_nothing():
    empty = (jnp.zeros((0, 5)), jnp.zeros(0, int))
    assert tiled_sum(scalar_of, PARAMS, empty, 4) == 0
    assert tiled_map(lambda w, x: x @ w, PARAMS["w"], empty[0], 4).shape == (0, 7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tiled_map(lambda p, x: jnp.sum(x), (), X, 2),
            r"arrays \[rows, ...\] for a tile of 7 rows, got \[\(\)\]",
        ),
        (lambda: tiled_sum(scalar_of, PARAMS, (X, LABELS[:12]), 2), r"same leading axis.*\(13, 5\).*\(12,\)"),
        (lambda: tiled_sum(lambda p, x: x, PARAMS, X, 2), r"fn must return one real number for a tile"),
        (lambda: tiled_map(jnp.add, 1.0, X, 0), "num_tiles=0: expected a whole number of at least 1"),
        (lambda: tiled_sum(jnp.sum, PARAMS, X, True), "num_tiles=True: expected a whole number"),
    ],
)
def test_bad_input_is_named(as_a_user, call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_result_that_is_not_used():
    def squares(f):
        return jax.grad(lambda w: jnp.sum(f(w)["used"] ** 2))(PARAMS["w"])

    def both(w, x):
        return {"used": x @ w, "other": x * jnp.sum(w)}

    np.testing.assert_allclose(squares(lambda w: tiled_map(both, w, X, 3)), squares(lambda w: both(w, X)), rtol=1e-4)


def test_sum_of_float16_under_a_loss_scale():
    """A gradient of 100,000 does not fit float16, and a share of 1e-5 of it does."""
    xs = jnp.ones((1000, 1), jnp.float16)

    def fn(p):
        return tiled_sum(lambda p, x: 100 * jnp.sum(p * x), p, xs, 7) * 2.0**-14

    grad = jax.grad(fn)(jnp.float16(1))
    assert grad.dtype == jnp.float16
    np.testing.assert_allclose(grad, 1e5 * 2.0**-14, rtol=1e-3)


@pytest.mark.quick
def test_gradients_are_made_for_the_leaves_that_are_asked_for_among_forty():
    """One size of the empty array that says so holds sixteen of them."""
    asked = {0: 2.0, 15: 3.0, 16: 4.0, 33: 5.0, 39: 6.0}
    leaves = {i: jnp.float32(asked.get(i, 1.0)) for i in range(40)}
    rows = jnp.ones((6, 1))

    def loss(wanted):
        params = [wanted.get(i, leaves[i]) for i in range(40)]
        return tiled_sum(lambda params, x: sum(p**2 for p in params) * jnp.sum(x), params, rows, 2)

    gradients = jax.grad(loss)({i: leaves[i] for i in asked})
    assert gradients == {i: 2 * 6 * leaf for i, leaf in asked.items()}
    wanted, others = WantedGradients.of(i in asked for i in range(40)).partition(leaves)
    assert {i for i, leaf in wanted.items() if leaf is not None} == set(asked)
    assert {i for i, leaf in others.items() if leaf is not None} == set(range(40)) - set(asked)


class RowWise(nnx.Module):
    """A layer with random numbers and statistics, of which a part runs in a transformation of nnx's own."""

    def __init__(self):
        self.project = nnx.Linear(5, 5, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(5, rngs=nnx.Rngs(1))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.drop(self.norm(nnx.remat(lambda linear, x: linear(x))(self.project, x)))


@pytest.mark.parametrize("num_tiles", [1, 3])
def test_state_of_a_module_is_not_lost_without_a_word(num_tiles):
    module = RowWise()

    def mapped(module, x):
        return tiled_map(lambda module, x: module(x), module, x, num_tiles)

    def summed(module, x):
        return tiled_sum(lambda module, x: jnp.sum(module(x)), module, x, num_tiles)

    for tiles in (mapped, summed):
        with pytest.raises(ValueError, match=r"fn sets (BatchStat, RngCount|RngCount, BatchStat) .* keys .* in xs"):
            nnx.jit(nnx.grad(lambda module, x: jnp.sum(tiles(module, x))))(module, X)  # noqa: B023
    module.eval()
    np.testing.assert_allclose(nnx.jit(mapped)(module, X), module(X), rtol=1e-5, atol=1e-6)
    assert_trees_close(nnx.grad(summed)(module, X), nnx.grad(lambda module, x: jnp.sum(module(x)))(module, X))
