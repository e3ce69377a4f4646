import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from llamem import PRESETS, Llama, LlamaConfig
from llamem.llama import RopeScaling

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
        ({"param_dtype": jnp.int32}, "param_dtype=.*int32.* is not a floating type"),
        ({"compute_dtype": "banana"}, "compute_dtype='banana' is not a floating type"),
        ({"compute_dtype": None}, "compute_dtype=None"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"norm_eps": -1.0}, r"norm_eps=-1\.0"),
        ({"tied_head": "no"}, "tied_head='no'"),
        ({"rope_scaling": 8.0}, r"rope_scaling=8\.0.*RopeScaling"),
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


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_default_rope_is_no_scaling(name, key):
    config = PRESETS["llama3-8b"]
    assert LlamaConfig.from_hf({**config.to_hf(), name: {key: "default"}}) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "4096"}, "hidden_size='4096' in config.json: expected a whole number"),
        ({"hidden_size": 2.5}, "hidden_size=2.5"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"vocab_size": None}, "says no vocab_size"),
        ({"vocab_size": 10**400}, r"vocab_size=\(a number of 1329 bits\)"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps=\(a number of 1329 bits\)"),
        ({"rope_theta": "big"}, "rope_theta='big'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'.*true or false"),
        ({"rope_scaling": "llama3"}, "rope_scaling='llama3'.*an object"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_type=None"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "says no factor"),
    ],
)
def test_bad_values_of_a_config_file_are_named_with_the_file(changes, words, tmp_path):
    content = {**PRESETS["llama3-8b"].to_hf(), **changes}
    with pytest.raises(ValueError, match=words):
        LlamaConfig.from_hf(content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{words}.*Read from {tmp_path}"):
        LlamaConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "null", "[1]", "[" * 100_000, '{"a": ' * 100_000, '{"a": \xff}', "1" * 5000]
)
def test_what_is_no_json_object_is_named_with_the_file(content, tmp_path):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"{tmp_path}/config.json (holds no JSON object|is nested too deep)"):
        LlamaConfig.from_hf(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"There is no .*nowhere"):
        LlamaConfig.from_hf(tmp_path / "nowhere")


def test_a_config_file_beyond_all_measure_is_not_read(tmp_path):
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(10**11)  # a hole, which takes no room on the disk
    with pytest.raises(ValueError, match=r"config.json has 100,000,000,000 bytes: expected .* at most 10,000,000"):
        LlamaConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"factor": 0.0}, r"factor=0\.0"), ({"high_freq_factor": 1.0}, "low_freq_factor=1.0 must be below")],
)
def test_bad_scaling_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(RopeScaling(8.0), **changes)


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
