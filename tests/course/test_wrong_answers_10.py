"""Wrong answers to the exercises of notebook 10, the silent failures that it shows among them: each is rejected."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import llamem
from llamem.course.exercises import trust_but_verify as exercises

policies = jax.checkpoint_policies


def scan(body, w, x):
    return jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0]


def mean_square(x):
    return jnp.mean(x**2)


def with_policy(policy):
    def answer(layer, w, x, remat):
        return mean_square(scan(jax.checkpoint(layer, policy=policy) if remat else layer, w, x))

    return answer


def keeping(policy, keys_of=lambda key: jax.random.split(key, 6)):
    """A stack with dropout whose layers keep what `policy` says, right but for that and for its keys."""

    def answer(layer, w, x, key, remat):
        body = jax.checkpoint(layer, policy=policy) if remat else layer
        return mean_square(jax.lax.scan(lambda x, wk: (body(wk[0], x, wk[1]), None), x, (w, keys_of(key)))[0])

    return answer


def unrolled(layer, w, x, key, remat):
    body = jax.checkpoint(layer, policy=policies.save_only_these_names("h")) if remat else layer
    for i, own in enumerate(jax.random.split(key, 6)):
        x = body(jax.tree.map(lambda a, i=i: a[i], w), x, own)
    return mean_square(x)


def around(layer, w, x, remat):
    def whole(w, x):
        return scan(layer, w, x)

    return mean_square((jax.checkpoint(whole) if remat else whole)(w, x))


def dropped(keys_of):
    """A right stack, with the keys that `keys_of(key)` makes."""

    def answer(layer, w, x, key, remat):
        return mean_square(llamem.apply_stack(layer, w, x, keys_of(key), remat="nothing" if remat else None))

    return answer


def closed_over(layer, w, x, key, remat):
    def body(w, x):
        return layer(w, x, key)

    return mean_square(scan(jax.checkpoint(body) if remat else body, w, x))


def dropout(remat_of):
    def answer(layer, w, x, key, remat):
        keys = jax.random.split(key, 6)
        return mean_square(llamem.apply_stack(layer, w, x, keys, remat=remat_of(remat)))

    return answer


def dropout_around(layer, w, x, key, remat):
    def whole(w, x):
        return llamem.apply_stack(layer, w, x, jax.random.split(key, 6), remat=None)

    return mean_square((jax.checkpoint(whole) if remat else whole)(w, x))


WRONG: dict[str, tuple[Callable[..., None], Callable[..., Any], str]] = {
    "the flag ignored": (exercises.check_cured_loss, lambda f, w, x, r: mean_square(scan(f, w, x)), "0 of them"),
    "around the scan": (exercises.check_cured_loss, around, "memory falls"),
    "a policy that keeps everything": (
        exercises.check_cured_loss,
        with_policy(policies.everything_saveable),
        "policies|runs again|memory falls",
    ),
    "the sum of squares": (
        exercises.check_cured_loss,
        lambda f, w, x, r: jnp.sum(scan(jax.checkpoint(f) if r else f, w, x) ** 2),
        "mean of the squares",
    ),
    "what leaves the last layer": (
        exercises.check_cured_loss,
        lambda f, w, x, r: scan(jax.checkpoint(f) if r else f, w, x),
        "one number",
    ),
    "the first layer skipped": (
        exercises.check_cured_loss,
        lambda f, w, x, r: with_policy(None)(f, jax.tree.map(lambda a: a[1:], w), x, r),
        "first layer is left out",
    ),
    "no layer at all": (exercises.check_cured_loss, lambda f, w, x, r: mean_square(x), "no layer runs"),
    "gradients stopped": (
        exercises.check_cured_loss,
        lambda f, w, x, r: with_policy(None)(f, jax.lax.stop_gradient(w) if r else w, x, r),
        "gradient|runs again",
    ),
    "one key closed over": (exercises.check_cured_dropout, closed_over, "are copies"),
    "the first of the keys": (
        exercises.check_cured_dropout,
        dropped(lambda key: jnp.broadcast_to(jax.random.split(key, 6)[0], (6,))),
        "are copies",
    ),
    "one key stacked": (exercises.check_cured_dropout, dropped(lambda key: jnp.stack([key] * 6)), "are copies"),
    "keys of two steps mixed": (
        exercises.check_cured_dropout,
        dropped(lambda key: jnp.concatenate([jax.random.split(key, 3), jax.random.split(jax.random.key(1), 3)])),
        "in every step",
    ),
    "keys of layer numbers": (
        exercises.check_cured_dropout,
        dropped(lambda key: jax.vmap(jax.random.key)(jnp.arange(6))),
        "in every step",
    ),
    "dropout without remat": (exercises.check_cured_dropout, dropout(lambda remat: None), "0 of them"),
    "dropout with remat always": (exercises.check_cured_dropout, dropout(lambda remat: "nothing"), "flag"),
    "dropout, around the loop": (exercises.check_cured_dropout, dropout_around, "memory falls"),
    "no policy": (exercises.check_cured_policy, keeping(None), "not among the residuals"),
    "another name": (exercises.check_cured_policy, keeping(policies.save_only_these_names("hidden")), "misspelled"),
    "all but h": (
        exercises.check_cured_policy,
        keeping(policies.save_anything_except_these_names("h")),
        "memory falls|not among|runs again",
    ),
    "everything": (exercises.check_cured_policy, keeping(policies.everything_saveable), "runs again|memory"),
    "products without a batch axis": (
        exercises.check_cured_policy,
        keeping(policies.dots_with_no_batch_dims_saveable),
        "save the name 'h' alone",
    ),
    "h, with one key": (
        exercises.check_cured_policy,
        keeping(policies.save_only_these_names("h"), lambda key: jnp.stack([key] * 6)),
        "are copies",
    ),
    "h, unrolled": (exercises.check_cured_policy, unrolled, "compiler leaves|not among|memory"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_rejected_with_the_symptom_that_fits(name):
    check, answer, hint = WRONG[name]
    with pytest.raises(AssertionError, match=hint) as error:
        check(answer)
    assert "jax.checkpoint(layer)" not in str(error.value) and "split(key" not in str(error.value)
