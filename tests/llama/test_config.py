import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from llamem import PRESETS, Llama, LlamaConfig

PUBLISHED = {
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_is_that_of_the_model(name):
    config = PRESETS[name]
    shapes = nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    assert config.n_params == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert config.n_params == PUBLISHED.get(name, config.n_params)


@pytest.mark.parametrize("name", PRESETS)
def test_hugging_face_config_round_trip(name, tmp_path):
    config = PRESETS[name]
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    assert LlamaConfig.from_hf(tmp_path) == config
    assert LlamaConfig.from_hf(tmp_path / "config.json", param_dtype=jnp.bfloat16) == config.replace(
        param_dtype=jnp.bfloat16
    )


def test_hugging_face_names_of_transformers_5():
    hf = PRESETS["llama3.2-1b"].to_hf()
    hf["rope_parameters"] = {**hf.pop("rope_scaling"), "rope_theta": hf.pop("rope_theta")}
    assert LlamaConfig.from_hf(hf) == PRESETS["llama3.2-1b"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_kv_heads": 3}, "n_kv_heads=3.*divisors of 32"),
        ({"head_dim": 63}, "head_dim=63 is odd"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"n_layers": -1}, "n_layers=-1"),
        ({"d_model": 2.5}, "d_model=2.5"),
        ({"param_dtype": jnp.int32}, "param_dtype=int32"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_bad_fields_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        LlamaConfig().replace(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn'"),
    ],
)
def test_hugging_face_configs_we_cannot_compute_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        LlamaConfig.from_hf({**PRESETS["llama3-8b"].to_hf(), **changes})


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"'llama4'.*llama3\.2-1b"):
        LlamaConfig.from_name("llama4")


def test_forward_flops_are_those_of_the_matrix_products():
    config = LlamaConfig.from_name("tiny", vocab_size=1000)
    T = 96
    by_hand = 2 * config.vocab_size * config.d_model
    by_hand += config.n_layers * 2 * config.d_model * (2 * 4 * 16 + 2 * 2 * 16)  # q and out, k and v
    by_hand += config.n_layers * 2 * 3 * config.d_model * config.d_ff
    by_hand += config.n_layers * 2 * 2 * T * 4 * 16  # scores and their mix of values
    assert config.flops_per_token(T) == by_hand


def test_frozen_and_hashable():
    config = LlamaConfig()
    assert hash(config) == hash(LlamaConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 1  # pyrefly: ignore[read-only]
