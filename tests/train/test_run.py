"""The folder that a run leaves: read again by the package, and by transformers and peft in `make parity`."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from adapters import adapters_of
from flax import nnx
from models import SMALL, tokens_of

import llamem
from llamem import Llama, LoraConfig
from llamem.quantized import dequantize, quantize
from llamem.runs import Run
from llamem.text import Tokenizer

CONFIG = SMALL.replace(d_model=64, n_layers=2, n_heads=4, head_dim=16, d_ff=96)  # blocks are of 32 numbers
TOKENS = tokens_of(CONFIG, T=7)
ROWS = [{"step": 1, "loss": 4.5, "val_loss": 4.75}, {"step": 2, "loss": 2.25, "val_loss": 3.5}]


def adapters(count):
    return adapters_of(CONFIG, LoraConfig(ranks=(4,) * count), size=0.1)


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, rngs=nnx.Rngs(0))


def test_weights_and_their_card(model, tmp_path):
    run = Run(model, ROWS, True, described={"data": "3 chats", "plan": "Plan()"})
    folder = run.save(tmp_path / "out", Tokenizer())
    np.testing.assert_array_equal(llamem.load_pretrained(folder)(TOKENS), model(TOKENS))
    assert Tokenizer(folder).encode("na so was") == Tokenizer().encode("na so was")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == list(Tokenizer().stop_ids)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags: [llamem]\n---\n")
    for line in ("| data | 3 chats |", "| steps | 2 |", "| loss on held-out data | 4.7500 at first, 3.5000 at last |"):
        assert line in card
    with pytest.raises(FileExistsError, match="not empty: nothing was written"):
        run.save(folder)


def test_adapters_one_and_several(model, tmp_path):
    for count in (1, 2):
        run = Run(model, ROWS, False, adapters(count))
        folder = run.save(tmp_path / f"of_{count}", base="me/mine")
        card = (folder / "README.md").read_text()
        assert "library_name: peft\nbase_model: me/mine\n" in card and "| steps | 2, not finished |" in card
        folders = [folder] if count == 1 else [folder / "adapter_0", folder / "adapter_1"]
        again, rows = llamem.load_adapters(model, folders), jnp.arange(2) % count
        assert run.adapters is not None
        found, expected = (one.on(model, rows)(TOKENS) for one in (again, run.adapters))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_an_adapter_is_added_into_the_numbers_of_blocks(model, tmp_path):
    blocks = quantize(model, "q4_0")
    run = Run(blocks, ROWS, True, adapters(1))
    folder = run.save(tmp_path / "merged", merge=True)
    assert "| what | weights, adapters added |" in (folder / "README.md").read_text()
    assert run.adapters is not None
    expected = run.adapters.on(dequantize(blocks))(TOKENS)
    np.testing.assert_allclose(llamem.load_pretrained(folder)(TOKENS), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(expected - blocks(TOKENS))).max() > 0.01


@pytest.mark.parametrize("count", [0, 2])
def test_only_one_adapter_is_merged(model, count, tmp_path):
    run = Run(model, ROWS, True, adapters(2) if count else None)
    with pytest.raises(ValueError, match=f"merge=True.*this run has {count}"):
        run.save(tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()
