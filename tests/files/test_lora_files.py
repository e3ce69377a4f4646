"""PEFT's folders, written and read here: what is refused, and by which name. Against PEFT itself: `make parity`."""

import json

import jax
import numpy as np
import pytest
from adapters import adapters_of
from models import SMALL, model_of

from llamem import LoraConfig, load_adapters, save_adapter
from llamem.adapters import TARGET_MODULES

safetensors = pytest.importorskip("safetensors.numpy")

pytestmark = pytest.mark.usefixtures("as_a_user")
CONFIG = SMALL.replace(n_layers=2)


@pytest.fixture(scope="module")
def model():
    return model_of(CONFIG)


@pytest.fixture
def folder(tmp_path):
    return save_adapter(adapters_of(CONFIG), 1, tmp_path / "adapter", base="some/base")


def edit(folder, tensors=None, **fields):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    if tensors is not None:
        held = safetensors.load_file(folder / "adapter_model.safetensors")
        safetensors.save_file(tensors(held), folder / "adapter_model.safetensors")


def test_what_is_written_is_read_again(model, tmp_path):
    adapters = adapters_of(CONFIG)
    folders = [save_adapter(adapters, i, tmp_path / str(i)) for i in (2, 0, 1)]
    again = load_adapters(model, folders)
    jax.tree.map(np.testing.assert_array_equal, again, adapters.select([2, 0, 1]))


def test_adapters_of_experts_are_refused(tmp_path):
    model = model_of(SMALL.replace(n_layers=2))
    adapters = adapters_of(model.config, LoraConfig(ranks=(2,), target_modules=("q", "k")))
    folder = save_adapter(adapters, 0, tmp_path / "a")
    jax.tree.map(np.testing.assert_array_equal, load_adapters(model, folder), adapters)
    edit(folder, renamed("self_attn.q_proj", "mlp.experts.0.up_proj"))
    with pytest.raises(ValueError, match=r"experts.0.up_proj.*The adapter is of another kind"):
        load_adapters(model, folder)
    edit(folder, target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(ValueError, match=r"target_parameters=\['mlp.experts.gate_up_proj'\].* not computed here"):
        load_adapters(model, folder)


def test_names_shapes_and_fields_are_peft_s(folder):
    held = safetensors.load_file(folder / "adapter_model.safetensors")
    assert len(held) == 2 * (2 * 7 + 1)
    assert held["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (5, 24)
    assert held["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"].shape == (24, 5)
    assert held["base_model.model.lm_head.lora_B.weight"].shape == (101, 5)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (5, 2.5)
    assert set(config["target_modules"]) >= {"q_proj", "down_proj", "lm_head"}
    assert config["base_model_name_or_path"] == "some/base"


def test_a_layer_without_an_adapter_and_scales_that_are_rank_stabilised(model, folder, tmp_path):
    edit(folder, lambda held: {key: x for key, x in held.items() if "layers.0.mlp.up_proj" not in key})
    adapters = load_adapters(model, folder)
    np.testing.assert_array_equal(adapters.rank["up"][:, 0], [0, 5])
    np.testing.assert_array_equal(adapters.scale["up"][:, 0], [0, 0.5])
    again = load_adapters(model, save_adapter(adapters, 0, tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    edit(folder, use_rslora=True)
    np.testing.assert_allclose(load_adapters(model, folder).scale["q"][:, 0], 2.5 / 5**0.5, rtol=1e-6)


def renamed(old, new):
    return lambda held: {key.replace(old, new): x for key, x in held.items()}


TABLE = "base_model.model.lm_head.base_layer.weight"
UP_B = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
REFUSED = [
    ({"use_dora": True}, "use_dora=True in"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern=.*not computed here"),
    ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern=.*not computed here"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'.*other weights"),
    ({"peft_type": "IA3"}, "peft_type='IA3'"),
    ({"lora_alpha": None}, "lora_alpha in .*=None"),
    ({"use_rslora": "true"}, "use_rslora in .*='true': expected one of True, False"),
    ({"r": "5"}, "r in .*='5': expected a whole number"),
    ({"r": 4}, r"q_proj in .* shapes .*at the folder's r=4"),
    (renamed("q_proj.lora_A", "q_proj.lora_magnitude_vector"), r"q_proj in .* shapes \[\(48, 5\)\]"),
    (renamed("layers.1.", "layers.7."), r"holds .*layers.7.* in 2 layers alone"),
    (lambda held: {}, "holds no tensor"),
    (lambda held: held | {TABLE: np.zeros((101, 24), np.float32)}, "trained over another base"),
    (lambda held: {k: x for k, x in held.items() if "lm_head.lora_B" not in k}, "lm_head in .* shapes"),
    (lambda held: held | {UP_B: np.full_like(held[UP_B], np.inf)}, "mlp.up_proj in .* hold NaN or infinite numbers"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_adapters_of_another_kind_and_damaged_ones_are_refused_by_name(model, folder, change, words):
    """Fields of the config, or tensors."""
    if callable(change):
        edit(folder, change)
    else:
        edit(folder, **change)
    with pytest.raises(ValueError, match=words):
        load_adapters(model, folder)


def test_an_adapter_of_another_base_is_refused_and_a_repeated_head_of_this_one_is_passed_over(model, folder):
    for other in (CONFIG.replace(n_kv_heads=1), CONFIG.replace(d_model=32), CONFIG.replace(vocab_size=102)):
        with pytest.raises(ValueError, match="another base"):
            load_adapters(model_of(other), folder)
    edit(folder, lambda held: held | {TABLE: np.asarray(model.head)})
    assert set(load_adapters(model, folder).a) == set(TARGET_MODULES)


def test_folders_that_are_none_or_full(model, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no .*adapter_config.json: expected a folder written by"):
        load_adapters(model, tmp_path)
    with pytest.raises(FileExistsError, match="is not empty: nothing was written"):
        save_adapter(adapters_of(CONFIG), 0, folder)
    with pytest.raises(ValueError, match=r"select\(\[9\]\)"):
        save_adapter(adapters_of(CONFIG), 9, tmp_path / "nine")
    assert not (tmp_path / "nine").exists()
