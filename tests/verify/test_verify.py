import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from children import printed_by
from flax import nnx
from models import SMALL, VARIANTS, model_of, tokens_of
from programs import NOISY, NOISY_CASE, WEIGHTS, D, L, N, X, by_policy, in_mode, layer, offloaded, proved
from sound import SOUND, donated_buffers, through

import jaxmem
import llamem
from jaxmem import Title, assert_remat, verify_remat
from jaxmem.verify.both_ways import BothWays
from jaxmem.verify.checkpoints import find_checkpoints, work_again
from jaxmem.verify.proofs import PROOFS
from llamem.runs import loss_fn


def model_config(name):
    return VARIANTS[name].replace(n_layers=4, max_seq_len=128)


def model_case(name, mode):
    config = model_config(name)
    model = model_of(config, mode=mode)

    def loss(params, tokens_BT, remat):
        own = nnx.merge(nnx.graphdef(model), params)
        own.plan = own.plan.replace(remat=remat, loss_tiles=2)
        graphdef, params = nnx.split(own)
        return loss_fn(graphdef, params, tokens_BT[:, :-1], tokens_BT[:, 1:])

    return loss, nnx.state(model), tokens_of(config, T=97)


def experts_case():
    """A layer whose tokens choose one of four experts."""

    def with_experts(w, x):
        chosen = jax.lax.top_k(x[:, :4], 1)[1]
        return layer(w, x * (1.0 + chosen))

    def loss(w, x, remat):
        return jnp.mean(llamem.apply_stack(with_experts, w, x, remat=remat) ** 2)

    return loss, WEIGHTS, X


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "tied"])
def test_models_and_experts_are_proved(name):
    verification = verify_remat(*(experts_case() if name == "experts" else model_case(name, "nested")))
    assert verification.holds, verification
    chosen = [proof for proof in verification.proofs if "chooses the same" in proof.name]
    assert len(chosen) == (name == "experts"), "experts are compared where there are some"


@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", ["layer", pytest.param("qwen3", marks=pytest.mark.weekly)])
def test_on_a_chip_that_is_not_there_unrolled_layers_are_proved(name):
    if not jaxmem.available("a100-40"):
        pytest.skip("no compiler for a100-40 here")
    if name == "layer":
        assert_remat(in_mode("unroll"), WEIGHTS, jnp.tile(X, (16, 1)), chip="a100-40")
    else:
        assert_remat(*model_case(name, "unroll"), chip="a100-40")


@pytest.mark.tpu_compile
def test_toys_are_not_judged_by_a_chip_whose_on_chip_memory_holds_them():
    if not jaxmem.available("v5e-1"):
        pytest.skip("no compiler for v5e-1 here")
    proof = proved(Title.MEMORY, in_mode("unroll"), WEIGHTS, jnp.tile(X, (2, 1)), chip="v5e-1")
    assert proof.holds is not False, proof


@pytest.mark.tpu_compile
@pytest.mark.parametrize("place", ["pinned_host", "unpinned_host"])
def test_offloaded_bytes_arrive_or_are_missed(place):
    if not jaxmem.available("v5e-1"):
        pytest.skip("no compiler for v5e-1 here")
    case = by_policy(offloaded(place)), WEIGHTS, jnp.tile(X, (16, 1)), True, False
    proof = proved(Title.OFFLOAD, *case, chip="v5e-1")
    assert proof.holds == (place == "pinned_host"), proof
    asked = L * 16 * N * 4 * D * 4 if proof.holds else 0
    assert f"{asked:,} bytes offloaded" in proof.seen, proof


@pytest.mark.slow
@pytest.mark.parametrize("which", ["layers", pytest.param("models", marks=pytest.mark.weekly)])
def test_on_eight_devices(which):
    printed_by(Path(__file__).parent / "mesh_verify.py", which)


@pytest.mark.quick
def test_what_runs_again_is_counted():
    proof = proved(Title.RUNS, in_mode("scan"), WEIGHTS, X)
    assert proof.holds and proof.seen.startswith(f"{L} products and {L * N * 4 * D * 4:,} values of other operations")
    assert proved(Title.MEMORY, in_mode("scan"), WEIGHTS, X, None).failed, "nothing is saved where nothing runs again"


@pytest.mark.parametrize("name", ["scan", "dropout", "plain jax, named"])
def test_jax_remat3_is_understood(remat3, name):
    one = SOUND[name]
    both = BothWays(one.loss, one.params, one.batch, True, False)
    products, _ = work_again(both.rematerialised.gradient.jaxpr)
    assert products == (0 if "named" in name else L)
    assert sum(one.times for one in find_checkpoints(both.rematerialised.traced.jaxpr)) == L
    assert_remat(one.loss, one.params, one.batch, remat=True, baseline=False)


def test_buffers_outlive_the_proof():
    assert proved(Title.GRADIENTS, donated_buffers, WEIGHTS, X, True, False).holds
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((WEIGHTS, X)))


@pytest.mark.quick
def test_donated_arguments_are_given_up():
    """By a step that returns them all; not by one that returns another type, or that was lowered without donating."""

    def step(dtype, w, x):
        value, slope = jax.value_and_grad(lambda w: in_mode("scan")(w, x, "nothing"))(w)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(dtype), w, slope), value

    with warnings.catch_warnings():  # JAX warns of the second, old ones while they lower it
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        lowered = {
            dtype: jax.jit(partial(step, dtype), donate_argnums=(0,)).lower(WEIGHTS, X)
            for dtype in ("float32", "bfloat16")
        }
    right = proved(Title.DONATION, in_mode("scan"), WEIGHTS, X, step=lowered["float32"])
    assert right.holds and right.seen == "2 of 2 arrays", right
    wrong = proved(Title.DONATION, in_mode("scan"), WEIGHTS, X, step=lowered["bfloat16"])
    assert wrong.failed and "0 of 2" in wrong.seen and f"float32[{L}, {4 * D}, {D}]" in wrong.cause, wrong
    without = proved(
        Title.DONATION, in_mode("scan"), WEIGHTS, X, step=jax.jit(partial(step, "float32")).lower(WEIGHTS, X)
    )
    assert without.failed and "without donate_argnums" in without.cause, without


def test_a_step_that_was_not_lowered_is_refused(as_a_user):
    with pytest.raises(ValueError, match=r"step=.*expected jax\.jit\(step, donate_argnums=\(0,\)\)\.lower"):
        verify_remat(in_mode("scan"), WEIGHTS, X, step=jax.jit(in_mode("scan")))  # pyrefly: ignore[bad-argument-type]


def test_decoding_with_a_cache_is_untouched():
    loss, params, tokens_BT = model_case("qwen3", "scan")
    graphdef = nnx.graphdef(model_of(model_config("qwen3")))

    def evaluate(params, tokens_BT, remat):
        own = nnx.merge(graphdef, params)
        own.plan = own.plan.replace(remat=remat, loss_tiles=2)  # still in training mode: decoding must not care
        return own.decode(tokens_BT, own.empty_cache(len(tokens_BT), 128))

    assert proved(Title.CHECKPOINTS, loss, params, tokens_BT).holds
    assert proved(Title.EVALUATION, loss, params, tokens_BT, evaluate=evaluate).holds


def test_a_cache_that_differs_is_noticed():
    def evaluate(w, x, remat):
        return {"cache": x[:8] + (1e-6 if remat else 0.0), "length": 8}

    assert proved(Title.EVALUATION, in_mode("scan"), WEIGHTS, X, evaluate=evaluate).failed


@pytest.mark.quick
def test_evaluation_is_told_from_training():
    """A model in eval mode checkpoints nothing, and the report says so."""
    model = model_of(SMALL)
    model.eval()

    def loss(params, tokens, remat):
        own = nnx.merge(nnx.graphdef(model), params)
        own.plan = own.plan.replace(remat=remat, loss_tiles=2)
        return jnp.mean(own(tokens) ** 2)

    proof = proved(Title.CHECKPOINTS, loss, nnx.state(model), tokens_of(SMALL))
    assert proof.failed and "eval mode" in proof.cause
    for title in (Title.RUNS, Title.MEMORY):
        assert proved(title, loss, nnx.state(model), tokens_of(SMALL)).cause == "No checkpoint reaches the program."


def test_an_error_without_a_message_is_a_failed_proof():
    def loss(w, x, remat):
        if remat:
            raise ValueError
        return in_mode("scan")(w, x, None)

    (proof,) = verify_remat(loss, WEIGHTS, X).proofs
    assert (proof.name, proof.holds, proof.seen) == ("it can be traced", False, "ValueError")


def test_what_the_plain_program_raises_is_raised():
    """It traces, and does not compile: no failure of the rematerialised one, which does."""

    def loss(w, x, remat):
        value = in_mode("scan")(w, x, remat)
        return value if remat else value + jax.ffi.ffi_call("no_such_function", jax.ShapeDtypeStruct((), X.dtype))()

    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_function"):
        proved(Title.LOSS, loss, WEIGHTS, X)


def test_nnx_objects_are_taken_from_arguments_and_refused_from_outside():
    """BatchNorm's statistics and Dropout's counts, merged as they came; and a module that the loss closes over."""

    def loss(w, batch, remat):
        return through(nnx.merge(NOISY, w, batch["state"]), batch["x"], remat)

    weights, batch = NOISY_CASE
    outside = nnx.merge(NOISY, weights, batch["state"])

    def closing_over(w, batch, remat):
        nnx.update(outside, w)
        return through(outside, batch["x"], remat)

    assert_remat(loss, weights, batch, remat=True)
    with pytest.raises(ValueError, match=r"made outside of it.*nnx\.split"):
        verify_remat(closing_over, weights, batch)


def test_layers_left_out_are_counted_where_most_are_covered():
    def loss(w, x, remat):
        first_two = jax.tree.map(lambda leaf: leaf[:2], w)
        return in_mode("scan")(w, x, remat) + in_mode("scan")(first_two, x, None)

    proof = proved(Title.CHECKPOINTS, loss, WEIGHTS, X)
    assert proof.holds and f"{L} layers are under one, and 2 with the same products are not" in proof.seen


def test_a_loss_that_is_not_finite_is_no_passed_test():
    alone = set(PROOFS) - {Title.LOSS, Title.GRADIENTS}
    infinite = jnp.full_like(X, jnp.inf)
    answer = verify_remat(in_mode("scan"), WEIGHTS, infinite, skip=alone)
    assert not answer.holds and not answer.failed
    with pytest.raises(AssertionError, match=r"(?s)not proved the loss is the same.*not proved every gradient"):
        assert_remat(in_mode("scan"), WEIGHTS, infinite, skip=alone)
