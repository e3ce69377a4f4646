"""Files that someone else wrote: refused by name, before anything of their promised size is read or built."""

import json
import math
import resource
import struct

import jax
import pytest
from jax.sharding import SingleDeviceSharding
from models import VARIANTS, model_of

import llamem

CONFIG = VARIANTS["tied"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return llamem.save_pretrained(model_of(CONFIG), tmp_path_factory.mktemp("saved") / "m")


@pytest.fixture
def folder(saved, tmp_path):
    """One whole model, for a test to damage."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_header(folder, change):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + length])
    text = change(entries)
    header = (text if isinstance(text, str) else json.dumps(entries)).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


def shifted(name, by):
    def change(entries):
        entries[name]["data_offsets"] = [offset + by for offset in entries[name]["data_offsets"]]

    return change


def swapped(name, **fields):
    return lambda entries: entries[name].update(fields)


def twice(entries):
    return json.dumps(entries).replace("{", '{"model.norm.weight": {"dtype": "F32"}, ', 1)


DECEIVING = [
    lambda e: shifted(min(e, key=lambda n: e[n].get("data_offsets", [math.inf])[0]), -96)(e),
    shifted(NORM, -4),
    lambda e: e[NORM].update(data_offsets=e["model.layers.0.input_layernorm.weight"]["data_offsets"]),
    lambda e: e.pop(NORM) and None,
    twice,
    swapped(NORM, shape=[-24]),
    swapped(NORM, shape=[24.0]),
    swapped(NORM, shape=[1] * 9),
    swapped(NORM, shape=None),
    swapped(NORM, dtype=["F32"]),
    swapped(NORM, dtype="I8"),
    swapped(NORM, data_offsets=[0]),
    swapped(NORM, data_offsets=[0, 2**70]),
    lambda e: e.update({NORM: 3}),
    lambda e: "[" * 50_000,
    lambda e: "[]",
    lambda e: "{\xff}",
]


@pytest.mark.parametrize("change", DECEIVING, ids=range(len(DECEIVING)))
def test_headers_that_deceive_are_refused_by_name(folder, change):
    edit_header(folder, change)
    with pytest.raises(ValueError) as error:
        llamem.load_pretrained(folder)
    assert str(folder / "model.safetensors") in str(error.value) or "of another shape" in str(error.value)


def test_a_header_beyond_the_format_s_limit_and_bytes_after_the_last_tensor(folder):
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="no complete safetensors file"):
        llamem.load_pretrained(folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(struct.pack("<Q", 3 * 2**30))
        file.truncate(4 * 2**30)  # a hole, which takes no room on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"model.safetensors is no complete safetensors file"):
        llamem.load_pretrained(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, "KiB"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**7},
        {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1},
        {"num_hidden_layers": 0, "intermediate_size": 2**31 - 1},
        {"head_dim": 2**30, "num_attention_heads": 2**30, "num_key_value_heads": 2**30},
        {"model_type": "qwen3_moe", "num_experts": 10**7, "num_experts_per_tok": 1, "moe_intermediate_size": 1,
         "norm_topk_prob": True},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_a_config_that_describes_far_more_than_the_files_hold_builds_nothing(folder, changes, monkeypatch):
    edit_config(folder, **changes)
    monkeypatch.setattr("llamem.llama.pretrained.Llama", lambda *_, **__: pytest.fail("built"))
    with pytest.raises(ValueError, match=r"the config in .* describes n_layers=.* the files hold 29 tensors"):
        llamem.load_pretrained(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "names the file 3"),
        ('{"weight_map": {"a": ["x.safetensors"]}}', "names the file"),
        ("[" * 50_000, "nested too deep"),
    ],
)
def test_bad_indexes_are_refused_by_name(folder, content, words):
    index = folder / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(ValueError, match=rf"{index}.*{words}"):
        llamem.load_pretrained(folder)


def test_a_type_that_is_none_is_refused_by_name(folder):
    edit_config(folder, torch_dtype="banana")
    with pytest.raises(ValueError, match=f"'banana' is not a floating type.*Read from {folder}"):
        llamem.load_pretrained(folder)
    with pytest.raises(ValueError, match="'int8'"):
        llamem.load_pretrained(folder, dtype="int8")


def test_a_sharding_that_does_not_fit_is_refused_before_anything_is_allocated(folder, monkeypatch):
    monkeypatch.setattr("llamem.llama.pretrained.fill", lambda *_: pytest.fail("allocated"))
    with pytest.raises(ValueError, match="sharding has no entry for blocks/attn_norm"):
        llamem.load_pretrained(folder, sharding={"blocks": {}, "embedding": None, "norm": None})
    with pytest.raises(TypeError, match="sharding='tpu' of blocks/attn_norm"):
        llamem.load_pretrained(folder, sharding="tpu")
    monkeypatch.undo()
    place = SingleDeviceSharding(jax.devices()[0])
    assert llamem.load_pretrained(folder, sharding=place).config == CONFIG


def test_saving_leaves_everything_else_alone(tmp_path):
    model = model_of(CONFIG)
    neighbour = tmp_path / "u.unfinished"
    neighbour.mkdir()
    (neighbour / "precious").write_text("years of work")
    llamem.save_pretrained(model, tmp_path / "u")
    assert (neighbour / "precious").read_text() == "years of work"
    assert {path.name for path in tmp_path.iterdir()} == {"u", "u.unfinished"}
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file exists"):
        llamem.save_pretrained(model, tmp_path / "file")
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        llamem.save_pretrained(model, tmp_path / "v", max_shard_bytes=0)
