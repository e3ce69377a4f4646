"""Wrong answers to the exercises of notebook 09: each is refused, with a hint that leads on and does not tell."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llamem.course.exercises import lora_and_rl as rl


def adapted(x, w, down, up, scale, adapter):
    z_BTR = jnp.einsum("BTD,BDR->BTR", x, down[adapter]) * scale[adapter][:, None, None]
    return x @ w + jnp.einsum("BTR,BRF->BTF", z_BTR, up[adapter])


def merged(x, w, down, up, scale, adapter):
    delta = jnp.einsum("BDR,BRF->BDF", down[adapter], up[adapter]) * scale[adapter][:, None, None]
    return jnp.einsum("BTD,BDF->BTF", x, w + delta)


def merged_by_adapter(x, w, down, up, scale, adapter):
    whole = w + jnp.einsum("ADR,ARF->ADF", down, up) * scale[:, None, None]
    return jnp.stack([row @ whole[a] for row, a in zip(x, adapter, strict=True)])


def everyone(x, w, down, up, scale, adapter):
    z_BATR = jnp.einsum("BTD,ADR->BATR", x, down) * scale[:, None, None]
    own_BA = jax.nn.one_hot(adapter, len(scale))
    return x @ w + jnp.einsum("BATR,ARF,BA->BTF", z_BATR, up, own_BA)


def clipped(z, targets, advantages, old, epsilon, way="right"):
    p = jax.nn.softmax(z)
    hit = jax.nn.one_hot(targets, z.shape[1])
    ratio = jnp.exp(jnp.sum(jnp.log(p) * hit, 1) - old)
    bounded = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
    free = ratio * advantages <= bounded * advantages
    if way == "log":
        bounded = jnp.exp(jnp.clip(jnp.log(ratio), -epsilon, epsilon))
        free = ratio * advantages <= bounded * advantages
    if way == "both sides":
        free = ratio == bounded
    if way == "the wrong side":
        free = ratio * advantages >= bounded * advantages
    if way == "never":
        free = jnp.ones(len(z), bool)
    g = -advantages * (1.0 if way == "no ratio" else ratio) * free
    if way == "sign":
        g = -g
    if way == "only the target":
        return g[:, None] * hit
    if way == "sum":
        return (g[:, None] * (hit - p)).sum(0)
    if way == "mean":
        g = g / len(g)
    return g[:, None] * (hit - p)


def by_token(x, w, down, up, scale, adapter):
    rows, own = x.reshape(-1, x.shape[2]), jnp.repeat(adapter, x.shape[1])
    z_NR = jnp.einsum("ND,NDR->NR", rows, down[own]) * scale[own][:, None]
    return x @ w + jnp.einsum("NR,NRF->NF", z_NR, up[own]).reshape(*x.shape[:2], -1)


def merged_in_a_loop(x, w, down, up, scale, adapter):
    return jax.lax.map(lambda one: one[0] @ (w + scale[one[1]] * down[one[1]] @ up[one[1]]), (x, adapter))


def weights(mask):
    return mask / jnp.maximum(mask.sum(1, keepdims=True), 1) / len(mask)


WRONG: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "the weight alone": (rl.check_adapted, lambda x, w, *rest: x @ w, "the LoRA that you built"),
    "the delta alone": (
        rl.check_adapted,
        lambda x, w, *rest: adapted(x, w, *rest) - x @ w,
        "the LoRA that you built",
    ),
    "the first example's adapter for all": (
        rl.check_adapted,
        lambda x, w, d, u, s, a: adapted(x, w, d, u, s, jnp.full_like(a, a[0])),
        "one for each example is not",
    ),
    "no scale": (
        rl.check_adapted,
        lambda x, w, d, u, s, a: adapted(x, w, d, u, jnp.ones_like(s), a),
        "a scale of its own",
    ),
    "weights merged for each example": (rl.check_adapted, merged, "you merge weights"),
    "weights merged for each adapter": (rl.check_adapted, merged_by_adapter, "you merge weights"),
    "every adapter for every example": (rl.check_adapted, everyone, "not its own"),
    "upwards": (rl.check_clipped_gradient, partial(clipped, way="sign"), "the sign"),
    "only the target": (rl.check_clipped_gradient, partial(clipped, way="only the target"), "rows sum to"),
    "a mean": (rl.check_clipped_gradient, partial(clipped, way="mean"), "already there it is wrong"),
    "no ratio": (rl.check_clipped_gradient, partial(clipped, way="no ratio"), "at 1.1 and 0.9 not"),
    "never clipped": (rl.check_clipped_gradient, partial(clipped, way="never"), "nothing is clipped"),
    "clipped on both sides": (rl.check_clipped_gradient, partial(clipped, way="both sides"), "holds it still"),
    "clipped on the wrong side": (rl.check_clipped_gradient, partial(clipped, way="the wrong side"), "holds it still"),
    "one row": (rl.check_clipped_gradient, partial(clipped, way="sum"), "for each logit"),
    "one gather for each token": (rl.check_adapted, by_token, "you merge weights"),
    "merged in a loop": (rl.check_adapted, merged_in_a_loop, "one by one|you merge weights"),
    "nothing for the layers below": (
        rl.check_adapted,
        lambda x, w, *rest: jax.lax.stop_gradient(x @ w) + adapted(x, w, *rest) - x @ w,
        "layers below|FLOPs",
    ),
    "epsilon fixed": (
        rl.check_clipped_gradient,
        lambda z, y, a, old, epsilon: clipped(z, y, a, old, 0.2),
        "with 0.1 not",
    ),
    "two epsilons": (
        rl.check_clipped_gradient,
        lambda z, y, a, old, epsilon: clipped(z, y, a, old, 2 * epsilon),
        "with 0.1 not|stand still|is clipped",
    ),
    "clipped in log space": (rl.check_clipped_gradient, partial(clipped, way="log"), "with 0.1 not"),
    "divided by the length of the row": (rl.check_token_weights, lambda m: weights(m) * len(m) / m.shape[1], "sum to"),
    "a mean over tokens": (rl.check_token_weights, lambda m: m / m.sum(), "all tokens weigh the same"),
    "not a number": (rl.check_token_weights, lambda m: m / m.sum(1, keepdims=True) / len(m), "0 / 0"),
    "a sum over sequences": (rl.check_token_weights, lambda m: weights(m) * len(m), "weigh a third"),
    "empty ones not counted": (rl.check_token_weights, lambda m: weights(m) * 3 / 2, "weigh a third"),
    "padding as well": (
        rl.check_token_weights,
        lambda m: jnp.broadcast_to(1 / jnp.maximum(m.sum(1, keepdims=True), 1) / len(m), m.shape),
        "outside the mask",
    ),
    "by the longest": (rl.check_token_weights, lambda m: m / m.shape[1] / len(m), "third"),
    "one number": (rl.check_token_weights, lambda m: weights(m).sum(), "a weight for each token"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_refused_with_its_hint(name):
    check, answer, leads_to = WRONG[name]
    with pytest.raises(AssertionError, match=leads_to) as refused:
        check(answer)
    hint = str(refused.value)
    assert len(hint.split()) > 8, "the hint says too little"
    assert "einsum" not in hint and "softmax" not in hint and "maximum(" not in hint, "the hint is the answer"


def by_groups(x, w, down, up, scale, adapter):
    order = jnp.argsort(adapter)
    sizes = jnp.bincount(adapter, length=len(scale)) * x.shape[1]
    rows = x[order].reshape(-1, x.shape[2])
    z = jax.lax.ragged_dot(rows, down, sizes)
    delta = jax.lax.ragged_dot(z, up, sizes).reshape(*x.shape[:2], -1) * scale[adapter[order]][:, None, None]
    return x @ w + jnp.zeros_like(delta).at[order].set(delta)


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (rl.check_adapted, adapted),
        (rl.check_adapted, by_groups),
        (rl.check_clipped_gradient, clipped),
        (rl.check_token_weights, weights),
        (rl.check_token_weights, lambda m: jnp.where(m > 0, m / m.sum(1, keepdims=True), 0) / len(m)),
    ],
)
def test_a_right_answer_is_accepted(check, answer, capsys):
    check(answer)
    assert "correct" in capsys.readouterr().out
