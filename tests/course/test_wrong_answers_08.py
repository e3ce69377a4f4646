"""Answers that a reader may well give to the exercises of notebook 08, and that are wrong: each is rejected."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llamem import Plan
from llamem.course.exercises import long_context


def one_tile(w, x_TD):
    return (jax.nn.silu(x_TD @ w["gate"]) * (x_TD @ w["up"])) @ w["down"]


def rows_of(x_ND, tiles):
    return x_ND.reshape(tiles, -1, x_ND.shape[-1])


def without_checkpoint(w, x_ND, tiles):
    return jax.lax.map(lambda x: one_tile(w, x), rows_of(x_ND, tiles)).reshape(x_ND.shape)


def narrow_sum(w, x_ND, tiles):
    return jax.lax.map(jax.checkpoint(lambda x: one_tile(w, x)), rows_of(x_ND, tiles)).reshape(x_ND.shape)


def no_gate(w, x_ND, tiles):
    return jax.lax.map(jax.checkpoint(lambda x: jax.nn.silu(x @ w["up"]) @ w["down"]), rows_of(x_ND, tiles)).reshape(
        x_ND.shape
    )


def checkpoint_around_the_loop(w, x_ND, tiles):
    return jax.checkpoint(lambda w, x: without_checkpoint(w, x, tiles))(w, x_ND)


def all_in_f32(w, x_ND, tiles):
    return one_tile({k: v.astype(jnp.float32) for k, v in w.items()}, x_ND.astype(jnp.float32))


WAITING, ROWS, BETTER = (
    long_context.check_waiting_bytes,
    long_context.check_feed_forward,
    long_context.check_better_plan,
)
WRONG: dict[str, tuple[Callable[..., None], Callable[..., Any], str]] = {
    "one byte a number": (WAITING, lambda L, D, n, g: (L if g == 1 else g + L // g) * n * D, "How many bytes"),
    "groups ignored": (WAITING, lambda L, D, n, g: L * n * D * 2, "What do groups keep"),
    "the group at work forgotten": (WAITING, lambda L, D, n, g: (L if g == 1 else g) * n * D * 2, "inside the group"),
    "weights instead": (WAITING, lambda L, D, n, g: L * D * D * 2, "tokens x D"),
    "nothing tiled": (ROWS, lambda w, x, tiles: one_tile(w, x), "2048 x 64 numbers"),
    "all at once in f32": (ROWS, all_in_f32, "2048 x 64 numbers"),
    "tiles without a checkpoint": (ROWS, without_checkpoint, "2048 x 64 numbers"),
    "a checkpoint around the loop": (ROWS, checkpoint_around_the_loop, "2048 x 64 numbers"),
    "sums in bfloat16": (ROWS, narrow_sum, "In which type is the sum"),
    "the gate left out": (ROWS, no_gate, "is not silu"),
    "rows left in tiles": (ROWS, lambda w, x, tiles: rows_of(x, tiles), "one row for every row"),
    "the same plan": (BETTER, lambda: long_context.GIVEN, "that is the plan"),
    "everything kept": (BETTER, lambda: Plan(remat=None), "Which tool makes that one smaller"),
    "no plan": (BETTER, lambda: {"mlp_tiles": 4}, "return a llamem.Plan"),
    "slower still": (BETTER, lambda: long_context.GIVEN.replace(mode="nested"), "that you can spare"),
}


@pytest.mark.parametrize("answer", WRONG)
def test_a_wrong_answer_gets_the_hint_that_fits(answer):
    check, fn, hint = WRONG[answer]
    with pytest.raises(AssertionError, match=hint):
        check(fn)
