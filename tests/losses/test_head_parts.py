"""A head of several matrices side by side: the one matrix that they are, but only what is trained costs a product."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_reference import COTANGENT, HEAD, HIDDEN, OPTIONS, TARGETS, D, N, V, reference
from norms import relative_error, relative_errors

from jaxmem.compiling import matmul_flops
from llamem import tiled_cross_entropy

CUTS = [11, 13]  # columns of the head: parts of 11, 2 and 3
BOTH_AXES = pytest.mark.parametrize("axis", ["tokens", "vocab"])


def loss(hidden, parts, *, axis, reduction: Any = "sum", num_tiles=3, **options: Any):
    got = tiled_cross_entropy(
        hidden,
        tuple(parts),
        jnp.asarray(TARGETS),
        weights=jnp.asarray(COTANGENT, jnp.float32) if reduction == "sum" else None,
        axis=axis,
        reduction=reduction,
        num_tiles=num_tiles,
        **options,
    )
    return jnp.sum(got * jnp.asarray(COTANGENT, jnp.float32)) if reduction == "none" else got


@BOTH_AXES
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_gradient_equals_the_reference(axis, dtype):
    hidden, head = jnp.asarray(HIDDEN, dtype), jnp.asarray(HEAD, dtype)
    parts = jnp.split(head, CUTS, axis=1)
    _, (dx, dw) = reference(hidden, head, TARGETS, COTANGENT, **OPTIONS["all"])
    got = jax.grad(loss, argnums=(0, 1))(hidden, parts, axis=axis, **OPTIONS["all"])
    for mine, want in zip((got[0], *got[1]), (dx, *np.split(dw, CUTS, axis=1)), strict=True):
        assert mine.dtype == dtype and relative_error(mine, want) < (1e-5 if dtype == jnp.float32 else 2e-2)


@BOTH_AXES
@pytest.mark.parametrize("trained", ["hidden", "hidden and the last part"])
def test_frozen_parts_get_the_same_gradients_and_cost_no_product(axis, trained):
    hidden, head = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(HEAD, jnp.float32)
    *frozen, last = jnp.split(head, CUTS, axis=1)

    def of(hidden, last, reduction):
        return loss(hidden, [*frozen, last], axis=axis, reduction=reduction, num_tiles=2, z_loss=0.1)

    argnums = 0 if trained == "hidden" else (0, 1)
    for reduction in ("sum", "none") if axis == "vocab" else ("sum",):
        got = jax.grad(of, argnums)(hidden, last, reduction)
        _, (dx, dw) = reference(HIDDEN, HEAD, TARGETS, COTANGENT, z_loss=0.1)
        want = dx if trained == "hidden" else (dx, dw[:, CUTS[-1] :])
        assert max(relative_errors(got, want)) < 1e-5
    products = matmul_flops(jax.make_jaxpr(jax.grad(of, argnums), static_argnums=2)(hidden, last, "sum").jaxpr)
    again = D if axis == "vocab" and trained != "hidden" else 0  # tiles of the vocabulary make their logits twice
    tokens = N + 1 if axis == "tokens" else N  # two equal tiles
    assert products == 2 * tokens * V * (2 * D + again + (3 if trained != "hidden" else 0))
