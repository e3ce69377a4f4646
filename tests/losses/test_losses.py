"""The tiled losses against a float64 reference written apart from them: every option, axis, reduction and gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from loss_reference import COTANGENT, HEAD, HIDDEN, OPTIONS, TARGETS, WEIGHTS, D, N, V, reference

from llamem.losses.cross_entropy import tiled_cross_entropy, tiled_logprobs

BOTH_AXES = pytest.mark.parametrize("axis", ["tokens", "vocab"])
pytestmark = pytest.mark.accelerator


def arrays(*values, dtype=jnp.float32):
    return tuple(jnp.asarray(v, dtype) for v in values)


def test_the_reference_is_right():
    """Its loss against optax, its gradients against differences of its loss."""
    loss, _ = reference(HIDDEN, HEAD, TARGETS, COTANGENT)
    logits = jnp.asarray(HIDDEN @ HEAD.T, jnp.float32)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(jnp.asarray(TARGETS), 0))
    np.testing.assert_allclose(loss, np.where(TARGETS < 0, 0, expected), rtol=1e-5, atol=1e-5)
    point, step = (HIDDEN, HEAD), 1e-6
    _, grads = reference(*point, TARGETS, COTANGENT, **OPTIONS["all"])
    for i, grad in enumerate(grads):
        way = np.random.default_rng(i).normal(size=grad.shape)

        def along(t, i=i, way=way):
            hidden, head = (p + t * way if j == i else p for j, p in enumerate(point))
            return COTANGENT @ reference(hidden, head, TARGETS, COTANGENT, **OPTIONS["all"])[0]

        np.testing.assert_allclose((along(step) - along(-step)) / (2 * step), (grad * way).sum(), rtol=1e-6)


CASES: list[tuple[Any, str, Any, int]] = [
    ("tokens", "all", "mean", 7),
    ("tokens", "all", "mean", 1),
    ("tokens", "plain", "sum", 64),
    ("vocab", "all", "mean", 7),
    ("vocab", "all", "none", 3),
    ("vocab", "softcap", "sum", 1),
    ("vocab", "plain", "none", 64),
]


@pytest.mark.parametrize(("axis", "option", "reduction", "num_tiles"), CASES)
def test_loss_and_every_gradient(axis, option, reduction, num_tiles):
    """Weighted, masked, scaled outside: what catches a cotangent that is lost on the way to one of the leaves."""
    options, outer = OPTIONS[option], -3.0

    def fn(hidden, head, weights):
        loss = tiled_cross_entropy(
            hidden, head, jnp.asarray(TARGETS), weights=weights,
            num_tiles=num_tiles, axis=axis, reduction=reduction, **options,
        )  # fmt: skip
        return outer * (jnp.sum(loss * arrays(COTANGENT)[0]) if reduction == "none" else loss)

    value, grads = jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2)))(*arrays(HIDDEN, HEAD, WEIGHTS))
    counted = WEIGHTS * (TARGETS >= 0)
    share = {"mean": 1 / counted.sum(), "sum": 1.0, "none": COTANGENT}[reduction]
    loss, expected = reference(HIDDEN, HEAD, TARGETS, outer * share * WEIGHTS, **options)
    np.testing.assert_allclose(value, (outer * share * WEIGHTS * loss).sum(), rtol=2e-5)
    for actual, wanted in zip(grads[:2], expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=2e-5 * np.abs(wanted).max())
    mean = (counted * loss).sum() / counted.sum() if reduction == "mean" else 0
    np.testing.assert_allclose(grads[2], outer * share * (loss - mean) * (TARGETS >= 0), rtol=2e-4, atol=2e-4)


FROZEN: list[tuple[Any, str, Any]] = [("tokens", "all", "mean"), ("vocab", "all", "mean")]
FROZEN += [("vocab", "all", "none"), ("vocab", "z_loss", "sum"), ("vocab", "plain", "none")]


@pytest.mark.parametrize(("axis", "option", "reduction"), FROZEN)
def test_frozen_head(axis, option, reduction):
    options = OPTIONS[option]

    def fn(hidden, head):
        head = jax.lax.stop_gradient(head)
        kwargs: dict[str, Any] = {"num_tiles": 3, "axis": axis, "reduction": reduction}
        loss = tiled_cross_entropy(hidden, head, jnp.asarray(TARGETS), **kwargs, **options)
        return 5 * jnp.sum(loss * arrays(COTANGENT)[0] if reduction == "none" else loss)

    dx, dw = jax.jit(jax.grad(fn, argnums=(0, 1)))(*arrays(HIDDEN, HEAD))
    share = {"none": COTANGENT, "mean": 1 / (TARGETS >= 0).sum(), "sum": 1.0}[reduction]
    _, expected = reference(HIDDEN, HEAD, TARGETS, 5 * share * np.ones(N), **options)
    np.testing.assert_allclose(dx, expected[0], rtol=1e-4, atol=1e-5 * np.abs(expected[0]).max())
    assert not dw.any()


@pytest.mark.quick
@BOTH_AXES
@pytest.mark.parametrize(("tied", "weighted"), [(False, True), (True, False)])
def test_training_through_two_layers(axis, tied, weighted):
    """Every leaf of a model under a mean loss scaled outside. MaxText's tiled loss was wrong here for eleven months."""
    key = jax.random.split(jax.random.key(0), 4)
    params = {
        "embed": jax.random.normal(key[0], (V, D)),
        "layers": {"up": jax.random.normal(key[1], (2, D, 32)), "down": jax.random.normal(key[2], (2, 32, D))},
    }
    if not tied:
        params["head"] = jax.random.normal(key[3], (V, D))
    inputs = jnp.asarray(np.maximum(TARGETS, 0)[:52].reshape(4, 13))
    targets, weights = jnp.asarray(TARGETS[1:].reshape(4, 13)), jnp.asarray(WEIGHTS[1:].reshape(4, 13), jnp.float32)

    def loss(params, tiled):
        layer = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"] / 6, None))
        hidden, _ = jax.lax.scan(layer, params["embed"][inputs], params["layers"])
        head = params["embed" if tied else "head"]
        if tiled:
            kwargs: dict[str, Any] = {"weights": weights if weighted else None, "axis": axis, "num_tiles": 3}
            return 100 * tiled_cross_entropy(hidden, head, targets, **kwargs)
        rows = optax.softmax_cross_entropy_with_integer_labels(hidden @ head.T, jnp.maximum(targets, 0))
        w = (targets >= 0) * (weights if weighted else 1)
        return 100 * jnp.sum(w * rows) / jnp.sum(w)

    def both(tiled):
        return jax.jit(jax.value_and_grad(lambda p: loss(p, tiled)))(params)

    for actual, expected in zip(jax.tree.leaves(both(True)), jax.tree.leaves(both(False)), strict=True):
        assert jnp.abs(expected).max() > 0
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * float(jnp.abs(expected).max()))


@BOTH_AXES
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_types(axis, dtypes):
    hidden, head = jnp.asarray(HIDDEN, dtypes[0]), jnp.asarray(HEAD, dtypes[1])

    def fn(hidden, head):
        return tiled_cross_entropy(hidden, head, jnp.asarray(TARGETS), axis=axis, num_tiles=3)

    loss, (dx, dw) = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(hidden, head)
    assert (loss.dtype, dx.dtype, dw.dtype) == (jnp.float32, *dtypes)
    expected_loss, expected = reference(hidden, head, TARGETS, np.full(N, 1 / (TARGETS >= 0).sum()))
    np.testing.assert_allclose(loss, expected_loss.sum() / (TARGETS >= 0).sum(), rtol=1e-5)
    for actual, wanted, dtype in zip((dx, dw), expected, dtypes, strict=False):
        off = np.abs(np.asarray(actual, np.float64) - wanted).max() / np.abs(wanted).max()
        assert off < 1e-2, dtype


def test_logprobs_with_a_cotangent_per_token():
    def fn(hidden, head):
        logp = tiled_logprobs(hidden, head, jnp.asarray(TARGETS), num_tiles=4, temperature=0.8)
        return jnp.sum(logp * arrays(COTANGENT)[0]), logp

    (_, logp), grads = jax.jit(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True))(*arrays(HIDDEN, HEAD))
    loss, expected = reference(HIDDEN, HEAD, TARGETS, -COTANGENT, logit_scale=1 / 0.8)
    np.testing.assert_allclose(logp, -loss, rtol=2e-5, atol=1e-5)
    for actual, wanted in zip(grads, expected, strict=False):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(("axis", "reduction"), [("tokens", "mean"), ("vocab", "none")])
def test_nothing_that_counts_gives_zeros(axis, reduction):
    def fn(hidden, head, targets):
        kwargs: dict[str, Any] = {"axis": axis, "num_tiles": 4, "reduction": reduction}
        return jnp.sum(tiled_cross_entropy(hidden, head, targets, **kwargs))

    hidden, head = arrays(HIDDEN, HEAD)
    for rows in (slice(0, N), slice(0, 0)):
        nothing = jnp.full(N, -100)[rows]
        value, grads = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(hidden[rows], head, nothing)
        assert value == 0 and not any(g.any() for g in grads)
    first_tile_masked = jnp.where(jnp.arange(N) < 20, -100, jnp.maximum(jnp.asarray(TARGETS), 0))
    value, grads = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(hidden, head, first_tile_masked)
    assert np.isfinite(value) and all(jnp.isfinite(g).all() for g in grads) and not grads[0][:20].any()


@BOTH_AXES
def test_huge_logits_stay_finite(axis):
    hidden, head = 1e2 * jnp.sign(arrays(HIDDEN)[0]), 10 * jnp.sign(arrays(HEAD)[0])  # logits up to 16,000
    targets = np.maximum(TARGETS, 0)

    def fn(hidden, head):
        return tiled_cross_entropy(hidden, head, jnp.asarray(targets), axis=axis, num_tiles=3)

    value, grads = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(hidden, head)
    loss, expected = reference(hidden, head, targets, np.full(N, 1 / N))
    np.testing.assert_allclose(value, loss.mean(), rtol=1e-5)
    for actual, wanted in zip(grads, expected, strict=False):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.quick
@BOTH_AXES
def test_an_id_outside_the_vocabulary_is_loud(axis):
    hidden, head = arrays(HIDDEN, HEAD)
    targets, *others = (jnp.asarray(np.where(np.arange(N) == 5, i, np.maximum(TARGETS, 0))) for i in (V, -1, 10**6))

    def fn(targets):
        return tiled_cross_entropy(hidden, head, targets, axis=axis, num_tiles=3)

    assert all(jnp.isnan(fn(ids)) for ids in (targets, *others))
    checked = checkify.checkify(fn, errors=checkify.nan_checks)
    assert "nan generated" in str(checked(targets)[0].get())
    assert checked(jnp.asarray(TARGETS))[0].get() is None
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        fn(targets)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2, 3)])
def test_batch_shapes(shape):
    tokens = int(np.prod(shape))
    hidden = arrays(HIDDEN[:tokens].reshape(*shape, D))[0]
    targets, head = jnp.asarray(np.maximum(TARGETS, 0)[:tokens].reshape(shape)), arrays(HEAD)[0]
    loss = tiled_cross_entropy(hidden, head, targets, num_tiles=100, reduction="none")
    rows, _ = reference(HIDDEN[:tokens], HEAD, targets.reshape(-1), 1.0)
    assert loss.shape == shape
    np.testing.assert_allclose(loss.reshape(-1), rows, rtol=2e-5)
    summed = tiled_cross_entropy(hidden, head, targets, axis="tokens", num_tiles=100, reduction="sum")
    np.testing.assert_allclose(summed, rows.sum(), rtol=2e-5)


def test_sum_of_ignored_ids_other_than_minus_100():
    hidden, head = arrays(HIDDEN, HEAD)
    renamed = jnp.asarray(np.where(TARGETS < 0, 2, TARGETS))
    loss = tiled_cross_entropy(hidden, head, renamed, ignore_index=2, reduction="sum")
    rows, _ = reference(HIDDEN, HEAD, TARGETS, 1.0)
    np.testing.assert_allclose(loss, rows[np.asarray(renamed) != 2].sum(), rtol=1e-5)
