"""Where numbers end: narrow ids, float16 under a loss scale, tokens that do not count and are not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_reference import HEAD, HIDDEN, TARGETS, WEIGHTS, N, reference
from norms import relative_error

from llamem.losses.cross_entropy import tiled_cross_entropy

BOTH_AXES = pytest.mark.parametrize("axis", ["tokens", "vocab"])
X, W, IDS = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(HEAD, jnp.float32), jnp.asarray(TARGETS)


@pytest.mark.parametrize(("dtype", "vocab"), [("uint8", 300), ("int16", 40_000), ("uint16", 65_536), ("uint32", 300)])
def test_ids_in_narrow_types(dtype, vocab):
    """A vocabulary wider than the ids' type, whose size wraps around in it."""
    head = jax.random.normal(jax.random.key(1), (vocab, 4))
    ids = np.random.default_rng(2).integers(0, min(vocab, np.iinfo(dtype).max + 1), N)
    ids[:3] = [0, 99, min(vocab, np.iinfo(dtype).max + 1) - 1]

    def loss(targets):
        return tiled_cross_entropy(X[:, :4], head, targets, num_tiles=3)

    assert loss(jnp.asarray(ids, dtype)) == loss(jnp.asarray(ids, "int32"))


def test_no_narrow_id_is_taken_for_another():
    """156 is -100, and 4294967196 too, where numbers wrap around. The first is an id, the second is out of range."""

    def loss(targets, **kwargs):
        return tiled_cross_entropy(X[:3], W, targets, num_tiles=3, reduction="none", **kwargs)

    np.testing.assert_array_equal(loss(jnp.array([156, 1, 2], "uint8")), loss(jnp.array([156, 1, 2])))
    out_of_range = loss(jnp.array([4294967196, 1, 2], "uint32"))
    assert jnp.isnan(out_of_range[0]) and jnp.isfinite(out_of_range[1:]).all()
    below = loss(jnp.array([-5, -100, 2], "int8"))
    assert jnp.isnan(below[0]) and below[1] == 0 and jnp.isfinite(below[2])
    np.testing.assert_array_equal(loss(jnp.array([7, 1, 2], "uint8"), ignore_index=7)[0], 0)


def value_and_gradients(axis, hidden, targets, weights, **kwargs):
    def fn(hidden, head, weights):
        kwargs.setdefault("num_tiles", 3)
        loss = tiled_cross_entropy(hidden, head, targets, weights=weights, axis=axis, **kwargs)
        return jnp.sum(loss * jnp.arange(1.0, N + 1)) if kwargs.get("reduction") == "none" else loss

    arguments = hidden, W, jnp.asarray(weights, jnp.float32)
    return jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2)))(*arguments)


AXES = [("tokens", "mean"), ("vocab", "mean"), ("vocab", "none")]


@pytest.mark.parametrize(("axis", "reduction"), AXES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_does_not_count_may_be_anything(axis, reduction, bad):
    """Ignored, or of weight 0, with a hidden state that is not finite: as if it stood at 0."""
    silent = [3, 7, 17]  # ignored, of weight 0, ignored
    spoilt, clean = X.at[jnp.array(silent)].set(bad).at[18, 2].set(bad), X.at[jnp.array([*silent, 18])].set(0)
    loss, grads = value_and_gradients(axis, spoilt, IDS, WEIGHTS, reduction=reduction)
    expected, wanted = value_and_gradients(axis, clean, IDS, WEIGHTS, reduction=reduction)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    counts = np.delete(np.arange(N), [7])  # the gradient of weight 7 itself is that of a loss that is not there
    for a, b, rows in zip(grads, wanted, (slice(None), slice(None), counts), strict=True):
        np.testing.assert_allclose(a[rows], b[rows], rtol=1e-5, atol=1e-6)
    assert not grads[0][jnp.array([*silent, 18])].any()


@BOTH_AXES
def test_a_frozen_head_does_not_mind_either(axis):
    def fn(hidden):
        return tiled_cross_entropy(hidden, W, IDS, axis=axis, num_tiles=3)

    spoilt, clean = jax.grad(fn)(X.at[3].set(jnp.nan)), jax.grad(fn)(X.at[3].set(0))
    np.testing.assert_allclose(spoilt, clean, rtol=1e-5, atol=1e-6)


def test_a_token_without_a_cotangent_may_be_anything():
    """Masked after the loss, as one masks log-probabilities."""

    def fn(hidden, head):
        loss = tiled_cross_entropy(hidden, head, jnp.maximum(IDS, 0), num_tiles=3, reduction="none")
        return jnp.sum(jnp.where(jnp.arange(N) == 3, 0, loss))

    for argnums in (0, (0, 1)):
        for a, b in zip(
            *(jax.tree.leaves(jax.grad(fn, argnums)(X.at[3].set(x), W)) for x in (jnp.nan, 0)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@BOTH_AXES
def test_nothing_counts_under_any_normalizer(axis):
    nothing = jnp.full(N, -100)
    loss, grads = value_and_gradients(axis, X, nothing, WEIGHTS, normalizer=0)
    assert loss == 0 and not any(g.any() for g in grads)
    loss, grads = value_and_gradients(axis, X, IDS, 0 * WEIGHTS, normalizer=jnp.float32(0))
    assert loss == 0 and not any(g.any() for g in grads[:2])
    assert not jnp.isfinite(value_and_gradients(axis, X, IDS, WEIGHTS, normalizer=0)[0])


@pytest.mark.parametrize(("axis", "reduction"), AXES)
@pytest.mark.parametrize("trained", [True, False])
def test_float16_under_a_loss_scale(axis, reduction, trained):
    """One token's share of the mean is 7.6e-6, its gradients too small for float16; the scale is 2 ** 15."""
    hidden, head = X.astype(jnp.float16), W.astype(jnp.float16)
    share, scale = 2.0**-17, 2.0**15

    def fn(hidden, head):
        kwargs: dict[str, Any] = {"axis": axis, "num_tiles": 3, "reduction": reduction}
        if reduction == "mean":
            return scale * tiled_cross_entropy(hidden, head, IDS, normalizer=1 / share, **kwargs)
        return jnp.sum(tiled_cross_entropy(hidden, head, IDS, **kwargs)) * share * scale

    grads = jax.grad(fn, argnums=(0, 1) if trained else (0,))(hidden, head)
    _, expected = reference(hidden, head, TARGETS, np.full(N, share * scale))
    for actual, wanted in zip(grads, expected, strict=False):
        assert actual.dtype == jnp.float16 and relative_error(actual, wanted) < 5e-4


@BOTH_AXES
def test_the_heads_bfloat16_gradient_is_rounded_once(axis):
    """Times 3, which is no power of two, it is off by no more than times 1."""
    hidden, head = X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    _, (_, expected) = reference(hidden, head, TARGETS, np.full(N, 1 / (TARGETS >= 0).sum()))

    def off(outer):
        def fn(head):
            return outer * tiled_cross_entropy(hidden, head, IDS, axis=axis, num_tiles=3)

        return relative_error(jax.grad(fn)(head), outer * expected)

    assert off(3.0) < 1.1 * off(1.0)
