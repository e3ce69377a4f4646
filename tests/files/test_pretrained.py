import gc
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import printed_by
from compilers import with_host_memory
from flax import nnx
from gguf_models import VOCABULARY, write_gguf
from make_golden import MODELS, golden
from models import VARIANTS, model_of, tokens_of

import llamem
from llamem.files import config_from_hf, load_adapters, save_adapter
from llamem.files.safetensors import Stored
from llamem.files.tensor_names import tensors_of
from llamem.runs import Run, loss_fn

safetensors = pytest.importorskip("safetensors.numpy")


def by_file_name(params):
    """Our stacked arrays cut up as the files hold them."""
    found = {}
    for tensor in tensors_of(params):
        leaf = params
        for key in tensor.path:
            leaf = leaf[key]
        piece = np.asarray(leaf[tensor.index])
        found[tensor.name] = piece.reshape(tensor.shape[::-1]).T if tensor.linear else piece
    return found


def assert_same_numbers(folder, numbers, **plan):
    """Logits, loss, every gradient and greedy decoding of the folder's model equal another project's."""
    model = llamem.load_pretrained(folder, plan=llamem.Plan(loss_tiles=3).replace(**plan))
    tokens = jnp.asarray(numbers["tokens"])
    logits = np.asarray(model(tokens), np.float64)
    np.testing.assert_allclose(logits, numbers["logits"], rtol=1e-4, atol=1e-4 * np.abs(numbers["logits"]).max())
    graphdef, params = nnx.split(model)
    mean_loss = jax.jit(jax.value_and_grad(lambda p: loss_fn(graphdef, p, tokens[:, :-1], tokens[:, 1:])))
    loss, gradients = mean_loss(params)
    assert abs(loss - numbers["loss"]) < 1e-5 * abs(numbers["loss"])
    mine = by_file_name(nnx.to_pure_dict(gradients))
    theirs = {name.removeprefix("grad "): g for name, g in numbers.items() if name.startswith("grad ")}
    assert set(mine) == set(theirs)
    for name, expected in theirs.items():
        assert np.abs(expected).max() > 0, name
        assert np.linalg.norm(mine[name] - expected) <= 1e-4 * np.linalg.norm(expected) + 1e-7, name
    generated = llamem.generate(model, tokens[:, :8], 12, temperature=0)
    np.testing.assert_array_equal(generated, numbers["generated"])
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_transformers(name):
    with np.load(golden(name) / "numbers.npz") as numbers:
        assert_same_numbers(golden(name), dict(numbers))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_round_trip(tmp_path, config):
    """In many files, and, in bf16, in one."""
    model = model_of(config)
    folder = llamem.save_pretrained(model, tmp_path / "saved", max_shard_bytes=20_000)
    assert (folder / "model.safetensors.index.json").exists() == (config.n_layers > 0)
    again = llamem.load_pretrained(folder)
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(m)) for m in (model, again)))
    in_bf16 = llamem.load_pretrained(
        folder, dtype=jnp.bfloat16, compute_dtype=jnp.float32, plan=llamem.Plan(remat=None)
    )
    assert in_bf16.plan.remat is None and in_bf16.config.compute_dtype == jnp.float32
    expected = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.to_pure_dict(nnx.state(model)))
    jax.tree.map(np.testing.assert_array_equal, expected, nnx.to_pure_dict(nnx.state(in_bf16)))
    bf16_folder = llamem.save_pretrained(in_bf16, tmp_path / "bf16")
    assert (bf16_folder / "model.safetensors").exists()
    jax.tree.map(
        np.testing.assert_array_equal,
        expected,
        nnx.to_pure_dict(nnx.state(llamem.load_pretrained(bf16_folder))),
    )


@pytest.fixture
def folder(tmp_path):
    return llamem.save_pretrained(model_of(VARIANTS["tied"]), tmp_path / "m", max_shard_bytes=20_000)


def rewrite(folder, change):
    """Applies `change` to all tensors, of one file or of several, and writes them into one."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    safetensors.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update(bias=np.ones(3)), "not known to this architecture: bias"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(25, np.float32)}),
            r"of another shape: model.norm.weight \(25,\), not \(24,\)",
        ),
        (lambda t: t.update({"model.norm.weight": np.ones(24, np.int8)}), "stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named_before_anything_is_allocated(folder, monkeypatch, change, words):
    rewrite(folder, change)
    monkeypatch.setattr("llamem.files.pretrained.fill", lambda *_: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=words):
        llamem.load_pretrained(folder)


def test_a_head_that_is_missing_may_be_a_tied_one(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r'missing: lm_head\.weight\. .* in config\.json: "tie_word_embeddings": true'):
        llamem.load_pretrained(folder)


def test_a_repeated_tied_head_and_stored_frequencies_are_no_matter_and_another_head_is_an_error(folder):
    before = nnx.to_pure_dict(nnx.state(llamem.load_pretrained(folder)))
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}
    rewrite(folder, lambda t: t.update(frequencies | {"lm_head.weight": t["model.embed_tokens.weight"]}))
    after = nnx.to_pure_dict(nnx.state(llamem.load_pretrained(folder)))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    head = safetensors.load_file(folder / "model.safetensors")["lm_head.weight"].copy()
    head[3, 5] += 1
    for other in (head, head[:-1]):
        rewrite(folder, lambda t, other=other: t.update({"lm_head.weight": other}))
        with pytest.raises(ValueError, match=r"tie_word_embeddings=true, and lm_head.weight .* is not the embedding"):
            llamem.load_pretrained(folder)


@pytest.mark.parametrize(("wrong", "dtype"), [(np.nan, np.float32), (1e38, "bfloat16")])
def test_numbers_that_are_none_are_named(folder, wrong, dtype):
    name = "model.layers.1.mlp.down_proj.weight"
    w = np.full((24, 40), 0.5, dtype)
    w[2, 7] = wrong
    rewrite(folder, lambda t: t.update({name: w}))
    with pytest.raises(ValueError, match=rf"{name} holds NaN or infinite numbers, or some beyond float16"):
        llamem.load_pretrained(folder, dtype="float16")
    if np.isfinite(wrong):
        assert llamem.load_pretrained(folder).blocks.w_down[1, 7, 2] > 9e37


def test_damaged_folders(folder, tmp_path):
    name = min(file.name for file in folder.glob("*.safetensors"))
    file = folder / name
    whole = file.read_bytes()
    for broken in (whole[:-5], b"", b"abc", struct.pack("<Q", 10**15) + b"{}"):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=rf"{name} is no complete safetensors file.*cut off or damaged"):
            llamem.load_pretrained(folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="Download it again"):
        llamem.load_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ValueError, match=r"index.json has no weight_map"):
        llamem.load_pretrained(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(FileNotFoundError, match="can run any code"):
        llamem.load_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "banana"}))
    with pytest.raises(ValueError, match=f"'banana' is not a floating type.*Read from {folder}"):
        llamem.load_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        llamem.load_pretrained(folder)
    with pytest.raises(FileNotFoundError, match="no folder, and no hub name"):
        llamem.load_pretrained(tmp_path / "nowhere")


def test_a_folder_that_holds_two_models_is_refused_with_both_named(folder, tmp_path):
    """transformers reads model.safetensors, other programs the index; the two are of different models."""
    other = llamem.save_pretrained(model_of(VARIANTS["tied"]), tmp_path / "other", max_shard_bytes=10**9)
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(
        ValueError, match=r"holds model.safetensors and, beside it, model.safetensors.index.json, .*-of-"
    ):
        llamem.load_pretrained(folder)
    listed = dict.fromkeys(safetensors.load_file(folder / "model.safetensors"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    assert llamem.load_pretrained(folder).config == VARIANTS["tied"], "an index of that very file"
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": listed | {"model.norm.weight": "more.safetensors"}})
    )
    with pytest.raises(ValueError, match=r"stands in .*model.safetensors and in .*more.safetensors"):
        llamem.load_pretrained(folder)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.model.", "base_model.model.model.", "language_model.model."])
def test_names_that_differ_by_a_prefix_say_so(folder, prefix):
    def renamed(tensors):
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    rewrite(folder, renamed)
    with pytest.raises(ValueError, match=rf"names begin with '{prefix}' where 'model.' is expected: {prefix}embed_tok"):
        llamem.load_pretrained(folder)


def test_a_config_of_more_layers_than_tensors_is_answered_at_once(folder, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    monkeypatch.setattr("llamem.files.pretrained.tensors_of", lambda _: pytest.fail("all names are listed"))
    with pytest.raises(ValueError, match=r"describes 1,000,000,000 layers, and the files hold \d+ tensors"):
        llamem.load_pretrained(folder)


def test_fields_of_a_config_mean_what_transformers_makes_of_them(folder):
    config = json.loads((folder / "config.json").read_text())
    passed_over = {"no_rope_layers": [1, 0], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    passed_over |= {
        "sliding_window": 4096,
        "residual_multiplier": 0.2,
        "pretraining_tp": 2,
        "quantization_config": None,
    }
    assert config_from_hf(config | passed_over) == config_from_hf(config)
    with pytest.raises(ValueError, match=r"quantization_config=.*fp8.* Take the model's unquantised original"):
        config_from_hf(config | {"quantization_config": {"quant_method": "fp8"}})


def test_the_home_folder_is_meant_by_a_tilde(folder, tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for place in (home, elsewhere):
        place.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    model = llamem.load_pretrained(folder)
    adapters = llamem.Adapters.create(model.config, llamem.LoraConfig(ranks=(2,)), rngs=nnx.Rngs(0))
    assert llamem.save_pretrained(model, "~/model") == home / "model"
    assert llamem.load_pretrained("~/model").config == config_from_hf("~/model") == model.config
    save_adapter(adapters, 0, "~/adapter")
    assert load_adapters(model, "~/adapter").count == 1
    assert Run(model, [], True).save("~/run") == home / "run"
    tokenizer = llamem.text.Tokenizer(write_gguf(tmp_path / "v.gguf", VOCABULARY))
    tokenizer.save("~/tokenizer")
    assert llamem.text.Tokenizer("~/tokenizer").encode("the") == tokenizer.encode("the")
    assert sorted(path.name for path in home.iterdir()) == ["adapter", "model", "run", "tokenizer"]
    assert not any(elsewhere.iterdir())


def test_a_model_is_saved_with_the_tokens_that_end_its_texts(folder, tmp_path):
    """transformers takes token 2 for the end where a config.json is silent: a saved Llama 3 never stopped."""
    config = json.loads((folder / "config.json").read_text())
    assert not (folder / "generation_config.json").exists(), "nothing is known of a fresh model"
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 3}))
    once = llamem.save_pretrained(llamem.load_pretrained(folder), tmp_path / "once")
    ids = {"bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 3}
    assert json.loads((once / "generation_config.json").read_text()) == ids
    own = {"eos_token_id": [7, 5], "temperature": 0.6, "do_sample": True}
    (once / "generation_config.json").write_text(json.dumps(own))
    model = llamem.load_pretrained(once)
    assert model.config == VARIANTS["tied"], "no part of the architecture"
    adapters = llamem.Adapters.create(model.config, llamem.LoraConfig(ranks=(2,)), rngs=nnx.Rngs(0))
    twice = tmp_path / "twice"
    for kept in (llamem.merge_adapter(model, adapters, 0), model):
        shutil.rmtree(twice, ignore_errors=True)
        llamem.save_pretrained(kept, twice)
        assert json.loads((twice / "generation_config.json").read_text()) == ids | own
        assert json.loads((twice / "config.json").read_text()).items() >= (ids | {"eos_token_id": [7, 5]}).items()
    llamem.text.Tokenizer().save(twice)
    theirs = {"bos_token_id": 128_000, "eos_token_id": [128_009, 128_008, 128_001], "pad_token_id": 3}
    assert json.loads((twice / "generation_config.json").read_text()) == own | theirs
    assert json.loads((twice / "config.json").read_text()).items() >= (theirs | {"model_type": "llama"}).items()


def test_saving_leaves_everything_else_alone(folder, tmp_path):
    for full in (folder, folder / "config.json"):
        with pytest.raises(FileExistsError, match="nothing was written"):
            llamem.save_pretrained(model_of(VARIANTS["tied"]), full)
    assert {path.name for path in tmp_path.iterdir()} == {"m"}


def test_the_hub(monkeypatch, folder):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(pytest.importorskip("huggingface_hub"), "snapshot_download", download)
    assert llamem.load_pretrained("meta-llama/Llama-3.2-1B").config == VARIANTS["tied"]
    assert asked[0][0] == "meta-llama/Llama-3.2-1B" and not any("bin" in pattern for pattern in asked[0][1])


@pytest.mark.weekly
@pytest.mark.skipif(sys.platform != "linux", reason="measures resident memory")
def test_the_host_holds_the_destination_and_one_tensor(tmp_path):
    small = llamem.LlamaConfig.from_name("tiny", n_layers=2, vocab_size=1000)
    large = small.replace(vocab_size=300_000, d_model=256, tied_head=False)
    folders = [
        llamem.save_pretrained(llamem.Llama(config, rngs=nnx.Rngs(0)), tmp_path / str(i), max_shard_bytes=10**9)
        for i, config in enumerate((small, large))
    ]
    code = f"""
import resource, llamem
llamem.load_pretrained({str(folders[0])!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = llamem.load_pretrained({str(folders[1])!r})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    largest = 300_000 * 256 * 4
    assert int(run.stdout) < large.n_params * 4 + 1.2 * largest, int(run.stdout) / largest


@with_host_memory
def test_weights_of_the_host_are_put_there_one_by_one(tmp_path, monkeypatch):
    model = model_of(VARIANTS["untied"])
    folder = llamem.save_pretrained(model, tmp_path / "m")
    gc.collect()
    read, elsewhere = Stored.read, []

    def watched(self):
        arrays = [a for a in jax.live_arrays() if a.ndim > 1 and a.sharding.memory_kind != "pinned_host"]
        elsewhere.append(sum(a.nbytes for a in arrays))
        return read(self)

    monkeypatch.setattr(Stored, "read", watched)
    loaded = llamem.load_pretrained(folder, plan=llamem.Plan(weights="host"))
    expected, got = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, loaded))
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_array_equal(one, other)
        assert (other.sharding.memory_kind == "pinned_host") == (other.ndim > 2 or 101 in other.shape)
    away, here = ([a.nbytes for a in got if (a.sharding.memory_kind == "pinned_host") == it] for it in (True, False))
    # The norms, and what is put together while a tensor is read; all of it would be many times that.
    assert 0 < max(elsewhere) - min(elsewhere) <= max(away) + sum(here) < sum(away) / 4
    np.testing.assert_allclose(loaded(tokens_of(model.config)), model(tokens_of(model.config)), rtol=1e-5, atol=1e-5)


def test_loaded_onto_a_mesh(tmp_path):
    config = VARIANTS["untied"].replace(d_model=32, vocab_size=96)
    model, tokens = model_of(config), tokens_of(config)
    folder = llamem.save_pretrained(model, tmp_path / "m")
    np.savez(tmp_path / "expected.npz", tokens=tokens, logits=model(tokens))
    printed_by(Path(__file__).parent / "sharded_load.py", str(folder), str(tmp_path / "expected.npz"))
