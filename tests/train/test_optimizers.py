"""Stochastic rounding and clipping against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from models import SMALL, model_of

from llamem import TrainSettings
from llamem.train import stochastically_rounded
from llamem.train.optimizers import clip


def test_rounding_takes_a_neighbour_and_on_average_the_number_itself():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(60) * 10.0 ** rng.integers(-6, 6, 60)).astype(np.float32)
    draws = 4000
    keys = jax.random.split(jax.random.key(1), draws)
    got = np.asarray(jax.vmap(lambda key: stochastically_rounded(jnp.asarray(x), key))(keys), np.float64)
    bits = x.view(np.uint32)
    toward_zero = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    away = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    assert ((got == toward_zero) | (got == away)).all()
    # The mean of so many draws: five standard errors of a number that is one neighbour or the other.
    share = (x.astype(np.float64) - toward_zero) / (away - toward_zero)
    spread = np.abs(away - toward_zero) * np.sqrt(share * (1 - share) / draws)
    assert (np.abs(got.mean(0) - x.astype(np.float64)) <= 5 * spread + 1e-12 * np.abs(x)).all()
    nearest = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64)
    assert np.abs(nearest - x).max() > 5 * spread.max()  # which rounding to the nearest does not pass


def test_what_is_exact_or_not_finite_stays():
    x = jnp.asarray([0.0, -0.0, 1.5, -(2.0**-100), jnp.inf, -jnp.inf, jnp.nan])
    got = stochastically_rounded(x, jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(got, np.float32), x)
    assert np.signbit(np.asarray(got, np.float32)[1])


def test_a_part_is_rounded_as_in_the_whole():
    x, key = jax.random.normal(jax.random.key(0), (7, 5)), jax.random.key(1)
    whole = stochastically_rounded(x, key)
    np.testing.assert_array_equal(stochastically_rounded(x[3:5, 2:], key, (3, 2)), whole[3:5, 2:])
    assert (stochastically_rounded(x, jax.random.key(2)) != whole).any()


def test_what_is_drawn_is_even_and_of_its_own_everywhere():
    """Many numbers a quarter of the way between two neighbours: how many go up, and how many together with others."""
    x = jnp.full((3, 257, 129), 1 + 2.0**-9, jnp.float32)
    keys = [jax.random.fold_in(jax.random.key(1), step) for step in range(3)]
    up, later, other = (np.asarray(stochastically_rounded(x, key), np.float64) > 1 for key in keys)
    pairs = {
        "layers": (up[1:], up[:-1]),
        "rows": (up[:, 1:], up[:, :-1]),
        "columns": (up[..., 1:], up[..., :-1]),
        "diagonals": (up[:, 1:, 1:], up[:, :-1, :-1]),
        "steps": (up, later),
        "the step after": (later, other),
    }
    for name, (one, two) in pairs.items():
        # Five standard errors of a share of n independent draws.
        for found, share in ((one, 1 / 4), (two, 1 / 4), (one & two, 1 / 16)):
            assert abs(found.mean() - share) < 5 * np.sqrt(share * (1 - share) / found.size), name


def test_each_layer_is_clipped_by_its_own_norm():
    params = nnx.state(model_of(SMALL), nnx.Param)
    grads = jax.tree.map(lambda a: jax.random.normal(jax.random.key(a.size), a.shape), params)
    settings = TrainSettings(clip="layer", clip_norm=3.0)
    clipped = clip(settings, grads, jnp.asarray(jnp.inf))
    for layer in range(3):
        rows, after = (
            [np.asarray(a[layer], np.float64) for a in jax.tree.leaves(t["blocks"])] for t in (grads, clipped)
        )
        norm = np.sqrt(sum(np.sum(row**2) for row in rows))
        assert norm > 3
        for row, other in zip(rows, after, strict=True):
            np.testing.assert_allclose(other, row * 3 / norm, rtol=1e-5)
    small = jax.tree.map(lambda a: 1e-3 * a, grads)
    jax.tree.map(np.testing.assert_array_equal, small, clip(settings, small, jnp.asarray(jnp.inf)))
