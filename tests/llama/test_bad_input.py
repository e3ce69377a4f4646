"""What a user may pass to a model by mistake: refused in a sentence, or NaN where it cannot be known."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import SMALL, model_of, tokens_of

import llamem

# Without their types: what stands here is wrong on purpose.
Llama: Any = llamem.Llama
generate: Any = llamem.generate

pytestmark = pytest.mark.usefixtures("as_a_user")
V = SMALL.vocab_size


@pytest.fixture(scope="module")
def model():
    return model_of(SMALL.replace(n_layers=1))


BAD_TOKENS = [
    (jnp.arange(5), ValueError, r"shape \(5,\).*tokens\[None\]"),
    (jnp.zeros((2, 0), int), ValueError, r"T >= 1"),
    (jnp.zeros((2, 3)), ValueError, "float32: expected whole numbers"),
    ([[1, 2]], TypeError, r"\[\[1, 2\]\].*jnp.asarray"),
    (jnp.asarray([[-1, V]]), ValueError, rf"from -1 to {V}, but ids are 0 to {V - 1}: .* vocabulary has {V} entries"),
]


@pytest.mark.parametrize(("tokens", "error", "words"), BAD_TOKENS)
def test_tokens_that_are_none_are_refused_everywhere(model, tokens, error, words):
    cache = model.empty_cache(1, 8)
    calls = [model, model.hidden, lambda tokens: model.decode(tokens, cache)]
    if not isinstance(tokens, list):  # of which `generate` takes prompts of several lengths
        calls.append(lambda tokens: generate(model, tokens, 2, temperature=0))
    for call in calls:
        with pytest.raises(error, match=words):
            call(tokens)


def test_a_prompt_of_another_model_s_tokenizer_is_refused_by_its_name(model):
    with pytest.raises(ValueError, match=r"the token 128000 of .*tokenizer.model, '<\|begin_of_text\|>', is beyond"):
        llamem.generate_text(model, llamem.text.Tokenizer(), ["Hi"], 2)


@pytest.mark.parametrize("wrong", [-1, V, 2**31 - 1])
def test_an_unknown_id_gives_nan_and_no_other_sequence_sees_it(model, wrong):
    tokens = tokens_of(SMALL, T=5).at[0, 2].set(wrong)
    logits = np.asarray(jax.jit(lambda tokens: model(tokens))(tokens))
    assert np.isnan(logits[0, 2:]).all() and np.isfinite(logits[1]).all()


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint32])
def test_ids_of_a_narrow_type_are_the_same_ids(dtype):
    wide = Llama(SMALL.replace(n_layers=0, vocab_size=40_000), rngs=nnx.Rngs(0))
    tokens = tokens_of(SMALL, T=5)
    program = jax.jit(lambda tokens: wide.hidden(tokens))
    np.testing.assert_array_equal(program(tokens.astype(dtype)), program(tokens))


def test_decoding_beyond_the_cache_is_refused_or_nan(model):
    """20 + 20 tokens in a cache of 32: the places were moved back without a word, and the logits off by 0.12."""
    tokens = tokens_of(SMALL, T=20)
    _, cache = model.decode(tokens, model.empty_cache(2, 32))
    with pytest.raises(ValueError, match=r"32 places, 20 of them filled: 20 more .*max_len=40"):
        model.decode(tokens, cache)
    decode = jax.jit(lambda tokens, cache: model.decode(tokens, cache))
    logits, full = decode(tokens, cache)
    assert np.isnan(logits).all() and full.length == 40
    assert np.isnan(decode(tokens[:, :1], full)[0]).all(), "what follows is lost as well"
    assert np.isfinite(decode(tokens[:, :12], cache)[0]).all(), "32 places hold 32"
    with pytest.raises(ValueError, match=r"for 2 sequences .*model.empty_cache\(2"):
        model.decode(tokens, model.empty_cache(3, 32))
    with pytest.raises(TypeError, match=r"cache=None: expected model.empty_cache\(2"):
        Llama.decode(model, tokens, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": float("nan")}, "temperature=nan: expected a finite number of at least 0"),
        ({"top_p": 0.0}, r"top_p=0\.0: expected a finite number above 0 and at most 1"),
        ({"key": None}, "needs a key"),
        ({"max_new_tokens": 513}, "516 tokens, a prompt of 3 and 513 new ones.*max_seq_len=512"),
    ],
)
def test_options_of_generate_are_checked_first(model, options, words):
    with pytest.raises(ValueError, match=words):
        generate(model, tokens_of(SMALL, T=3), **{"max_new_tokens": 2, "key": jax.random.key(0), **options})


def test_what_does_not_belong_to_the_tokens_is_refused(model):
    for segments in (jnp.zeros((2, 4), int), jnp.zeros((2, 3)), 1):
        with pytest.raises(ValueError, match=r"segments_BT of shape .*expected an array of whole numbers"):
            model(tokens_of(SMALL, T=3), segments)
    with pytest.raises(ValueError, match=r"513 tokens.*max_seq_len=512"):
        model(tokens_of(SMALL, T=513))
    for args, options in (("tiny", {"rngs": nnx.Rngs(0)}), (SMALL, {"rngs": jax.random.key(0)})):
        with pytest.raises(TypeError, match=r"expected a llamem\.LlamaConfig, such as"):
            Llama(args, **options)
