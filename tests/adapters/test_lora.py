"""Adapters: against plain models in float64, against each other, and what the traced program holds."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from adapters import IDS, MIXED, adapters_of, expected_gradients, put_together
from flax import nnx
from models import SMALL as THREE_LAYERS
from models import in_float64, model_of, tokens_of
from norms import errors_by_name

import llamem
from jaxmem import matmul_flops
from jaxmem.tracing.jaxprs import equations
from llamem import TrainSettings
from llamem.adapters import IN_LAYERS, TARGET_MODULES
from llamem.adapters.lora_step import losses_and_grads
from llamem.runs import loss_fn
from llamem.runs.step_of_plan import place_of
from llamem.train.plain_step import summed_loss

# Without their types: some of what is passed is wrong on purpose.
Adapters: Any = llamem.Adapters
LoraConfig: Any = llamem.LoraConfig
generate: Any = llamem.generate
merge_adapter: Any = llamem.merge_adapter

SMALL = THREE_LAYERS.replace(n_layers=2)
A = {"adapter_B": jnp.asarray(IDS)}


def batch_of(tokens, ids=IDS):
    return tokens[:, :-1], tokens[:, 1:], jnp.asarray(ids)


def gradients(config, adapters, tokens, ids=IDS, accumulate=1, model=None, **plan):
    model = model_of(config, **plan) if model is None else model
    graphdef, base = nnx.split(model)
    settings = TrainSettings(batch_size=len(ids), seq_len=tokens.shape[1] - 1, accumulate=accumulate)
    return jax.jit(partial(losses_and_grads, place_of(model.plan), graphdef, settings))(
        base, adapters, batch_of(tokens, ids)
    )


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.weekly), True])
def test_losses_and_every_gradient_equal_plain_models_in_float64(tied):
    """All eight targets, three ranks, four sequences; each way to compute it once."""
    config = SMALL.replace(tied_head=tied, qk_norm=tied)
    adapters, tokens = adapters_of(config), tokens_of(config, T=14, B=4)
    losses, expected = expected_gradients(config, model_of(config), adapters, np.asarray(tokens), IDS)
    plans = [
        {"loss_tiles": None, "remat": None},
        {"loss_tiles": 3, "loss_axis": "tokens", "accumulate": 2},
        {"loss_tiles": 3, "loss_axis": "vocab", "mode": "unroll", "remat": "attn"},
        {},
        {"head_groups": 2, "mlp_tiles": 3, "offload": ("block_in",)},
    ]
    for plan in plans[:: 1 if tied else 2]:
        metrics, got = gradients(config, adapters, tokens, **plan)
        np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
        errors = errors_by_name(got, expected)
        assert len(errors) == 16 and max(errors.values()) < 5e-5, (plan, errors)


@pytest.mark.quick
def test_more_adapters_than_sequences_and_more_sequences_than_adapters():
    lora = LoraConfig(ranks=(2, 1, 3, 2, 1, 4, 2), target_modules=("head", "v"))
    adapters, tokens = adapters_of(SMALL, lora), tokens_of(SMALL, T=9, B=3)
    for ids in ([5, 0, 5], [3, 3, 3]):
        losses, expected = expected_gradients(SMALL, model_of(SMALL), adapters, np.asarray(tokens), ids)
        metrics, got = gradients(SMALL, adapters, tokens, ids, loss_tiles=2)
        assert max(errors_by_name(got, expected).values()) < 5e-5
        here = np.unique(ids)
        np.testing.assert_allclose(metrics["loss"][here], losses, rtol=1e-5)
        assert np.isnan(np.delete(metrics["loss"], here)).all()


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.weekly), True])
def test_merged_logits_and_text_equal_the_adapted_model_s(tied):
    config = SMALL.replace(tied_head=tied)
    model, adapters, tokens = model_of(config), adapters_of(config), tokens_of(config, T=11, B=4)
    logits = adapters.on(model, **A)(tokens)
    text = generate(model, tokens, 6, temperature=0, adapters=adapters, **A)
    for i in range(3):
        merged, mine = merge_adapter(model, adapters, i), i == IDS
        assert not merged.config.tied_head
        expected = in_float64(
            lambda c, p, i=i: reference.logits(c.replace(tied_head=False), put_together(p, adapters, i), tokens),
            config,
            model,
        )[mine]
        size = np.abs(expected).max()
        np.testing.assert_allclose(logits[mine], expected, rtol=1e-4, atol=1e-4 * size)
        np.testing.assert_allclose(merged(tokens[mine]), expected, rtol=1e-4, atol=1e-4 * size)
        np.testing.assert_array_equal(text[mine], generate(merged, tokens[mine], 6, temperature=0))
    assert model.config.tied_head is tied, "the model itself is as it was"
    layers_alone = merge_adapter(model, adapters_of(config, LoraConfig(ranks=(2,))), 0)
    assert layers_alone.config.tied_head is tied


def test_new_adapters_change_nothing_and_have_the_ranks_that_they_were_given():
    model, tokens = model_of(SMALL), tokens_of(SMALL, T=9, B=4)
    made = Adapters.create(SMALL, MIXED, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(made.on(model, **A)(tokens), model(tokens))
    for target in TARGET_MODULES:
        used = np.any(np.asarray(made.a[target]) != 0, axis=-1).sum(-1)
        np.testing.assert_array_equal(used, made.rank[target])
    np.testing.assert_allclose(made.scale["q"][0], [2, 0.5, 4])
    assert Adapters.create(SMALL, LoraConfig(ranks=(4,)), rngs=nnx.Rngs(0)).scale["v"][0] == 1


def test_select_and_join_are_inverse_and_unload_one():
    adapters = adapters_of(SMALL)
    singles = [adapters.select([i]) for i in range(3)]
    with pytest.raises(ValueError, match="at least one"):
        Adapters.join([])
    assert [one.a["q"].shape for one in singles] == [(2, 1, r, 24) for r in (3, 5, 1)]
    jax.tree.map(np.testing.assert_array_equal, Adapters.join(singles), adapters)
    rest = adapters.select([0, 2])
    assert rest.count == 2 and rest.b["head"].shape == (2, 3, 101)
    other = adapters_of(SMALL, LoraConfig(ranks=(2,), target_modules=("k",)), seed=7)
    both = Adapters.join([other, adapters])
    assert both.count == 4 and np.all(both.rank["q"][:, 0] == 0) and np.all(both.a["q"][:, 0] == 0)
    model, tokens = model_of(SMALL), tokens_of(SMALL, T=5, B=1)
    for i, alone in enumerate([other, *singles]):
        got = both.on(model, jnp.asarray([i]))(tokens)
        np.testing.assert_allclose(got, alone.on(model)(tokens), rtol=1e-4, atol=1e-4)


def shapes_in(jaxpr):
    return {tuple(var.aval.shape) for eqn, _ in equations(jaxpr) for var in eqn.outvars if hasattr(var.aval, "shape")}


@pytest.mark.parametrize("axis", ["tokens", "vocab"])
def test_nothing_of_a_matrix_s_size_is_made_and_no_weight_has_a_gradient(axis):
    B, T, V, D, F = 4, 12, 131, 24, 40
    config = SMALL.replace(vocab_size=V)
    adapters, tokens = adapters_of(config), tokens_of(config, T=T + 1, B=B)
    graphdef, base = nnx.split(model_of(config, remat=None, loss_tiles=3, loss_axis=axis))

    def loss(weights):
        inputs, targets, ids = batch_of(tokens)
        model = adapters.with_weights(weights).on(nnx.merge(graphdef, base), ids)
        return summed_loss(model, jnp.ones(B), inputs, targets)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(adapters.weights).jaxpr
    sizes = {D, F, V, SMALL.n_heads * SMALL.head_dim, SMALL.n_kv_heads * SMALL.head_dim}
    made = [
        s for s in shapes_in(jaxpr) if (len(s) == 3 and s[0] in (B, 3) and sizes.issuperset(s[1:])) or s == (B * T, V)
    ]
    assert not made
    # With all of them trained: of each matrix a product, and two for gradients. Frozen: none for that of its weights.
    trained = jax.make_jaxpr(jax.grad(lambda base: loss_fn(graphdef, base, *batch_of(tokens)[:2])))(base).jaxpr
    matrices = 2 * B * T * (config.n_params - V * D - D - config.n_layers * 2 * D)
    r = 5
    thin = [adapters.a[t].shape[-1] + adapters.b[t].shape[-1] for t in IN_LAYERS]
    # Head: A, and B in columns of three adapters, its logits twice in tiles of the vocabulary.
    own = 3 * r * (config.n_layers * sum(thin) + D) + (3 if axis == "tokens" else 4) * 3 * r * V
    assert matmul_flops(jaxpr) == matmul_flops(trained) - matrices + 2 * B * T * own


def test_an_unknown_adapter_gives_nan_where_it_cannot_be_refused_and_no_other_sequence_sees_it():
    config = SMALL.replace(n_layers=1)
    model, tokens = model_of(config), tokens_of(config, T=5, B=4)
    adapters = adapters_of(config, LoraConfig(ranks=(1, 3, 2), target_modules=TARGET_MODULES))
    program = jax.jit(lambda ids: adapters.on(model, ids)(tokens))
    for wrong in (3, -1, -3, 2**31 - 1):
        logits = program(jnp.asarray(IDS).at[1].set(wrong))
        assert np.isnan(logits[1]).any(-1).all() and np.isfinite(np.delete(logits, 1, 0)).all(), wrong
    metrics, _ = gradients(config, adapters, tokens, [2, 0, 3, 1])
    assert np.isnan(metrics["loss"]).all()


BAD_CONFIGS = [
    ({"ranks": (8, 0)}, "rank=0: expected a whole number of at least 1"),
    ({"ranks": ()}, "at least one entry"),
    ({"ranks": 8}, "ranks=8"),
    ({"ranks": (8,), "alphas": (1, 2)}, "one alpha for each of 1"),
    ({"ranks": (8,), "alphas": (-1,)}, "alpha=-1: expected a finite number above 0"),
    ({"ranks": (8,), "target_modules": ("q", "qkv")}, "target module='qkv': expected one of 'q', 'k'"),
    ({"ranks": (8,), "target_modules": ("q", "q")}, "each target once"),
]


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(("fields", "words"), BAD_CONFIGS)
def test_adapters_that_cannot_be_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        LoraConfig(**fields)


@pytest.mark.usefixtures("as_a_user")
def test_adapters_that_do_not_fit_are_refused():
    model, tokens, adapters = model_of(SMALL), tokens_of(SMALL, T=5, B=4), adapters_of(SMALL)
    other = adapters_of(SMALL.replace(d_ff=48), LoraConfig(ranks=(2,), target_modules=("up",)))
    wrong: list[tuple[dict[str, Any], Any, str]] = [
        ({"adapter_B": jnp.asarray([0, 1, 3, -1])}, ValueError, "from -1 to 3, but ids are 0 to 2: there are 3"),
        ({"adapter_B": jnp.zeros(4)}, ValueError, "float32.*which of the 3 adapters"),
        ({}, ValueError, "which of the 3 adapters"),
        ({"adapters": None, **A}, ValueError, "adapter_B without adapters"),
        ({"adapters": other}, ValueError, "adapters of another model: A and B of 'up'"),
    ]
    for options, error, words in wrong:
        given: dict[str, Any] = {"adapters": adapters, **options}
        calls = (
            lambda tokens, adapters, adapter_B=None: adapters.on(model, adapter_B).hidden(tokens),
            lambda tokens, **options: generate(model, tokens, 2, temperature=0, **options),
        )
        for call in calls:
            if given["adapters"] is not None or call is not calls[0]:
                with pytest.raises(error, match=words):
                    call(tokens, **given)
    for indices in ([], [3], [-1]):
        with pytest.raises(ValueError, match="0 to 2, at least one"):
            Adapters.select(adapters, indices)
