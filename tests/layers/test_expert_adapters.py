"""Adapters of experts: against merged weights in float64, and what their loops cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from llamem.layers.expert_adapters import ExpertAdapters
from llamem.layers.experts import MAX_GROUP, mixture
from llamem.memory import matmul_flops
from llamem.memory.jaxprs import equations

D, F = 7, 9
SIZES = {"gate": (D, F), "up": (D, F), "down": (F, D)}
TARGETS = tuple(SIZES)


def made(B, T, E, A, r, targets=TARGETS, dtype=jnp.float32, seed=0):
    """What enters a mixture, its four weights, and adapters of all ranks up to r: f32, as they are trained."""
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=dtype, size=1.0):
        return jnp.asarray(size * rng.standard_normal(shape), dtype)

    args = normal(B, T, D), normal(D, E), normal(E, D, F), normal(E, D, F), normal(E, F, D)
    within = (np.arange(r) < 1 + np.arange(A)[:, None] % r)[:, None, :, None]
    a = {t: within * normal(A, E, r, SIZES[t][0], dtype=jnp.float32, size=0.4) for t in targets}
    b = {t: within * normal(A, E, r, SIZES[t][1], dtype=jnp.float32, size=0.4) for t in targets}
    return args, a, b, {t: normal(A, dtype=jnp.float32) for t in targets}


def adapted(args, a, b, scale, ids, k):
    x, router, gate, up, down = args
    adapters = ExpertAdapters(a, b, scale, jnp.asarray(ids), len(next(iter(a.values()))))
    return mixture(x, router, gate, up, down, k, adapters)


def merged(args, a, b, scale, ids, k):
    """Sequence by sequence, every expert's matrices with its own adapter added to them."""
    x_BTD, router, *weights = args
    out = []
    for x_TD, i in zip(x_BTD, ids, strict=True):
        gate, up, down = (
            w + scale[t][i] * jnp.einsum("erd,erf->edf", a[t][i], b[t][i]) if t in a else w
            for t, w in zip(TARGETS, weights, strict=True)
        )
        out.append(reference.mixture(x_TD, router, gate, up, down, k))
    return jnp.stack(out)


def run(fn, weights_BTD, ids, k, *args):
    def value(*args):
        out = fn(*args, ids, k)
        return jnp.sum(out * weights_BTD), out

    gradients = jax.jit(jax.value_and_grad(value, argnums=range(4), has_aux=True))
    (_, out), grads = jax.tree.map(np.asarray, gradients(*args))
    return out, grads


CASES = [
    # B, T, E, k, A, r, ids, targets, type
    (1, 5, 4, 2, 1, 3, [0], TARGETS, jnp.float32),
    (4, 13, 5, 2, 3, 4, [2, 0, 2, 1], TARGETS, jnp.float32),
    (4, 13, 5, 2, 3, 4, [2, 0, 2, 1], TARGETS, jnp.bfloat16),
    (3, 7, 3, 3, 9, 2, [8, 0, 3], ("down",), jnp.float32),
    (2, MAX_GROUP + 9, 2, 1, 2, 2, [1, 1], ("gate", "up"), jnp.float32),
]


@pytest.mark.parametrize(("B", "T", "E", "k", "A", "r", "ids", "targets", "dtype"), CASES)
def test_values_and_every_gradient_equal_merged_weights_in_float64(B, T, E, k, A, r, ids, targets, dtype):
    args = made(B, T, E, A, r, targets, dtype)
    weights_BTD = np.random.default_rng(1).standard_normal((B, T, D))
    got, grads = run(adapted, weights_BTD, ids, k, *args)
    with reference.float64():
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), args)
        expected, wanted = run(merged, weights_BTD, ids, k, *wide)
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    assert got.dtype == dtype
    assert np.linalg.norm(np.asarray(got, np.float64) - expected) < tolerance * np.linalg.norm(expected)
    leaves = zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(wanted), jax.tree.leaves(args), strict=True)
    for (path, one), want, arg in leaves:
        assert one.dtype == arg.dtype, path
        # With one expert per token its share is 1 whatever the router says.
        near = tolerance * np.linalg.norm(want) + 2e-5 * (B * T) ** 0.5 * (k == 1)
        assert np.linalg.norm(np.asarray(one, np.float64) - want) <= near, jax.tree_util.keystr(path)
    for t in targets:
        absent = np.setdiff1d(np.arange(A), ids)
        assert not grads[1][t][absent].any() and not grads[2][t][absent].any()
        beyond = np.arange(r) >= 1 + np.arange(A)[:, None] % r
        assert not np.moveaxis(grads[1][t], 1, 2)[beyond].any(), "padding beyond a rank stays what it is"


def test_all_rows_of_one_expert_and_adapter_up_to_the_very_end():
    """The last run ends where the array does, and is shorter than the slice that is cut for it."""
    (x, router, *weights), a, b, scale = made(1, 21, 3, 2, 2)
    args = (jnp.abs(x) + 1, jnp.zeros_like(router).at[:, 2].set(1.0), *weights), a, b, scale
    np.testing.assert_allclose(adapted(*args, [1], 1), merged(*args, [1], 1), rtol=1e-4, atol=1e-4)


def test_an_unknown_adapter_gives_nan_and_no_other_sequence_sees_it():
    args, a, b, scale = made(4, 6, 3, 2, 2)

    def total(pairs, ids):
        a, b = pairs
        out = adapted(args, a, b, scale, ids, 2)
        return jnp.nansum(out), out

    gradients = jax.jit(jax.grad(total, has_aux=True))
    _, expected = gradients((a, b), jnp.array([1, 0, 1, 0]))
    for wrong in (2, -1, -2, 2**31 - 1):
        grads, out = gradients((a, b), jnp.array([1, wrong, 1, 0]))
        assert np.isnan(out[1]).all() and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
        np.testing.assert_allclose(np.delete(out, 1, 0), np.delete(expected, 1, 0), rtol=1e-5, atol=1e-5)


def test_many_adapters_cost_little_more_than_one_and_frozen_experts_have_no_gradient():
    B, T, E, k, r = 16, 63, 4, 2, 2
    ids = np.arange(B)

    def program(A, frozen=True):
        (x, *weights), a, b, scale = made(B, T, E, A, r)

        def loss(a, b, x, weights):
            return jnp.sum(adapted((x, *weights), a, b, scale, ids % A, k) ** 2)

        return jax.make_jaxpr(jax.grad(loss, (0, 1, 2) if frozen else (0, 1, 2, 3)))(a, b, x, weights).jaxpr

    one, many, trained = program(1), program(64), program(1, frozen=False)
    rows = B * T * k
    group = -(-rows // E)
    padded = (rows // group + E) * group
    products = 2 * padded * D * F
    router = 2 * B * T * D * E
    # Of an expert's three matrices: a product each, and one for the rows. Trained: one more each, for its own gradient.
    assert matmul_flops(trained) - matmul_flops(one) == 3 * products + router
    thin = matmul_flops(one) - 6 * products - 2 * router
    assert thin > 0 and abs(matmul_flops(many) - matmul_flops(one)) < 0.02 * thin, "as many rows, in shorter runs"
    for jaxpr, A in ((one, 1), (many, 64)):
        shapes = {tuple(v.aval.shape) for eqn, _ in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "shape")}
        dense = [s for s in shapes if len(s) > 2 and s[0] > 1 and s[-2:] in ((D, F), (F, D))]
        assert not dense, "neither an expert's gradient nor an adapter as a matrix"
        assert not [s for s in shapes if A > 1 and s[-1:] == (A * r,)], "no row meets all adapters"
