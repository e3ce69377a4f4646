import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from correct import CORRECT, donated, stack
from flax import nnx
from gallery import always_checkpointed
from models import MOE, SMALL, VARIANTS, model_of, tokens_of
from programs import WEIGHTS, D, L, N, X, by_policy, layer

import llamem
from llamem import assert_remat, verify_remat
from llamem.train import loss_fn
from llamem.verify import proofs
from llamem.verify.case import BothWays
from llamem.verify.runs import count_runs


@pytest.mark.parametrize("name", CORRECT)
def test_no_false_alarm(name):
    loss, params, batch, how = CORRECT[name]
    assert_remat(loss, params, batch, remat=how, baseline=None)


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
        assert_remat(stack("unroll"), WEIGHTS, jnp.tile(X, (16, 1)), chip="a100-40")
    else:
        assert_remat(*model_case(name, "unroll"), chip="a100-40")


@pytest.mark.tpu_compile
@pytest.mark.parametrize("place", ["pinned_host", "unpinned_host"])
def test_offloaded_bytes_arrive_or_are_missed(place):
    if not llamem.available("v5e-1"):
        pytest.skip("no compiler for v5e-1 here")
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst=place
    )
    case = by_policy(policy), WEIGHTS, jnp.tile(X, (16, 1))
    found = verify_remat(*case, remat=True, baseline=False, chip="v5e-1", proofs=[proofs.offloaded_bytes_arrive])
    (proof,) = found.proofs
    assert proof.holds == (place == "pinned_host"), proof
    asked = L * 16 * N * 4 * D * 4 if proof.holds else 0
    assert f"{asked:,} bytes offloaded" in proof.seen, proof


@pytest.mark.slow
@pytest.mark.parametrize("which", ["layers", pytest.param("models", marks=pytest.mark.weekly)])
def test_on_eight_devices(which):
    script = Path(__file__).parent / "mesh_verify.py"
    path = {"PYTHONPATH": ":".join([str(script.parent.parent), *sys.path])}
    done = subprocess.run([sys.executable, script, which], env={**os.environ, **path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_proofs_can_be_had_alone():
    both = BothWays(stack("scan"), WEIGHTS, X)
    proof = proofs.layer_runs_again(both)
    assert proof.holds and f"{L} runs of checkpointed functions, {L} again" in proof.seen
    assert "expected" not in vars(both), "nothing is computed that the proof does not need"
    alone = verify_remat(stack("scan"), WEIGHTS, X, remat=None, proofs=[proofs.memory_falls])
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
    assert_remat(loss, params, batch, remat=how, baseline=None)


def test_buffers_outlive_the_proof():
    assert_remat(donated, WEIGHTS, X, remat=True, proofs=[proofs.gradients_are_the_same])
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


def test_an_error_without_a_message_is_a_failed_proof():
    def loss(w, x, remat):
        if remat:
            raise ValueError
        return stack("scan")(w, x, None)

    (proof,) = verify_remat(loss, WEIGHTS, X).proofs
    assert (proof.name, proof.holds, proof.seen) == ("it can be traced", False, "ValueError")


def test_what_the_plain_program_raises_is_raised():
    """It traces, and does not compile: no failure of the rematerialised one, which does."""

    def loss(w, x, remat):
        value = stack("scan")(w, x, remat)
        return value if remat else value + jax.ffi.ffi_call("no_such_function", jax.ShapeDtypeStruct((), X.dtype))()

    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_function"):
        verify_remat(loss, WEIGHTS, X, proofs=[proofs.loss_is_the_same])


def test_layers_left_out_are_counted_where_most_are_covered():
    def loss(w, x, remat):
        first_two = jax.tree.map(lambda leaf: leaf[:2], w)
        return stack("scan")(w, x, remat) + stack("scan")(first_two, x, None)

    (proof,) = verify_remat(loss, WEIGHTS, X, proofs=[proofs.checkpoints_are_there]).proofs
    assert proof.holds and f"{L} layers are under one, and 2 with the same products are not" in proof.seen


def test_a_loss_that_is_not_finite_is_no_passed_test():
    alone = [proofs.loss_is_the_same, proofs.gradients_are_the_same]
    infinite = jnp.full_like(X, jnp.inf)
    assert verify_remat(stack("scan"), WEIGHTS, infinite, proofs=alone).holds
    with pytest.raises(AssertionError, match=r"(?s)not proved the loss is the same.*not proved every gradient"):
        assert_remat(stack("scan"), WEIGHTS, infinite, proofs=alone)
