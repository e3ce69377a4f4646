from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from gallery import GALLERY, KEYS, WEIGHTS, D, L, N, X, by_policy, dropout, layer
from test_model import SMALL, VARIANTS, model_of, tokens_of
from test_moe import MOE

import llamem
from llamem import Policy, assert_remat, verify_remat
from llamem.step import loss_fn

NEWER_CPU = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)


@pytest.mark.parametrize("name", GALLERY)
def test_every_failure_is_caught_and_its_cause_named(name):
    if name == "the compiler undid it" and NEWER_CPU:
        pytest.skip("this JAX keeps its barriers on CPUs")
    row = GALLERY[name]
    verification = verify_remat(
        row.loss,
        WEIGHTS if row.params is None else row.params,
        X if row.batch is None else row.batch,
        with_=True,
        without=False,
    )
    assert not verification.holds, verification
    assert any(row.cause in f"{proof.seen} {proof.cause}" for proof in verification.failed), verification
    assert name in GALLERY and "FAILED" in str(verification) and "FAILED" in verification._repr_html_()


def stack(mode, **options):
    def loss(w, x, remat):
        return jnp.mean(llamem.apply_stack(layer, w, x, mode=mode, remat=remat, **options) ** 2)

    return loss


def with_dropout(w, batch, remat):
    keys = jax.random.split(batch["key"], L)
    return jnp.mean(llamem.apply_stack(dropout, w, batch["x"], keys, remat=remat) ** 2)


def with_adapters(w, x, remat):
    def adapted(p, x, lora):
        return layer({**p, "up": p["up"] + lora["a"] @ lora["b"]}, x)

    return jnp.mean(llamem.apply_stack(adapted, w["frozen"], x, w["lora"], remat=remat) ** 2)


ADAPTED = {
    "frozen": WEIGHTS,
    "lora": {"a": jax.random.normal(KEYS[5], (L, D, 2)), "b": jax.random.normal(KEYS[6], (L, 2, 4 * D))},
}


def as_argument(w, x, remat):
    """Keyword and static arguments, an integer input, jit inside."""

    @jax.jit
    def body(w, x, *, scale, places):
        return layer(w, x) * scale + 0 * places[:, None]

    call = lambda w, x: body(w, x, scale=0.9, places=jnp.arange(N))  # noqa: E731
    return jnp.mean(llamem.apply_stack(call, w, x, remat=remat) ** 2)


def mapped(w, x, remat):
    one = lambda x: stack("scan")(w, x, remat)  # noqa: E731
    return jnp.mean(jax.vmap(one)(jnp.stack([x, 2 * x])))


def of_gradient(w, x, remat):
    slope = jax.grad(lambda x: stack("scan")(w, x, remat))(x)
    return jnp.sum(slope**2)


class OwnLayer(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(D, 4 * D, rngs=rngs)
        self.outer = nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(jnp.sin(jnp.tanh(self.inner(x))))


GRAPH = nnx.graphdef(OwnLayer(nnx.Rngs(0)))
OWN = jax.vmap(lambda key: nnx.state(OwnLayer(nnx.Rngs(key))))(KEYS[:L])


def own_nnx(w, x, remat):
    return jnp.mean(llamem.apply_stack(lambda p, x: nnx.merge(GRAPH, p)(x), w, x, remat=remat) ** 2)


LINEN = linen.Dense(D)


def own_linen(w, x, remat):
    def body(p: Any, x: Any) -> Any:
        h: Any = LINEN.apply(p, x)
        return x + jnp.sin(jnp.tanh(h))

    return jnp.mean(llamem.apply_stack(body, w, x, remat=remat) ** 2)


def static_flag(w, x, remat):
    def body(w, x, train):
        return layer(w, x) if train else x

    call = jax.checkpoint(body, static_argnums=2) if remat else body
    return jnp.mean(jax.lax.scan(lambda x, w: (call(w, x, True), None), x, w)[0] ** 2)


def with_branches(w, x, remat):
    def body(w, x, i):
        return jax.lax.cond(i % 2 == 0, layer, lambda w, x: layer(w, -x), w, x)

    return jnp.mean(llamem.apply_stack(body, w, x, jnp.arange(L), remat=remat) ** 2)


def half(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


CORRECT = {
    **{mode: (stack(mode), WEIGHTS, X, "nothing") for mode in ("scan", "nested")},
    **{f"policy {p}": (stack("scan"), WEIGHTS, X, p) for p in (Policy(save=("h",)), "dots_saveable")},
    "hidden states": (
        lambda w, x, r: jnp.mean(llamem.apply_stack(layer, w, x, remat=r, return_hidden=True)[1] ** 2),
        WEIGHTS,
        X,
        "nothing",
    ),
    "bfloat16": (stack("scan"), half(WEIGHTS), half(X), "nothing"),
    "plain jax": (by_policy(None), WEIGHTS, X, True),
    "plain jax, no barrier in the scan": (by_policy(None, prevent_cse=False), WEIGHTS, X, True),
    "plain jax, named": (
        by_policy(jax.checkpoint_policies.save_only_these_names("h")),
        WEIGHTS,
        X,
        True,
    ),
    "dropout": (with_dropout, WEIGHTS, {"x": X, "key": KEYS[7]}, "nothing"),
    "adapters": (with_adapters, ADAPTED, X, "nothing"),
    "keywords, integers, jit": (as_argument, WEIGHTS, X, "nothing"),
    "vmap": (mapped, WEIGHTS, X, "nothing"),
    "gradient of a gradient": (of_gradient, WEIGHTS, X, "nothing"),
    "own nnx model": (own_nnx, OWN, X, "nothing"),
    "own linen model": (own_linen, jax.vmap(LINEN.init, (0, None))(KEYS[:L], X), X, "nothing"),
    "a static flag": (static_flag, WEIGHTS, X, True),
    "branches": (with_branches, WEIGHTS, X, "nothing"),
}


@pytest.mark.parametrize("name", CORRECT)
def test_no_false_alarm(name):
    loss, params, batch, how = CORRECT[name]
    assert_remat(loss, params, batch, with_=how, without=None)


@pytest.mark.parametrize("mode", ["scan", "nested"])
@pytest.mark.parametrize("name", ["untied", "tied", "qwen3", "moe"])
def test_the_models_here_are_proved(name, mode):
    config = {**VARIANTS, "moe": MOE}[name].replace(n_layers=4, max_seq_len=128)
    model = model_of(config, mode=mode)
    tokens_BT = tokens_of(config, T=97)

    def loss(params, tokens_BT, remat):
        own = nnx.merge(nnx.graphdef(model), params)
        own.remat = remat
        graphdef, params = nnx.split(own)
        return loss_fn(graphdef, params, tokens_BT[:, :-1], tokens_BT[:, 1:], num_tiles=2)

    assert_remat(loss, nnx.state(model), tokens_BT)


@pytest.mark.parametrize("chip", [pytest.param("a100-40", marks=pytest.mark.gpu_compile)])
def test_on_a_chip_that_is_not_there_unrolled_layers_are_proved(chip):
    if not llamem.available(chip):
        pytest.skip(f"no compiler for {chip} here")
    assert_remat(stack("unroll"), WEIGHTS, jnp.tile(X, (16, 1)), target=chip)


def test_evaluation_is_told_from_training():
    """A model in eval mode checkpoints nothing, and the report says so."""
    model = model_of(SMALL)
    model.eval()

    def loss(params, tokens, remat):
        own = nnx.merge(nnx.graphdef(model), params)
        own.remat = remat
        return jnp.mean(own(tokens) ** 2)

    with pytest.raises(AssertionError, match="eval mode"):
        assert_remat(loss, nnx.state(model), tokens_of(SMALL))
