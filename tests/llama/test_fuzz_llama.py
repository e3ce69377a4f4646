"""Wrong arguments for every public function of `llamem.llama`: refused by the package itself, in its own words."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fuzz import FUZZ, junk, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SMALL

import llamem

pytestmark = pytest.mark.usefixtures("as_a_user")
FEW = settings(FUZZ, max_examples=25)
untyped: Any = llamem
CONFIG = SMALL.replace(vocab_size=11, n_layers=1)
SCALING = llamem.llama.RopeScaling
HF = CONFIG.replace(rope_scaling=SCALING(8.0)).to_hf()


@pytest.fixture(scope="module")
def model():
    return llamem.Llama(CONFIG, rngs=nnx.Rngs(0))


def is_tokens(value):
    is_array = isinstance(value, (jax.Array, np.ndarray))
    return is_array and value.ndim == 2 and value.shape[1] and jnp.issubdtype(value.dtype, jnp.integer)


@FEW
@given(fields=st.dictionaries(st.sampled_from(sorted(CONFIG.__dataclass_fields__)), junk(), min_size=1, max_size=3))
def test_configs(fields):
    refused(CONFIG.replace, **fields)


@FEW
@given(fields=st.dictionaries(st.sampled_from(sorted(SCALING.__dataclass_fields__)), junk(), min_size=1))
def test_scaling(fields):
    refused(untyped.llama.RopeScaling, **{"factor": 8.0, **fields})


@FEW
@given(changes=st.dictionaries(st.sampled_from(sorted(HF)), junk(), min_size=1, max_size=2))
def test_config_files(changes):
    words = refused(llamem.LlamaConfig.from_hf, {**HF, **changes})
    scaling = {**HF["rope_scaling"], **dict.fromkeys(list(HF["rope_scaling"])[1:2], next(iter(changes.values())))}
    refused(llamem.LlamaConfig.from_hf, {**HF, "rope_scaling": scaling})
    assert words or changes


@FEW
@given(value=junk())
def test_names_and_files(value):
    if not isinstance(value, (str, dict)):
        assert refused(untyped.LlamaConfig.from_hf, value)
        assert refused(untyped.load_pretrained, value)
    assert refused(untyped.LlamaConfig.from_name, value)
    assert refused(untyped.save_pretrained, value, "never")
    assert refused(untyped.Llama, value, rngs=nnx.Rngs(0))
    assert refused(untyped.Llama, CONFIG, rngs=value)


@FEW
@given(fields=st.dictionaries(st.sampled_from(sorted(llamem.Plan.__dataclass_fields__)), junk(), min_size=1))
def test_plans(fields):
    refused(untyped.Plan, **fields)


@FEW
@given(value=junk())
def test_models(model, value):
    words = refused(model, value)
    assert words or is_tokens(value)
    assert refused(model.hidden, jnp.zeros((2, 3), int), value) or value is None or value.shape == (2, 3)
    assert refused(model.decode, jnp.zeros((2, 3), int), value)
    assert refused(model.empty_cache, value, value) or value in (1, 3, 2)


@FEW
@given(data=st.data())
def test_generation(model, data):
    good = {"prompts": jnp.zeros((1, 2), int), "max_new_tokens": 1, "temperature": 0.5, "top_p": 0.9,
            "key": jax.random.key(0)}  # fmt: skip
    name = data.draw(st.sampled_from(sorted(good)))
    value = data.draw(junk())
    words = refused(llamem.generate, model, **{**good, name: value})
    sizes = {"key": "key", "prompts": "prompt"}
    assert not words or sizes.get(name, name) in words or "new ones, are more than" in words
    assert refused(untyped.generate, value, good["prompts"], 1)
