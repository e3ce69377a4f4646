import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from models import SMALL, VARIANTS, expected_gradients, in_float64, model_of, tokens_of
from norms import errors_by_name

from jaxmem import matmul_flops
from llamem import generate
from llamem.llama import ACTIVATIONS
from llamem.llama.sample import _generate, pick_token
from llamem.runs import loss_fn

pytestmark = pytest.mark.accelerator


CONFIGS = VARIANTS


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_reference(name):
    config = CONFIGS[name]
    model, tokens = model_of(config), np.asarray(tokens_of(config))
    expected = in_float64(reference.logits, config, model, tokens)
    np.testing.assert_allclose(model(jnp.asarray(tokens)), expected, rtol=2e-4, atol=2e-4)


TOOLS: dict[str, Any] = {"head_groups": 2, "mlp_tiles": 5, "offload": ("block_in",)}
# Each way to compute a step by itself, and those that meet in one layer together.
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("untied", {"remat": None, "loss_tiles": None}),
    ("untied", {"loss_tiles": 3}),
    ("tied", {"remat": None, "loss_tiles": 3}),
    ("tied", {"loss_tiles": None}),
    ("untied", {"remat": "attn"}),
    ("untied", {"mode": "unroll", "remat": "minimal"}),
    ("untied", {"mode": "nested"}),
    *(("untied", {"loss_tiles": 3, tool: value}) for tool, value in TOOLS.items()),
    ("untied", {"head_groups": 2, "mlp_tiles": 5, "remat": None}),
    ("untied", {**TOOLS, "offload": ("attn_out", "block_in")}),
    ("untied", {**TOOLS, "mode": "unroll", "attention": "tiled"}),
    ("qwen3", TOOLS),
]


@pytest.mark.parametrize(("name", "plan"), PLANS, ids=str)
def test_every_gradient_of_the_mean_loss(name, plan):
    """The test that a feature shipped without for eleven months: mean loss, real layers, every leaf, in every plan."""
    config = CONFIGS[name]
    tokens = tokens_of(config, T=38)
    graphdef, params = nnx.split(model_of(config, **plan))

    def mine(params):
        return 3.0 * loss_fn(graphdef, params, tokens[:, :-1], tokens[:, 1:])

    value, grads = jax.jit(jax.value_and_grad(mine))(params)
    expected_value, expected = jax.tree.map(lambda a: 3.0 * a, expected_gradients(config))
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    grads = nnx.to_pure_dict(grads)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected))
    errors = errors_by_name(grads, expected)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    "plan", [{"remat": None}, {"remat": "nothing"}, {"mode": "nested"}, {"mode": "unroll"}], ids=str
)
def test_hidden_states_are_those_of_shorter_models(plan):
    model, tokens = model_of(SMALL, **plan), tokens_of(SMALL)
    model.train()
    x_BTD, hidden = nnx.jit(lambda model: model.hidden(tokens, return_hidden=True))(model)
    assert hidden.shape == (SMALL.n_layers + 1, *x_BTD.shape)
    np.testing.assert_array_equal(hidden[0], model.embedding[...][tokens])
    for layers in range(1, SMALL.n_layers + 1):
        shorter = model_of(SMALL.replace(n_layers=layers))
        nnx.update(shorter, nnx.state(model, lambda path, _: "blocks" not in path))
        nnx.update(shorter.blocks, jax.tree.map(lambda leaf, stop=layers: leaf[:stop], nnx.state(model.blocks)))
        last_BTD = shorter.hidden(tokens, return_hidden=True)[1][-1]
        np.testing.assert_allclose(hidden[layers], last_BTD, rtol=1e-5, atol=1e-5)


def test_activation_names_are_those_of_the_block():
    from jaxmem.tracing.jaxprs import names_in

    graphdef, params = nnx.split(model_of(SMALL))
    jaxpr = jax.make_jaxpr(lambda p: nnx.merge(graphdef, p)(tokens_of(SMALL)))(params)
    assert set(names_in(jaxpr.jaxpr)) == set(ACTIVATIONS)


def test_a_model_is_computed_as_its_plan_says_and_eval_turns_rematerialisation_off():
    def program(train=True, **plan):
        graphdef, params = nnx.split(model_of(SMALL, **plan))

        def loss(p):
            model = nnx.merge(graphdef, p)
            (model.train if train else model.eval)()
            return jnp.mean(model(tokens_of(SMALL)))

        return str(jax.make_jaxpr(jax.grad(loss))(params))

    assert "scan" in program() and "scan" not in program(mode="unroll")
    assert re.search("checkpoint|remat", program())
    for without in (program(remat=None), program(train=False)):
        assert not re.search("checkpoint|remat", without)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["untied", "qwen3", "rope scaling"])
@pytest.mark.parametrize("remat", [None, "nothing"])
def test_decoding_with_the_cache_equals_reading_at_once(name, remat):
    config = CONFIGS[name]
    model, tokens = model_of(config, remat=remat), tokens_of(config, T=13)
    at_once = nnx.jit(lambda model, t: model(t))(model, tokens)
    decode = nnx.jit(lambda model, t, cache: model.decode(t, cache))
    logits, cache = decode(model, tokens[:, :6], model.empty_cache(2, 16))
    for i in range(6, 13):
        np.testing.assert_allclose(logits, at_once[:, i - 1], rtol=1e-4, atol=1e-4)
        logits, cache = decode(model, tokens[:, i : i + 1], cache)
    assert cache.length == 13 and cache.k_LBSKh.shape == (3, 2, 16, config.n_kv_heads, 8)
    np.testing.assert_array_equal(cache.k_LBSKh[:, :, 13:], 0)


def test_prompts_of_different_lengths_end_where_each_stops_and_one_program_serves_all_lengths():
    """Each as it is alone, up to its stop token; another length within the bound compiles nothing."""
    model, rng = model_of(SMALL), np.random.default_rng(0)
    prompts = [rng.integers(1, SMALL.vocab_size, size).tolist() for size in (9, 4, 13)]
    alone = [np.asarray(generate(model, jnp.asarray([ids]), 8, temperature=0))[0] for ids in prompts]
    together = np.asarray(generate(model, prompts, 8, temperature=0))
    np.testing.assert_array_equal(together, alone)
    stop = int(alone[0][2])
    stopped = np.asarray(generate(model, prompts, 8, temperature=0, stop_ids=[stop]))
    for row, own in zip(stopped, alone, strict=True):
        end = next((i for i, token in enumerate(own) if token == stop), 7)
        np.testing.assert_array_equal(row[: end + 1], own[: end + 1])
        assert (row[end:] == row[end]).all()
    cache_size: Any = getattr(_generate, "_cache_size")  # noqa: B009
    compiled = cache_size()
    for size, new in ((3, 5), (30, 20), (17, 11)):
        ids = [rng.integers(1, SMALL.vocab_size, size - i).tolist() for i in range(3)]
        assert generate(model, ids, new, temperature=0).shape == (3, new)
    assert cache_size() == compiled


def test_a_prompt_of_up_to_32_tokens_is_read_as_32():
    def flops(size):
        ids = jnp.ones((1, size), jnp.int32)
        return matmul_flops(jax.make_jaxpr(lambda: generate(model_of(SMALL), ids, 8, temperature=0))().jaxpr)

    assert flops(9) == flops(32) < 0.6 * flops(33)


def test_top_p_draws_from_the_likeliest_only_and_in_proportion():
    probs = np.array([0.5, 0.05, 0.3, 0.15])
    keys = jax.random.split(jax.random.key(0), 4000)

    def frequencies(top_p, temperature=1.0):
        logits = jnp.log(jnp.asarray(probs))[None] * temperature
        drawn = jax.vmap(lambda key: pick_token(logits, key, temperature, top_p)[0])(keys)
        return np.bincount(drawn, minlength=4) / len(keys)

    np.testing.assert_allclose(frequencies(1.0), probs, atol=0.03)
    np.testing.assert_allclose(frequencies(0.7, 2.0), np.array([0.5, 0, 0.3, 0]) / 0.8, atol=0.03)
    np.testing.assert_allclose(frequencies(0.4), [1, 0, 0, 0])


def test_bfloat16_compute_keeps_float32_parameters_and_logits():
    model = model_of(SMALL.replace(compute_dtype=jnp.bfloat16), scale=1.0)
    logits = model(tokens_of(SMALL))
    assert logits.dtype == jnp.float32 and model.hidden(tokens_of(SMALL)).dtype == jnp.bfloat16
    same = model_of(SMALL, scale=1.0)(tokens_of(SMALL))
    assert 0 < np.linalg.norm(logits - same) < 0.03 * np.linalg.norm(same)
