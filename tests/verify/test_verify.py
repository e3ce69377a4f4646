import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from gallery import (
    KEYS,
    STATISTICS_OF,
    WEIGHTS,
    WEIGHTS_OF,
    D,
    L,
    N,
    X,
    always_checkpointed,
    by_policy,
    half,
    layer,
    normed,
    with_dropout,
)
from models import MOE, SMALL, VARIANTS, model_of, tokens_of

import llamem
from llamem import Policy, assert_remat, verify_remat
from llamem.train.step import loss_fn
from llamem.verify import proofs
from llamem.verify.case import BothWays
from llamem.verify.runs import count_runs


def stack(mode, **options):
    def loss(w, x, remat):
        return jnp.mean(llamem.apply_stack(layer, w, x, mode=mode, remat=remat, **options) ** 2)

    return loss


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


class Noisy(nnx.Module):
    """A layer with all the state that nnx knows: weights, batch statistics, keys and counts of draws."""

    def __init__(self, rngs):
        self.inner = OwnLayer(rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.inner(x)))


NOISY = nnx.graphdef(Noisy(nnx.Rngs(0)))
NOISY_WEIGHTS, NOISY_STATE = nnx.split_state(
    jax.vmap(lambda key: nnx.state(Noisy(nnx.Rngs(key))))(KEYS[:L]), nnx.Param, ...
)


def nnx_transforms(w, batch, remat):
    """nnx.scan of nnx.remat; what the layers changed is returned, the counts of draws among it."""
    state = jax.tree.map(lambda leaf: leaf, batch["state"])  # Variables belong to the trace that made them
    layers = nnx.merge(NOISY, w, state)
    body = lambda layer, x: layer(x)  # noqa: E731
    x = nnx.scan(nnx.remat(body) if remat else body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, batch["x"])
    return jnp.mean(x**2), nnx.state(layers, nnx.Not(nnx.Param))


@functools.partial(jax.jit, donate_argnums=0)
def donating(w, x):
    return jnp.mean(llamem.apply_stack(layer, w, x, remat="nothing") ** 2)


def donated(w, x, remat):
    return donating(w, x) if remat else stack("scan")(w, x, None)


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
    "batch statistics": (normed, WEIGHTS_OF, {"x": X, "statistics": STATISTICS_OF}, True),
    "nnx's own transforms": (nnx_transforms, NOISY_WEIGHTS, {"x": X, "state": NOISY_STATE}, True),
    "donated buffers": (donated, WEIGHTS, X, True),
    "a static flag": (static_flag, WEIGHTS, X, True),
    "branches": (with_branches, WEIGHTS, X, "nothing"),
}


@pytest.mark.parametrize("name", CORRECT)
def test_no_false_alarm(name):
    loss, params, batch, how = CORRECT[name]
    assert_remat(loss, params, batch, with_=how, without=None)


def model_config(name):
    return {**VARIANTS, "moe": MOE}[name].replace(n_layers=4, max_seq_len=128)


def model_case(name, mode):
    config = model_config(name)
    model = model_of(config, mode=mode)

    def loss(params, tokens_BT, remat):
        own = nnx.merge(nnx.graphdef(model), params)
        own.plan = own.plan.replace(remat=remat, loss_tiles=2)
        graphdef, params = nnx.split(own)
        return loss_fn(graphdef, params, tokens_BT[:, :-1], tokens_BT[:, 1:])

    return loss, nnx.state(model), tokens_of(config, T=97)


@pytest.mark.parametrize("mode", ["scan", "nested"])
@pytest.mark.parametrize("name", ["untied", "tied", "qwen3", "moe"])
def test_the_models_here_are_proved(name, mode):
    verification = verify_remat(*model_case(name, mode))
    assert verification.holds, verification
    chosen = [proof for proof in verification.proofs if "chooses the same" in proof.name]
    assert len(chosen) == (name == "moe"), "experts are compared where there are some"


@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", ["layer", "untied", "tied", "qwen3", "moe"])
def test_on_a_chip_that_is_not_there_unrolled_layers_are_proved(name):
    if not llamem.available("a100-40"):
        pytest.skip("no compiler for a100-40 here")
    if name == "layer":
        assert_remat(stack("unroll"), WEIGHTS, jnp.tile(X, (16, 1)), target="a100-40")
    else:
        assert_remat(*model_case(name, "unroll"), target="a100-40")


@pytest.mark.tpu_compile
@pytest.mark.parametrize("place", ["pinned_host", "unpinned_host"])
def test_offloaded_bytes_arrive_or_are_missed(place):
    if not llamem.available("v5e-1"):
        pytest.skip("no compiler for v5e-1 here")
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst=place
    )
    case = by_policy(policy), WEIGHTS, jnp.tile(X, (16, 1))
    found = verify_remat(*case, with_=True, without=False, target="v5e-1", proofs=[proofs.offloaded_bytes_arrive])
    (proof,) = found.proofs
    assert proof.holds == (place == "pinned_host"), proof
    asked = L * 16 * N * 4 * D * 4 if proof.holds else 0
    assert f"{asked:,} bytes offloaded" in proof.seen, proof


def test_on_eight_devices():
    script = Path(__file__).parent / "mesh_verify.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_proofs_can_be_had_alone():
    both = BothWays(stack("scan"), WEIGHTS, X)
    proof = proofs.layer_runs_again(both)
    assert proof.holds and f"{L} runs of checkpointed functions, {L} again" in proof.seen
    assert "expected" not in vars(both), "nothing is computed that the proof does not need"
    alone = verify_remat(stack("scan"), WEIGHTS, X, with_=None, proofs=[proofs.memory_falls])
    assert [proof.name for proof in alone.failed] == ["memory falls"]


def test_runs_are_counted_where_they_happen():
    """A branch that is not taken does not run, a policy that keeps everything makes nothing run again."""
    kept = by_policy(jax.checkpoint_policies.everything_saveable)
    runs = count_runs(lambda w, x: kept(w, x, True), WEIGHTS, X)
    assert (runs.forward, runs.again) == (L, 0)

    def sometimes(w, x):
        def body(x, inputs):
            i, w = inputs
            return jax.lax.cond(i < 2, jax.checkpoint(layer), lambda w, x: x, w, x), None

        return jnp.mean(jax.lax.scan(body, x, (jnp.arange(L), w))[0] ** 2)

    runs = count_runs(sometimes, WEIGHTS, X)
    assert (runs.forward, runs.again) == (2, 2)


@pytest.mark.parametrize("name", ["scan", "dropout", "plain jax, named"])
def test_jax_remat3_is_understood(remat3, name):
    loss, params, batch, how = CORRECT[name]
    runs = count_runs(lambda p, b: loss(p, b, how), params, batch)
    assert (runs.forward, runs.again, runs.changed) == (L, L, ())
    assert_remat(loss, params, batch, with_=how, without=None)


def test_buffers_outlive_the_proof():
    assert_remat(donated, WEIGHTS, X, with_=True, proofs=[proofs.gradients_are_the_same])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((WEIGHTS, X)))


@pytest.mark.parametrize("name", ["untied", "moe"])
def test_decoding_with_a_cache_is_untouched(name):
    loss, params, tokens_BT = model_case(name, "scan")
    graphdef = nnx.graphdef(model_of(model_config(name)))

    def evaluate(params, tokens_BT, remat):
        own = nnx.merge(graphdef, params)
        own.plan = own.plan.replace(remat=remat, loss_tiles=2)  # still in training mode: decoding must not care
        return own.decode(tokens_BT, own.empty_cache(len(tokens_BT), 128))

    chosen = [proofs.checkpoints_are_there, proofs.evaluation_is_untouched]
    verification = verify_remat(loss, params, tokens_BT, evaluate=evaluate, proofs=chosen)
    assert verification.holds and len(verification.proofs) == 2, verification


def test_a_cache_that_differs_is_noticed():
    def evaluate(w, x, remat):
        return {"cache": x[:8] + (1e-6 if remat else 0.0), "length": 8}

    for how_evaluated in (evaluate, always_checkpointed):
        found = verify_remat(stack("scan"), WEIGHTS, X, evaluate=how_evaluated, proofs=[proofs.evaluation_is_untouched])
        assert [proof.name for proof in found.failed] == ["evaluation is untouched"], how_evaluated


def test_evaluation_is_told_from_training():
    """A model in eval mode checkpoints nothing, and the report says so."""
    model = model_of(SMALL)
    model.eval()

    def loss(params, tokens, remat):
        own = nnx.merge(nnx.graphdef(model), params)
        own.plan = own.plan.replace(remat=remat, loss_tiles=2)
        return jnp.mean(own(tokens) ** 2)

    with pytest.raises(AssertionError, match="eval mode"):
        assert_remat(loss, nnx.state(model), tokens_of(SMALL))
