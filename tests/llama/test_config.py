import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from rope_spellings import NO_ROPE, READ, REFUSED

from llamem import PRESETS, Llama, LlamaConfig, Plan
from llamem.files import config_from_hf, config_to_hf
from llamem.llama import RopeScaling

PUBLISHED = {
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_is_that_of_the_model_and_its_config_file_is_read_again(name, tmp_path):
    config = PRESETS[name]
    shapes = nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    assert config.n_params == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert config.n_params == PUBLISHED.get(name, config.n_params)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    assert config_from_hf(tmp_path) == config
    in_16_bits = config_from_hf(tmp_path / "config.json", param_dtype=jnp.bfloat16)
    assert in_16_bits == config.replace(param_dtype=jnp.bfloat16)


def test_hugging_face_names_of_transformers_5():
    hf = config_to_hf(PRESETS["llama3.2-1b"])
    hf["rope_parameters"] = {**hf.pop("rope_scaling"), "rope_theta": hf.pop("rope_theta")}
    assert config_from_hf(hf) == PRESETS["llama3.2-1b"]
    plain = PRESETS["llama3-8b"]
    assert config_from_hf({**config_to_hf(plain), "rope_parameters": {"type": "default"}, "head_dim": None}) == plain


@pytest.mark.parametrize("spelling", READ)
def test_rope_s_angles_are_read_wherever_they_stand(spelling):
    fields, expected = READ[spelling]
    config = config_from_hf(NO_ROPE | fields)
    assert (config.rope_theta, config.rope_scaling and config.rope_scaling.factor) == expected


@pytest.mark.parametrize("spelling", REFUSED)
def test_rope_s_angles_of_two_minds_or_another_kind_are_refused(spelling):
    fields, words = REFUSED[spelling]
    with pytest.raises(ValueError, match=words):
        config_from_hf(NO_ROPE | fields)


def test_what_a_qwen3_leaves_out_is_as_transformers_has_it():
    hf = config_to_hf(PRESETS["qwen3-0.6b"])
    dense = {k: v for k, v in hf.items() if k not in ("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling")}
    dense |= {"num_attention_heads": 64, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    config = config_from_hf(dense)
    assert (config.head_dim, config.n_kv_heads, config.rope_theta) == (128, 32, 1e6)
    assert config_from_hf(dense | {"num_key_value_heads": None}).n_kv_heads == 64
    with pytest.raises(ValueError, match=r"layer_types=.*sliding_attention.*: only full_attention is"):
        config_from_hf(dense | {"layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_kv_heads": 3}, "n_kv_heads=3.*divisors of 32"),
        ({"head_dim": 63}, "head_dim=63 is odd"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"d_model": 2.5}, "d_model=2.5"),
        ({"param_dtype": jnp.int32}, "param_dtype=.*int32.* is not a floating type"),
        ({"compute_dtype": "banana"}, "compute_dtype='banana' is not a floating type"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"tied_head": "no"}, "tied_head='no'"),
        ({"rope_scaling": 8.0}, r"rope_scaling=8\.0.*RopeScaling"),
        ({"generation_config": "[2]"}, r"generation_config='\[2\]': expected the text of"),
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
        ({"rope_scaling": {"factor": 8.0}}, "rope_type=None"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "says no factor"),
        ({"vocab_size": None}, "says no vocab_size"),
        ({"hidden_size": "4096"}, "hidden_size='4096'"),
    ],
)
def test_config_files_that_are_not_computed_here_are_refused_by_name(changes, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**config_to_hf(PRESETS["llama3-8b"]), **changes}))
    with pytest.raises(ValueError, match=rf"{words}.*Read from {tmp_path}"):
        config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{tmp_path}/config.json holds no JSON object"):
        config_from_hf(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"There is no .*nowhere"):
        config_from_hf(tmp_path / "nowhere")


def test_bad_scaling_unknown_presets_and_mixtures_are_refused():
    with pytest.raises(ValueError, match=r"model_type='qwen3_moe'.*computes 'llama', 'qwen3' models"):
        config_from_hf({**config_to_hf(PRESETS["qwen3-0.6b"]), "model_type": "qwen3_moe", "num_experts": 128})
    with pytest.raises(ValueError, match="must be below high_freq_factor"):
        RopeScaling(8.0, high_freq_factor=1.0)
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


def test_a_field_that_there_is_not_is_named_with_those_there_are():
    with pytest.raises(TypeError, match=r"LlamaConfig has no field 'hidden_size'\. Its fields are vocab_size, "):
        LlamaConfig.from_name("tiny", hidden_size=64)
    with pytest.raises(TypeError, match=r"Plan has no field 'tiles'\. Its fields are mode, .*loss_tiles"):
        Plan().replace(tiles=4)
