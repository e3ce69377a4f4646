"""Broken programs are caught, each by the proof that names its cause; correct ones of many styles are not."""

import jax
import pytest
from gallery import GALLERY
from gallery_quiet import QUIET, small_and_undone
from programs import KEYS, WEIGHTS, L, Row, X, by_policy
from styles import MESH, STYLES, fixed_projection, names_of_each_layer
from unseen_broken import BROKEN
from unseen_sound import SOUND

from llamem import assert_remat, verify_remat
from llamem.verify import gradients_are_the_same, layer_runs_again, options_are_sound, randomness_is_fresh

NEWER_CPU = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)


def examined(row: Row):
    params, batch = WEIGHTS if row.params is None else row.params, X if row.batch is None else row.batch
    options = {"evaluate": row.evaluate, "proofs": [row.proof]}
    return verify_remat(row.loss, params, batch, remat=True, baseline=False, **options)


@pytest.mark.parametrize("name", GALLERY | QUIET)
def test_every_failure_is_caught_and_its_cause_named(name):
    if name == "the compiler undid it" and NEWER_CPU:
        pytest.skip("this JAX keeps its barriers on CPUs")
    row = (GALLERY | QUIET)[name]
    verification = examined(row)
    assert not verification.holds, verification
    assert any(row.cause in f"{proof.seen} {proof.cause}" for proof in verification.failed), verification
    assert "FAILED" in str(verification) and "FAILED" in verification._repr_html_()


def test_what_is_too_small_to_judge_is_said():
    scales = jax.random.normal(KEYS[0], (L, 1))
    verification = verify_remat(small_and_undone, scales, X[:32], remat=True, baseline=False)
    seen = {proof.name: (proof.holds, str(proof)) for proof in verification.proofs}
    for name, reason in [("memory falls", "below 1 MiB"), ("the compiler leaves them", "only those are counted")]:
        assert seen[name][0] is None and "not proved" in seen[name][1] and reason in seen[name][1], verification


@pytest.mark.parametrize("name", STYLES)
def test_correct_programs_raise_no_alarm(name):
    loss, params, batch, how, options = STYLES[name]
    verification = verify_remat(loss, params, batch, remat=how, baseline=None, **options)
    assert verification.holds, verification
    waived = [proof for proof in verification.proofs if proof.waived]
    assert [proof.name for proof in waived] == list(options.get("waive", {})), verification


@pytest.mark.parametrize("name", BROKEN)
def test_failures_not_met_before_are_caught(name):
    loss, proof, params, batch = BROKEN[name]
    assert not verify_remat(loss, params, batch, remat=True, baseline=False, proofs=[proof]).holds


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_correct_programs_not_met_before_raise_no_alarm(name):
    assert_remat(*SOUND[name], remat=True, baseline=False)


def test_names_of_single_layers_are_found():
    """Unrolled on a CPU the compiler undoes it, so that the policy alone is judged."""
    proofs = [options_are_sound, layer_runs_again, gradients_are_the_same]
    assert_remat(names_of_each_layer, WEIGHTS, X, remat=True, baseline=False, proofs=proofs)


def test_waivers_are_shown_and_checked():
    both = {"remat": True, "baseline": False, "proofs": [randomness_is_fresh]}
    reason = "random features are fixed"
    waived = verify_remat(fixed_projection, WEIGHTS, X, waive={"random numbers are fresh": reason}, **both)
    assert waived.holds and f"waived: {reason}" in str(waived) and reason in waived._repr_html_()
    assert not verify_remat(fixed_projection, WEIGHTS, X, **both).holds
    needless = verify_remat(by_policy(None), WEIGHTS, X, waive={"random numbers are fresh": reason}, **both)
    assert needless.holds and "nothing failed" in str(needless)
    for name, why, complaint in [("random numbers", reason, "no such proof"), ("memory falls", " ", "the reason")]:
        with pytest.raises(ValueError, match=complaint):
            assert_remat(by_policy(None), WEIGHTS, X, waive={name: why}, **both)


def test_what_is_not_seen_is_not_called_proved():
    """Draws under shard_map, and in a branch that this batch does not take."""
    spec = jax.sharding.PartitionSpec()

    def hidden(w, batch, how):
        def draw(key, x):
            return x + jax.random.normal(key, x.shape)

        data = jax.random.key_data(batch["key"])
        mapped = jax.shard_map(
            lambda data, x: draw(jax.random.wrap_key_data(data), x), mesh=MESH, in_specs=(spec, spec), out_specs=spec
        )
        return by_policy(None)(w, mapped(data, batch["x"]), how)

    def skipped(w, batch, how):
        x = batch["x"]
        drawn = jax.lax.cond(x[0, 0] > 1e3, lambda: jax.random.normal(batch["key"], x.shape), lambda: 0 * x)
        return by_policy(None)(w, x + drawn, how)

    for loss, reason in [(hidden, "inside a shard_map"), (skipped, "did not run")]:
        (proof,) = verify_remat(
            loss, WEIGHTS, {"x": X, "key": KEYS[1]}, remat=True, baseline=False, proofs=[randomness_is_fresh]
        ).proofs
        assert proof.holds is None and reason in proof.seen, proof
