"""GGUF files: every number where it belongs, and nothing computed that the file does not mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf_models import fields_of, model_file, write_gguf
from models import SMALL, model_of

import llamem
from llamem.llama import RopeScaling, rope_tables

CONFIG = SMALL.replace(d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=96, rope_scaling=None)
QWEN3 = CONFIG.replace(qk_norm=True, tied_head=False, head_dim=32)


def assert_same_parameters(got, expected, dtype):
    got, expected = (nnx.to_pure_dict(nnx.state(model)) for model in (got, expected))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype)), got, expected)


@pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=["llama", "qwen3"])
def test_a_file_is_the_model_that_it_was_made_from(config, tmp_path):
    model = model_of(config)
    file = model_file(tmp_path / "m.gguf", model, {"attn_q": "F16", "ffn_up": "BF16"})
    loaded = llamem.load_pretrained(file, dtype=jnp.float32)
    assert loaded.config == config
    rounded = nnx.clone(model)
    for name, dtype in (("wq", np.float16), ("w_up", jnp.bfloat16)):
        matrix = getattr(rounded.blocks, name)
        matrix[...] = matrix[...].astype(dtype).astype(jnp.float32)
    assert_same_parameters(loaded, rounded, np.float32)
    in_16_bits = llamem.load_pretrained(file)  # nothing is in blocks
    assert (in_16_bits.config.param_dtype, in_16_bits.config.compute_dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert_same_parameters(in_16_bits, rounded, jnp.bfloat16)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_1_s_scaling_is_known_by_its_divisors(factor, tmp_path, monkeypatch):
    config = CONFIG.replace(rope_theta=500_000.0, max_seq_len=131_072, head_dim=64)
    scaled = config.replace(rope_scaling=RopeScaling(factor))
    model, positions = model_of(config), jnp.arange(5)
    tables = [rope_tables(c, positions) for c in (config, scaled)]
    plain, stretched = (np.arctan2(sin[1], cos[1]) for cos, sin in tables)  # at position 1: the frequencies
    divisors = plain / stretched
    file = model_file(tmp_path / "m.gguf", model, more=[("rope_freqs.weight", divisors, "F32")])
    assert llamem.load_pretrained(file, dtype="float32").config == scaled
    for wrong in (divisors**1.1, np.ones(32) * 2):
        model_file(file, model, more=[("rope_freqs.weight", wrong, "F32")])
        with pytest.raises(ValueError, match=r"rope_freqs.weight in .* other divisors"):
            llamem.load_pretrained(file, dtype="float32")
    model_file(file, model, more=[("rope_freqs.weight", np.ones(32), "F32")])
    assert llamem.load_pretrained(file, dtype="float32").config == config
    # Without a theta it would be another model: 10,000.
    tables = [rope_tables(c.replace(rope_theta=10_000.0), positions) for c in (config, scaled)]
    plain, stretched = (np.arctan2(sin[1], cos[1]) for cos, sin in tables)
    silent = {name: value for name, value in fields_of(config).items() if "freq_base" not in name}
    monkeypatch.setattr("gguf_models.fields_of", lambda _: silent)
    model_file(file, model, more=[("rope_freqs.weight", plain / stretched, "F32")])
    with pytest.raises(ValueError, match=r"no llama.rope.freq_base: 10,000 would be taken"):
        llamem.load_pretrained(file, dtype="float32")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope__scaling__type": "yarn"}, "scaling of the type 'yarn'"),
        ({"expert_count": 8}, r"describes llama.expert_count, which this package does not know"),
        ({"attention__sliding_window": 4096}, "attention.sliding_window"),
        ({"rope__dimension_count": 8}, r"are \[8, 16\]: only equal ones"),
        ({"attention__head_count": [4, 2]}, "expected a whole number"),
        ({"attention__head_count": 3}, "n_heads=3 is not a multiple.*Read from"),
        ({"block_count": 3}, "missing: model.layers.2"),
        ({"feed_forward_length": 64}, "of another shape"),
    ],
)
def test_files_that_mean_another_model_are_refused(fields, words, tmp_path):
    file = model_file(tmp_path / "m.gguf", model_of(CONFIG), **fields)
    with pytest.raises(ValueError, match=rf"(?s){words}"):
        llamem.load_pretrained(file)


def test_what_says_that_a_model_is_plain_is_no_matter(tmp_path):
    said = {"expert_count": 0, "attention__sliding_window": 0, "tensor_data_layout": "Meta AI original pth"}
    file = model_file(tmp_path / "m.gguf", model_of(CONFIG), **said)
    assert llamem.load_pretrained(file, dtype="float32").config == CONFIG


def test_the_other_order_of_bytes_is_named(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    big = functools.partial(gguf.GGUFWriter, endianess=gguf.GGUFEndian.BIG)
    monkeypatch.setattr("gguf_models.gguf.GGUFWriter", big)
    file = model_file(tmp_path / "m.gguf", model_of(CONFIG))
    for opened in (llamem.load_pretrained, llamem.text.Tokenizer):
        with pytest.raises(
            ValueError, match=r"m.gguf is written in the other order of bytes .*gguf-convert-endian m.gguf little"
        ):
            opened(file)


def test_foreign_files_and_tensors_are_refused(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", {}, architecture="gemma3")
    with pytest.raises(ValueError, match="architecture 'gemma3': this package computes 'llama', 'qwen3'"):
        llamem.load_pretrained(file)
    write_gguf(file, {})
    with pytest.raises(ValueError, match=r"has no field llama.embedding_length"):
        llamem.load_pretrained(file)
    whole = write_gguf(file, {"a list": [1, 2]}).read_bytes()
    count = whole.index(b"a list") + len("a list") + 8  # after two types, of the field and of its numbers
    file.write_bytes(whole[:count] + (2**60).to_bytes(8, "little") + whole[count + 8 :])
    with pytest.raises(ValueError, match=r"no complete GGUF file: .* more is to be read"):
        llamem.load_pretrained(file)
    model = model_of(CONFIG)
    model_file(file, model, more=[("blk.0.attn_q.bias", np.ones(64), "F32")])
    with pytest.raises(ValueError, match=r"not known to this architecture: blk.0.attn_q.bias"):
        llamem.load_pretrained(file)
    model_file(file, model, {"attn_q": ("F32", "Q8_0")})
    with pytest.raises(ValueError, match=r"wq in .* is stored as F32, Q8_0: .* Give a dtype"):
        llamem.load_pretrained(file)
    assert llamem.load_pretrained(file, dtype="bfloat16").config.n_layers == 2
    model_file(file, model, {"ffn_up": "Q5_0"})
    with pytest.raises(ValueError, match=r"w_up in .* is stored as Q5_0: of quantised types Q4_0, Q4_1, Q4_K"):
        llamem.load_pretrained(file)
    with pytest.raises(ValueError, match="quantised already"):
        llamem.load_pretrained(file, quantize="q4_0")
    model_file(file, model)
    whole = file.read_bytes()
    w = np.asarray(model.blocks.wv[0]).reshape(64, -1).T.ravel()[:8].tobytes()
    assert whole.count(w) == 1
    file.write_bytes(whole.replace(w, np.full(8, np.nan, np.float32).tobytes()))
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.v_proj.weight holds NaN"):
        llamem.load_pretrained(file, dtype="float32")
