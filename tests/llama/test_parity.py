"""Against transformers, on models made on the spot, in more shapes than tests/golden holds. `make parity` runs it."""

import jax.numpy as jnp
import numpy as np
import pytest
from make_golden import MODELS, make, numbers, tokens_of
from test_pretrained import assert_same_numbers

import llamem

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SHAPES = {
    "as stored": {},
    "mha": {"num_key_value_heads": 4},
    "one kv head, three layers": {"num_key_value_heads": 1, "num_hidden_layers": 3},
    "tied the other way": {"tie_word_embeddings": None},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_every_number(tmp_path, name, shape):
    changes = dict(SHAPES[shape])
    if "tie_word_embeddings" in changes:
        changes["tie_word_embeddings"] = not MODELS[name][1]["tie_word_embeddings"]
    theirs = make(name, tmp_path / "theirs", seed=3, **changes)
    for options in ({"remat": "nothing"}, {"mode": "nested", "remat": "minimal", "attention": "tiled"}):
        mine = assert_same_numbers(tmp_path / "theirs", numbers(theirs, tokens_of(2)), **options)
    folder = llamem.save_pretrained(mine, tmp_path / "mine", max_shard_bytes=20_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for a, b in zip(theirs.state_dict().items(), again.state_dict().items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1]), a[0]


@pytest.mark.parametrize("name", ["llama31", "qwen3"])
def test_padding_and_packed_documents(tmp_path, name):
    theirs = make(name, tmp_path / "m", seed=4)
    mine = llamem.load_pretrained(tmp_path / "m")
    tokens = tokens_of(5)
    lengths = (11, 22, 7)
    segments = np.repeat(np.arange(3), lengths)
    places = np.concatenate([np.arange(n) for n in lengths])
    visible = (segments[:, None] == segments) & np.tri(40, dtype=bool)
    mask = torch.where(torch.from_numpy(visible), 0.0, torch.finfo(torch.float32).min).expand(2, 1, 40, 40)
    with torch.no_grad():
        packed = theirs(
            torch.from_numpy(tokens), attention_mask=mask, position_ids=torch.from_numpy(places)[None]
        ).logits
        padded = theirs(
            torch.from_numpy(tokens), attention_mask=torch.from_numpy((np.arange(40) < 31)[None] * np.ones((2, 1), int))
        ).logits
    segments_BT = jnp.broadcast_to(jnp.asarray(segments), (2, 40))
    for implementation in ("xla", "tiled"):
        mine.plan = mine.plan.replace(attention=implementation)
        got = np.asarray(mine(jnp.asarray(tokens), segments_BT))
        np.testing.assert_allclose(got, packed.numpy(), rtol=1e-4, atol=1e-4 * np.abs(packed.numpy()).max())
        got = np.asarray(mine(jnp.asarray(tokens), (jnp.arange(40) >= 31)[None].repeat(2, 0).astype(int)))[:, :31]
        np.testing.assert_allclose(got, padded.numpy()[:, :31], rtol=1e-4, atol=1e-4 * np.abs(padded.numpy()).max())
