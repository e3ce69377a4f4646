"""Broken programs are caught, each by the proof that names its cause; correct ones of many styles are not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from broken import BROKEN
from flax import errors, linen
from jax.ad_checkpoint import checkpoint_name
from programs import (
    KEYS,
    POLICIES,
    WEIGHTS,
    Block,
    D,
    L,
    N,
    X,
    by_policy,
    half,
    layer,
    normal,
    offloaded,
    proved,
    unrolled,
)
from sound import SOUND, a_fixed_random_projection

from jaxmem import Title, assert_remat, verify_remat
from jaxmem.verify.proofs import PROOFS
from llamem import stack_layers, unstack_layers

NEWER_CPU = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)
SOME = ["two dropouts and dropped layers", "a scaled loss in float16", "raw keys", "linen's transforms", "nested"]
SOME += ["gates of zeros", "adapters of a frozen base"]
SOME += ["a remainder folded into the steps key", "a key closed over and the step"]
SOME += ["convolutions with batch normalisation", "transforms of nnx", "branches", "bfloat16", "a jittered router"]


def test_failures_are_caught_and_their_causes_named():
    missed = {}
    for name, one in BROKEN.items():
        proof = proved(one.title, one.loss, one.params, one.batch, True, False, **one.options)
        undone = NEWER_CPU and one.title == Title.COMPILER  # newer compilers for CPUs leave them
        if not undone and not (proof.failed and one.cause in str(proof)):
            missed[name] = str(proof)
    assert not missed


def alarms(names):
    """Of these correct programs those that fail, and how; nothing else may be unproved but what is known."""
    found, known = {}, ("only those are counted", "numbers of 16 bits")
    for name in names:
        one = SOUND[name]
        proofs = verify_remat(one.loss, one.params, one.batch, remat=one.how, baseline=False, **one.options).proofs
        unproved = [proof for proof in proofs if not proof.holds and not proof.skipped]
        if odd := [str(proof) for proof in unproved if not any(words in proof.seen for words in known)]:
            found[name] = odd
    return found


@pytest.mark.slow
def test_correct_programs_raise_no_alarm():
    assert not alarms(SOME)


@pytest.mark.weekly
def test_no_correct_program_raises_an_alarm():
    assert not alarms(name for name in SOUND if name not in SOME)


def test_what_is_too_small_to_judge_is_said():
    def small_and_undone(w, x, how):
        def body(scale, x):
            return jnp.sin(jnp.tanh(x * scale))

        return unrolled(jax.checkpoint(body) if how else body, w, x)

    scales = jax.random.normal(KEYS[0], (L, 1))
    verification = verify_remat(small_and_undone, scales, X[:32], remat=True, baseline=False)
    seen = {proof.name: proof for proof in verification.proofs}
    for name, reason in [("memory falls", "below 1 MiB"), ("the compiler leaves them", "only those are counted")]:
        assert seen[name].holds is None and not seen[name].failed, verification
        assert "not proved" in str(seen[name]) and reason in seen[name].seen, verification


def test_what_the_compiler_left_is_told_only_where_the_ways_differ_by_checkpoints():
    """A stopped gradient spares the products that a checkpoint adds; other work hides that both were merged."""

    def stopped(w, x, how):
        return by_policy(None)(w | {"down": jax.lax.stop_gradient(w["down"])} if how else w, x, how)

    def merged_beside_other_work(w, x, how):
        other = jnp.mean((x.T @ x) @ (x.T @ jnp.tanh(x)) + x.T @ (x @ x.T @ x)) if how else 0.0
        return unrolled(jax.checkpoint(layer) if how else layer, w, x) + 1e-9 * other

    for loss in (stopped, merged_beside_other_work):
        proof = proved(Title.COMPILER, loss, WEIGHTS, X, True, False)
        assert proof.holds is None and "cannot tell: 25,165,824 FLOPs are computed again" in proof.seen, proof
    assert proved(Title.COMPILER, by_policy(None), WEIGHTS, X, True, False).holds


def test_names_of_single_layers_are_found():
    """One policy for layers that each give a name of their own."""
    policy = POLICIES.save_only_these_names("h0", "h2", "h4")

    def loss(w, x, how):
        def named(i):
            def body(w, x):
                return x + jnp.sin(jnp.tanh(checkpoint_name(x @ w["up"], f"h{i}"))) @ w["down"]

            return jax.checkpoint(body, policy=policy) if how else body

        return unrolled([named(i) for i in range(L)], w, x)

    assert proved(Title.OPTIONS, loss, WEIGHTS, X, True, False).holds


def test_what_is_skipped_is_shown_and_checked():
    fresh = "random numbers are fresh"
    others = set(PROOFS) - {fresh}
    skipped = verify_remat(a_fixed_random_projection, WEIGHTS, X, skip=list(PROOFS))
    assert skipped.holds and {proof.mark for proof in skipped.proofs} == {"skipped"}
    assert f"skipped    {fresh}" in str(skipped) and "skipped" in skipped._repr_html_()
    assert not verify_remat(a_fixed_random_projection, WEIGHTS, X, skip=others).holds
    assert_remat(by_policy(None), WEIGHTS, X, remat=True, baseline=False, skip=others)
    for wrong in (["random numbers"], fresh):
        with pytest.raises(ValueError, match="Known: checkpoints reach the program; "):
            assert_remat(by_policy(None), WEIGHTS, X, skip=wrong)


@pytest.mark.quick
def test_draws_are_followed_into_branches_and_shards():
    """What a run of the program would not see: a branch that this batch does not take, and a shard_map."""
    spec = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def drawn(key, x):
        return x + jax.random.normal(key, x.shape)

    def loss(keys, x):
        x = jax.shard_map(drawn, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)(keys[0], x)
        return by_policy(None)(
            WEIGHTS, jax.lax.cond(x[0, 0] > 1e3, lambda: drawn(keys[1], x), lambda: drawn(keys[2], x)), 1
        )

    for keys, right in [((0, 1, 2), True), ((0, 1, 1), True), ((0, 0, 1), False)]:
        proof = proved(Title.RANDOMNESS, lambda w, k, how, keys=keys: loss([k[i] for i in keys], X), WEIGHTS, KEYS)
        assert proof.holds == right, (keys, proof)


@pytest.mark.quick
def test_a_small_difference_is_seen_or_said_to_be_unseen():
    """16 bits are compared in float32; where the program itself casts, the answer says what it could not see."""

    def loss(w, x, how):
        w = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), w)
        return by_policy(None)(w, x.astype(jnp.bfloat16), how)

    proof = proved(Title.GRADIENTS, loss, WEIGHTS, X, True, False)
    assert "below 2e-02 of it is not seen in bfloat16" in proof.seen
    assert "in float32, too" in proved(Title.LOSS, by_policy(None), half(WEIGHTS), half(X), True, False).seen


def test_a_gradient_that_is_zero_in_truth_is_told_apart():
    def loss(w, x, remat):
        def body(w, x):
            return jax.nn.softmax(x @ w["k"] + w["shift"])  # which shifts all alike

        x = x[::-1] if remat else x  # adds up in another order
        return jnp.mean(jnp.sin(7 * (jax.checkpoint(body) if remat else body)(w, x)) ** 2)

    weights = {"k": WEIGHTS["up"][0], "shift": jnp.float32(0.3)}
    proof = proved(Title.GRADIENTS, loss, weights, X, True, None)
    largest = float(proof.seen.split()[2])
    assert proof.holds and 0 < largest < 1e-5 and "2 arrays, 1 nothing but rounding in both" in proof.seen, proof


def test_gradients_that_stay_zero_prove_nothing():
    """A unit that no batch of these reaches has no gradient, with whatever parameters."""

    def loss(w, x, how):
        return by_policy(None)(w["layers"], x, how) + jnp.sum(jax.nn.relu(x[0, 0] ** 2 * 0 - 1) * w["idle"])

    params = {"layers": WEIGHTS, "idle": jnp.ones(D)}
    verification = verify_remat(loss, params, X, remat=True, baseline=False)
    proof = next(proof for proof in verification.proofs if proof.name == Title.GRADIENTS)
    assert proof.holds is None and "nothing to compare at ['idle']: zero in both" in proof.seen, proof
    assert not verification.holds


@pytest.mark.quick
def test_a_result_without_a_name_is_called_something():
    def loss(w, x, how):
        return by_policy(None)(w, x, how), X * (2 if how else 1)

    proof = proved(Title.RESULTS, loss, WEIGHTS, X, True, False)
    assert "different: the only array" in proof.seen, proof


def test_layers_and_experts_copied_on_purpose_are_not_judged():
    """A deeper model made of two of each layer, stacked or in a list, and experts made of one."""
    pairs = jax.tree.map(lambda leaf: jnp.repeat(leaf[: L // 2], 2, axis=0), WEIGHTS)
    experts = {"layers": WEIGHTS, "experts": jnp.tile(normal(5, D, D), (4, 1, 1))}

    def with_experts(w, x, how):
        return by_policy(None)(w["layers"], jnp.mean(jnp.tanh(jnp.einsum("nd,edf->enf", x, w["experts"])), axis=0), how)

    def of_a_list(w, x, how):
        return by_policy(None)(stack_layers(w), x, how)

    cases = (by_policy(None), pairs), (of_a_list, unstack_layers(pairs)), (with_experts, experts)
    for loss, params in cases:
        proof = proved(Title.PARAMETERS, loss, params, X, True, False)
        assert proof.holds is None and "cannot tell: some rows are identical in" in proof.seen, proof


def test_noise_that_may_be_meant_is_told_by_its_line():
    """One key for all frames: which draw, of two of one shape, and how to say that it is meant."""

    def drawn(key, x):
        return x + jax.random.normal(key, x.shape)

    def noised(key, x):
        return jax.vmap(drawn, in_axes=(None, 0))(key, x.reshape(8, N // 8, D)).reshape(N, D)

    def loss(w, keys, how):
        own = jax.vmap(drawn)(jax.random.split(keys[0], 8), X.reshape(8, N // 8, D)).reshape(N, D)
        return by_policy(None)(w, noised(keys[1], own), how)

    proof = proved(Title.RANDOMNESS, loss, WEIGHTS, KEYS[:2], True, False)
    line = drawn.__code__.co_firstlineno + 1
    assert proof.failed and f"shape [64, 32] (test_gallery.py:{line}) are copies along an axis" in proof.seen, proof
    assert 'skip=["random numbers are fresh"]' in proof.cause, proof


def test_a_policy_that_offloads_nothing_is_not_judged_by_a_cpu():
    """Here it names what leaves the layer, which the layer's own backward pass does not need."""

    def named_last(w, x):
        return checkpoint_name(x + jnp.sin(jnp.tanh(x @ w["up"])) @ w["down"], "h")

    proof = proved(Title.OFFLOAD, by_policy(offloaded("pinned_host"), named_last), WEIGHTS, X, True, False)
    assert proof.holds is None and "0 bytes offloaded, 0 on the host of local: cannot tell" in proof.seen, proof


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), WEIGHTS), "hold shapes"),
        (
            jax.tree.map(lambda leaf: leaf.astype(jnp.int8), WEIGHTS),
            r"params of int8\): expected floating-point arrays",
        ),
    ],
)
def test_parameters_without_a_gradient_are_refused(params, message, as_a_user):
    with pytest.raises(ValueError, match=message):
        verify_remat(by_policy(None), params, X)


def test_linens_renamed_parameters_are_explained():
    def loss(params, x, remat):
        block = linen.remat(Block, prevent_cse=False) if remat else Block
        stack = linen.scan(block, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=2)

        class Model(linen.Module):
            @linen.compact
            def __call__(self, x):
                return stack()(x, None)[0]

        keys = {"params": KEYS[0], "dropout": KEYS[1]}
        if not params:
            return Model().init(keys, x)
        y: Any = Model().apply(params, x, rngs=keys)
        return jnp.mean(y**2)

    with pytest.raises(errors.FlaxError) as raised:
        verify_remat(loss, loss(None, X, None), X, remat=True)
    assert 'name="blocks"' in " ".join(raised.value.__notes__)


def test_a_plain_program_that_does_not_repeat_itself_proves_nothing():
    generator = np.random.default_rng(0)

    def noisy(w, x, how):
        drawn = jax.pure_callback(lambda: generator.normal(size=(N, D)).astype(np.float32), jax.typeof(x))
        wrong = 1.02 if how else 1.0
        return wrong * by_policy(None)(w, x + drawn, how)

    for title in (Title.LOSS, Title.GRADIENTS):
        proof = proved(title, noisy, WEIGHTS, X, True, False)
        assert proof.holds is None and "other numbers" in proof.seen, proof
