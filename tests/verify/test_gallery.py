"""Broken programs are caught, each by the proof that names its cause; correct ones of many styles are not."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from attacked import BROKEN as ATTACKED
from attacked import RIGHT
from correct import CORRECT
from flax import errors, linen
from gallery import GALLERY
from gallery_quiet import QUIET, small_and_undone
from programs import KEYS, WEIGHTS, L, X, by_policy, half, proved
from styles import STYLES, Block, fixed_projection, names_of_each_layer
from unseen_broken import BROKEN
from unseen_sound import SOUND

from llamem import assert_remat, verify_remat
from llamem.verify import Title
from llamem.verify.proofs import PROOFS

NEWER_CPU = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)
CHEAP = {Title.OPTIONS, Title.RUNS, Title.CHOICES, Title.CHECKPOINTS, Title.RANDOMNESS, Title.PARAMETERS}
CAUGHT = {
    name: (row.loss, WEIGHTS if row.params is None else row.params, X if row.batch is None else row.batch, row.proof)
    for name, row in (GALLERY | QUIET).items()
}
CAUGHT |= {name: (loss, params, batch, proof) for name, (loss, proof, params, batch) in BROKEN.items()} | ATTACKED
SOME_CAUGHT = [*GALLERY, "one expert lost", "one layer 20 % off in bfloat16", "a tiny row lost", "counted twice"]
SOME_CAUGHT += ["only the norms", "activations handed out", "a history in the carry", "around the encoder"]
SOME_CAUGHT += ["z-loss lost, in bfloat16", "a cast inside", "averages twice"]
CLEAN = {name: (*case, True, {}) for name, case in (SOUND | RIGHT).items()} | STYLES
CLEAN |= {name: (*case, {}) for name, case in CORRECT.items()}
SOME_CLEAN = ["two dropouts", "float16, scaled", "raw keys", "convolutions, batch normalisation", "linen's transforms"]
SOME_CLEAN += ["nested", "nnx's own transforms", "branches", "bfloat16", "a jittered router, top 1", "shard_map inside"]


def missed(names):
    """Of these broken programs those that the proof meant for them lets pass, and what it says."""
    found = {}
    for name in names:
        loss, params, batch, title = CAUGHT[name]
        row = (GALLERY | QUIET).get(name)
        proof = proved(title, loss, params, batch, True, False, evaluate=row.evaluate if row else None)
        if not proof.failed or "FAILED" not in str(proof):
            found[name] = str(proof)
        elif row is not None and row.cause not in f"{proof.seen} {proof.cause}":
            found[name] = f"not named: {row.cause}. {proof}"
    return found


def alarms(names):
    """Of these correct programs those that fail, and how; nothing else may be unproved but what is known."""
    found = {}
    for name in names:
        loss, params, batch, how, options = cast(Any, CLEAN[name])
        verification = verify_remat(loss, params, batch, remat=how, baseline=None, **options)
        unproved = [proof for proof in verification.proofs if not proof.holds and not proof.skipped]
        known = ("only those are counted", "numbers of 16 bits")
        if odd := [str(proof) for proof in unproved if not any(words in proof.seen for words in known)]:
            found[name] = odd
    return found


def test_failures_are_caught_and_their_causes_named():
    names = [name for name, case in CAUGHT.items() if case[3] in CHEAP or name in SOME_CAUGHT]
    assert not missed(name for name in names if not (NEWER_CPU and name == "the compiler undid it"))


@pytest.mark.weekly
def test_all_failures_are_caught():
    names = [name for name, case in CAUGHT.items() if case[3] not in CHEAP and name not in SOME_CAUGHT]
    assert not missed(names)


@pytest.mark.slow
def test_correct_programs_raise_no_alarm():
    assert not alarms(SOME_CLEAN)


@pytest.mark.weekly
def test_no_correct_program_raises_an_alarm():
    assert not alarms(name for name in CLEAN if name not in SOME_CLEAN)


def test_what_is_too_small_to_judge_is_said():
    scales = jax.random.normal(KEYS[0], (L, 1))
    verification = verify_remat(small_and_undone, scales, X[:32], remat=True, baseline=False)
    seen = {proof.name: proof for proof in verification.proofs}
    for name, reason in [("memory falls", "below 1 MiB"), ("the compiler leaves them", "only those are counted")]:
        assert seen[name].holds is None and not seen[name].failed, verification
        assert "not proved" in str(seen[name]) and reason in seen[name].seen, verification


def test_names_of_single_layers_are_found():
    """Unrolled on a CPU the compiler undoes it, so that the policy alone is judged."""
    skip = {Title.COMPILER, Title.MEMORY, Title.LOSS}
    assert_remat(names_of_each_layer, WEIGHTS, X, remat=True, baseline=False, skip=skip)


def test_what_is_skipped_is_shown_and_checked():
    fresh = "random numbers are fresh"
    others = set(PROOFS) - {fresh}
    skipped = verify_remat(fixed_projection, WEIGHTS, X, skip=list(PROOFS))
    assert skipped.holds and {proof.mark for proof in skipped.proofs} == {"skipped"}
    assert f"skipped    {fresh}" in str(skipped) and "skipped" in skipped._repr_html_()
    assert not verify_remat(fixed_projection, WEIGHTS, X, skip=others).holds
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
