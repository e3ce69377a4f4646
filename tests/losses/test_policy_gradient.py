"""Policy gradients and preferences against float64, against TRL's formulas, and what they cost and refuse."""

import dataclasses
import gc
import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import not_of_old_compilers
from norms import relative_errors
from policy_reference import ADVANTAGES, HEAD, HIDDEN, MASK, OLD, REF, TARGETS, B, D, T, V, logprobs, reference

from jaxmem import compile_report, matmul_flops
from llamem.losses.cross_entropy import tiled_cross_entropy, tiled_logprobs
from llamem.losses.rewards_and_preferences import PolicyObjective, group_advantages, tiled_dpo_loss, tiled_policy_loss
from llamem.losses.tile_choice import choose_tiles
from llamem.losses.token_loss import tiled_token_loss

N = B * T
COMPILED = "/jax/core/compile/backend_compile_duration"
X, W, IDS = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(HEAD, jnp.float32), jnp.asarray(TARGETS)
LLAMA_8B = [
    jax.ShapeDtypeStruct(*s)
    for s in (((8, 1024, 4096), "bfloat16"), ((128_256, 4096), "bfloat16"), ((8, 1024), "int32"))
]
LLAMA_8B += [jax.ShapeDtypeStruct((8,), "float32")] + [jax.ShapeDtypeStruct((8, 1024), "float32")] * 3


def f32(*values: Any) -> tuple:
    return tuple(None if v is None else jnp.asarray(v, jnp.float32) for v in values)


def policy(hidden, head, *, adv=ADVANTAGES, old=OLD, ref=None, mask=MASK, softcap=None, **options: Any):
    adv, old, ref, mask = f32(adv, old, ref, mask)
    fields = {field.name for field in dataclasses.fields(PolicyObjective)} & options.keys()
    kwargs: dict[str, Any] = {
        "num_tiles": 3,
        "objective": PolicyObjective(**{name: options.pop(name) for name in fields}),
    }
    return tiled_policy_loss(
        hidden, head, IDS, adv, old_logprobs=old, ref_logprobs=ref, mask=mask, logit_softcap=softcap, **kwargs | options
    )


def close(actual, expected, rtol=1e-4, atol=2e-5):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol * np.abs(expected).max())


ALL = {"ref": REF, "kl_weight": 0.3, "entropy_weight": 0.05, "temperature": 0.8, "softcap": 6.0, "clip_high": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "reinforce": {"kind": "reinforce", "old": None},
    "importance": {"kind": "importance"},
    "clip": {},
    "on-policy": {"old": None},
    "divergence": {"ref": REF, "kl_weight": 0.3},
    "divergence by sequence": {"ref": REF, "kl_weight": 0.3, "normalize": "sequences"},
    "entropy": {"entropy_weight": 0.5, "mask": np.ones((B, T))},
    "given": {"normalizer": 123.0, "clip_low": 0.05, "clip_high": 0.4},
    "all": ALL,
    "all by sequence": ALL | {"normalize": "sequences", "normalizer": 9.0},
}


def test_the_reference_is_right():
    """Its gradients against differences of its loss."""
    for options in (CASES["all by sequence"], CASES["divergence"], CASES["importance"]):
        _, grads = reference(HIDDEN, HEAD, **options)
        for i, grad in enumerate(grads):
            way, step = np.random.default_rng(i).normal(size=grad.shape), 1e-6

            def along(t, i=i, way=way, options=options):
                hidden, head = (p + t * way if j == i else p for j, p in enumerate((HIDDEN, HEAD)))
                return reference(hidden, head, **options)[0]

            np.testing.assert_allclose((along(step) - along(-step)) / (2 * step), (grad * way).sum(), rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_both_gradients(case):
    """On the axes by turns, on both with all options."""
    options, outer = CASES[case], -3.0
    loss, expected = reference(HIDDEN, HEAD, **options)
    for axis in ("tokens", "vocab") if case == "all" else ("tokens",) if list(CASES).index(case) % 2 else ("vocab",):

        def fn(hidden, head, axis=axis):
            return outer * policy(hidden, head, axis=axis, **options)

        value, grads = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(X, W)
        np.testing.assert_allclose(value, outer * loss, rtol=2e-5)
        for actual, wanted in zip(grads, expected, strict=True):
            assert np.abs(wanted).max() > 0
            close(actual, outer * wanted)
        if case == "all":
            close(jax.grad(lambda x: fn(x, W))(X), outer * expected[0])
            close(jax.grad(lambda w: fn(X, w))(W), outer * expected[1])


def plain(hidden, head):
    """As one writes it, logits in the type of hidden."""
    rows = hidden.reshape(-1, hidden.shape[-1])  # before JAX 0.9 a CPU has no bf16 product of three axes by a matrix
    logits = (rows @ head.T).astype(jnp.float32).reshape(*hidden.shape[:-1], -1)
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), IDS[..., None], -1)[..., 0]
    ratio, (adv, mask) = jnp.exp(logp - jnp.asarray(OLD, jnp.float32)), f32(ADVANTAGES, MASK)
    loss = -jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv)
    return jnp.sum(loss * mask) / jnp.sum(mask)


@pytest.mark.parametrize("axis", ["tokens", "vocab"])
def test_two_bytes_lose_no_more_than_the_plain_loss(axis):
    """The head's gradient grows over 64 tiles, and each of its columns is as right as one that is rounded once."""
    key = jax.random.split(jax.random.key(0), 2)
    outlier = jnp.where(jnp.arange(D) == 3, 30.0, 1.0)  # one feature as large as those of language models
    hidden = (jax.random.normal(key[0], (B, T, D)) * outlier).astype(jnp.bfloat16)
    head = (jax.random.normal(key[1], (V, D)) / outlier).astype(jnp.bfloat16)
    _, expected = reference(hidden, head)
    ours, usual = (
        jax.grad(fn, argnums=(0, 1))(hidden, head) for fn in (partial(policy, num_tiles=64, axis=axis), plain)
    )
    assert all(g.dtype == jnp.bfloat16 for g in ours)
    errors = list(zip(relative_errors(ours, expected), relative_errors(usual, expected), strict=True))
    assert all(a <= b for a, b in errors), errors
    off = np.linalg.norm(np.asarray(ours[1], np.float64) - expected[1], axis=0) / np.linalg.norm(expected[1], axis=0)
    assert off.max() < 6e-3


@pytest.mark.quick
def test_products_and_memory():
    """3 products over tokens, 4 over the vocabulary; with a frozen head "auto" takes 2 in any case."""

    def flops(fn, *args):
        return matmul_flops(jax.make_jaxpr(fn)(*args).jaxpr) / (2 * N * D * V)

    for axis, both in (("tokens", 3), ("vocab", 4)):
        fn = partial(policy, axis=axis, num_tiles=4 if axis == "tokens" else 3, entropy_weight=0.1)
        assert flops(fn, X, W) == 1 and flops(jax.grad(fn, argnums=(0, 1)), X, W) == both
    tokens = partial(policy, num_tiles=4)
    assert flops(jax.grad(tokens), X, W) == flops(jax.grad(tokens, argnums=1), X, W) == 2
    assert flops(jax.grad(partial(policy, axis="vocab")), X, W) == 2
    big = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((2048, 32), (32_000, 32))]

    def loss(x, w):
        return tiled_policy_loss(
            x, w, jnp.zeros(2048, int), jnp.ones(2048), objective=PolicyObjective(entropy_weight=0.1)
        )

    assert choose_tiles(2048, 32, 32_000).axis == "vocab"  # where the head is trained
    unit = 2 * 2048 * 32 * 32_000
    assert matmul_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*big).jaxpr) == 4 * unit
    assert matmul_flops(jax.make_jaxpr(jax.grad(loss))(*big).jaxpr) == 2 * unit
    compiled: Any = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*big).compile()
    assert "[2048,32000]" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2048 * 32_000 * 4 / 4


def test_no_program_is_kept_for_a_lambda():
    """A notebook that makes its loss anew in each call leaves nothing behind."""

    def call(scale):
        def fn(logp, entropy, extras):
            return -scale * logp

        tiled_token_loss(fn, X, W, IDS, num_tiles=1)
        return weakref.ref(fn)

    first, second = call(2.0), call(3.0)
    gc.collect()
    assert first() is None and second() is None


def test_an_eager_call_with_an_equal_objective_compiles_nothing():
    compiled = []

    def call(clip, seed):
        advantages = jax.random.normal(jax.random.key(seed), IDS.shape)
        return tiled_policy_loss(X, W, IDS, advantages, objective=PolicyObjective(clip_high=clip), num_tiles=3)

    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    first, _ = call(0.25, 0), call(0.25, 1)
    before = compiled.count(COMPILED)
    again, changed = call(0.25, 0), call(0.25, 1)
    assert compiled.count(COMPILED) == before > 0 and again == first != changed
    call(0.45, 0)
    assert compiled.count(COMPILED) > before


def trl(logp, old, ref, adv, mask, loss_type, beta, low, high, longest):
    """`GRPOTrainer._compute_loss` of TRL 1.16, in NumPy."""
    coef_1 = np.exp(logp - old)
    coef_2 = np.clip(coef_1, 1 - low, 1 + high)
    per_token_loss = -np.minimum(coef_1 * adv[:, None], coef_2 * adv[:, None])
    per_token_loss = per_token_loss + beta * (np.exp(ref - logp) - (ref - logp) - 1)
    if loss_type == "grpo":
        return ((per_token_loss * mask).sum(-1) / np.maximum(mask.sum(-1), 1)).mean()
    if loss_type == "bnpo":
        return (per_token_loss * mask).sum() / np.maximum(mask.sum(), 1)
    return (per_token_loss * mask).sum() / (len(mask) * longest)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
def test_trl(loss_type):
    rewards = np.random.default_rng(3).normal(size=(B // 2, 2))
    mean, std = rewards.mean(1, keepdims=True), rewards.std(1, ddof=1, keepdims=True)
    adv = ((rewards - mean) / (std + 1e-4)).reshape(-1)
    ours = group_advantages(jnp.asarray(rewards, jnp.float32)).reshape(-1)
    np.testing.assert_allclose(ours, adv, rtol=1e-5)
    np.testing.assert_allclose(group_advantages(jnp.asarray(rewards), scale=False), rewards - mean, rtol=1e-5)
    options = {"grpo": {"normalize": "sequences"}, "bnpo": {}, "dr_grpo": {"normalizer": B * 20.0}}[loss_type]
    loss = policy(X, W, adv=ours, ref=REF, kl_weight=0.04, clip_low=0.2, clip_high=0.28, **options)
    expected = trl(logprobs(HIDDEN, HEAD), OLD, REF, adv, MASK, loss_type, 0.04, 0.2, 0.28, 20)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)


def test_a_loss_of_ones_own():
    """Cross-entropy, focal loss, and an extra with a shape of its own; under jit and vmap."""
    fn = partial(tiled_token_loss, lambda logp, entropy, extras: -logp, num_tiles=3)
    expected = jax.value_and_grad(partial(tiled_cross_entropy, num_tiles=3), argnums=(0, 1))(X, W, IDS)
    found = jax.value_and_grad(fn, argnums=(0, 1))(X, W, IDS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)

    def focal(logp, entropy, extras):
        power, (a, b) = extras["power"], extras["pair"]
        return -((1 - jnp.exp(logp)) ** power) * logp * a + b * entropy**2

    extras = {"power": jnp.full((B, T), 2.0), "pair": jax.random.normal(jax.random.key(0), (B, T, 2))}

    def ours(x, w):
        return tiled_token_loss(focal, x, w, IDS, extras, num_tiles=3)

    def by_autodiff(x, w):
        logp_BTV = jax.nn.log_softmax(x @ w.T)
        entropy_BT = -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, -1)
        logp_BT = jnp.take_along_axis(logp_BTV, IDS[..., None], -1)[..., 0]
        return jnp.mean(jax.vmap(jax.vmap(focal))(logp_BT, entropy_BT, extras))

    def agree(a, b):
        jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=2e-3, atol=2e-6), a, b)

    wanted = jax.grad(by_autodiff, argnums=(0, 1))
    agree(jax.jit(jax.grad(ours, argnums=(0, 1)))(X, W), wanted(X, W))
    many = jnp.stack([X, X / 2])
    agree(jax.vmap(jax.grad(ours, argnums=(0, 1)), (0, None))(many, W), jax.vmap(wanted, (0, None))(many, W))


@pytest.mark.parametrize("kind", ["clip", "importance"])
@pytest.mark.parametrize("advantage", [1.0, 0.0])
@pytest.mark.parametrize("beside", ["old_logprobs", "ref_logprobs"])
def test_a_token_that_has_become_far_likelier_or_far_less_so_is_no_nan(kind, advantage, beside):
    objective = PolicyObjective(kind=kind, kl_weight=0.1 if beside == "ref_logprobs" else 0.0)
    far: dict[str, Any] = {beside: jnp.full((B, T), -200.0 if beside == "old_logprobs" else 200.0)}
    policy_loss = lambda x, w: tiled_policy_loss(x, w, IDS, jnp.full((B, T), advantage), objective=objective, **far)  # noqa: E731
    value, grads = jax.value_and_grad(policy_loss, argnums=(0, 1))(X, W)
    assert jnp.isfinite(value) and all(jnp.isfinite(leaf).all() for leaf in grads)


def test_masked_tokens_are_silent_whatever_they_hold():
    bad = jnp.asarray(MASK == 0)
    old = jnp.where(bad, jnp.inf, jnp.asarray(OLD, jnp.float32))
    hidden = jnp.where(bad[..., None], jnp.nan, X)
    value, grads = jax.value_and_grad(partial(policy, old=old, **ALL), argnums=(0, 1))(hidden, W)
    loss, expected = reference(HIDDEN, HEAD, **ALL)
    np.testing.assert_allclose(value, loss, rtol=2e-5)
    for actual, wanted in zip(grads, expected, strict=True):
        close(actual, wanted)
    nothing = jax.value_and_grad(partial(policy, mask=np.zeros((B, T))), argnums=(0, 1))(hidden, W)
    assert all(not leaf.any() for leaf in jax.tree.leaves(nothing))
    # By ignore_index as by the mask; an id that does not exist makes a NaN.
    by_id = jnp.where(bad, -100, IDS)
    adv, old = f32(ADVANTAGES, OLD)
    for normalize in ("tokens", "sequences"):
        kwargs: dict[str, Any] = {"old_logprobs": old, "normalize": normalize}
        expected = tiled_policy_loss(X, W, IDS, adv, mask=jnp.asarray(MASK), **kwargs)
        np.testing.assert_allclose(tiled_policy_loss(X, W, by_id, adv, **kwargs), expected, rtol=1e-5)
    assert jnp.isnan(tiled_policy_loss(X, W, IDS.at[0, 0].set(V), adv))


def test_dpo():
    hidden, ids, mask = (np.asarray(a).reshape(2, 2, T, *a.shape[2:]) for a in (HIDDEN, TARGETS, np.ones((B, T))))
    mask[0, 1, 6:] = 0
    ref = np.random.default_rng(5).normal(size=(2, 2)) - 60

    def expected(hidden, head, beta=0.1):
        sums = (logprobs(hidden, head, ids) * mask).sum(-1)
        delta = beta * ((sums[0] - ref[0]) - (sums[1] - ref[1]))
        return np.log1p(np.exp(-delta)).mean()

    args = f32(hidden, HEAD)
    kwargs: dict[str, Any] = {"mask": jnp.asarray(mask), "num_tiles": 3}

    def fn(x, w):
        return tiled_dpo_loss(x, w, jnp.asarray(ids), jnp.asarray(ref, jnp.float32), **kwargs)

    value, grads = jax.value_and_grad(fn, argnums=(0, 1))(*args)
    np.testing.assert_allclose(value, expected(hidden, HEAD), rtol=1e-4)
    for i, grad in enumerate(grads):
        way, step = np.random.default_rng(i).normal(size=grad.shape), 1e-5
        ends = [expected(*(p + t * way if j == i else p for j, p in enumerate((hidden, HEAD)))) for t in (step, -step)]
        np.testing.assert_allclose((np.asarray(grad) * way).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-3)
    kwargs["beta"] = 0.3
    np.testing.assert_allclose(fn(*args), expected(hidden, HEAD, 0.3), rtol=1e-4)
    flops = matmul_flops(jax.make_jaxpr(jax.grad(fn, argnums=(0, 1)))(*args).jaxpr)
    assert flops == 4 * 2 * N * D * V


ADV = jnp.ones((B, T))
BAD: list[tuple[Any, dict[str, Any], str]] = [
    (PolicyObjective, {"kind": "ppo"}, "kind='ppo': expected one of 'clip', 'importance', 'reinforce'"),
    (PolicyObjective, {"clip_low": 1.5}, "clip_low=1.5: expected a finite number of at least 0 and at most 1"),
    (PolicyObjective, {"clip_high": -0.1}, "clip_high=-0.1: expected a finite number of at least 0"),
    (PolicyObjective, {"kl_weight": -1}, "kl_weight=-1: expected a finite number of at least 0"),
    (PolicyObjective, {"entropy_weight": np.nan}, "entropy_weight=nan: expected a finite number"),
    (tiled_policy_loss, {"objective": "clip"}, "objective='clip': expected a llamem.PolicyObjective, such as"),
    (
        tiled_policy_loss,
        {"objective": PolicyObjective(kl_weight=0.1)},
        "ref_logprobs and kl_weight belong together, got kl_weight=0.1 and no ref",
    ),
    (
        tiled_policy_loss,
        {"objective": PolicyObjective("reinforce"), "old_logprobs": ADV},
        "has no use for old_logprobs",
    ),
    (tiled_policy_loss, {"advantages": jnp.ones(3)}, r"advantages must be one for each target \(4, 13\), or one for"),
    (tiled_policy_loss, {"old_logprobs": ADV[0]}, r"old_logprobs must have hidden's batch shape \(4, 13\), got"),
    (tiled_token_loss, {"fn": lambda a, b, c: jnp.ones(2)}, "fn must return one real number for one token"),
    (tiled_token_loss, {"extras": jnp.ones(5)}, r"Each array of extras must begin with.*\(4, 13\), got \(5,\)"),
    (tiled_dpo_loss, {}, r"targets must be \[2, ..., T\].*got shape \(4, 13\)"),
    (group_advantages, {"rewards": jnp.ones((3, 1))}, "G of at least 2 answers"),
]


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(("fn", "changes", "message"), BAD, ids=[f"{i}-{'-'.join(b[1])}" for i, b in enumerate(BAD)])
def test_bad_input_is_named(fn, changes, message):
    given: dict[str, Any] = {"hidden": X, "head": W, "targets": IDS}
    given |= {tiled_policy_loss: {"advantages": ADV}, tiled_dpo_loss: {"ref_logprobs": jnp.ones(4)}}.get(fn, {})
    given |= {"fn": lambda logp, entropy, extras: -logp} if fn is tiled_token_loss else {}
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}"):
        fn(**(changes if fn in (group_advantages, PolicyObjective) else given | changes))


def test_what_a_policy_loss_is_given_is_data():
    """No gradient reaches advantages, masks or the policy that drew, also where it is the one that is trained."""
    for name, given in (("adv", ADVANTAGES), ("old", OLD), ("mask", MASK)):
        assert not jax.grad(lambda value, name=name: policy(X, W, **{name: value}))(jnp.asarray(given, "f4")).any()

    def fn(w, stop):
        old = tiled_logprobs(X, w, IDS, num_tiles=3)
        return policy(X, w, old=jax.lax.stop_gradient(old) if stop else old)

    np.testing.assert_array_equal(jax.grad(fn)(W, False), jax.grad(fn)(W, True))


def grpo(hidden, head, targets, advantages, old, ref, mask):
    return tiled_policy_loss(
        hidden, head, targets, advantages, old_logprobs=old, ref_logprobs=ref, mask=mask,
        objective=PolicyObjective(kl_weight=0.04), normalize="sequences",
    )  # fmt: skip


@not_of_old_compilers
@pytest.mark.slow
@pytest.mark.tpu_compile
def test_grpo_compiled_for_a_v6e():
    """Llama 3 8B's head, 8,192 tokens, bfloat16: operands and gradients are 2.082 GiB; 4 products or 2."""
    report = compile_report(jax.value_and_grad(grpo, argnums=(0, 1)), *LLAMA_8B, chip="v6e-1")
    unit = 2 * 8192 * 4096 * 128_256
    assert report.peak_bytes <= 2.25 * 2**30
    assert report.matmul_flops == report.compiled_matmul_flops == 4 * unit
    frozen = compile_report(jax.value_and_grad(grpo), *LLAMA_8B, chip="v6e-1")
    assert frozen.compiled_matmul_flops == 2 * unit and frozen.peak_bytes <= 1.25 * 2**30
