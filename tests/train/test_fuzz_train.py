"""Wrong arguments for every public function of `llamem.train`: refused by the package itself, in its own words."""

from typing import Any

import numpy as np
import pytest
from fuzz import FUZZ, junk, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SMALL

import llamem
from llamem import train as package
from llamem.train.batches import Batches
from llamem.train.data import Corpus, read_documents, unigram_entropy

pytestmark = pytest.mark.usefixtures("as_a_user")
FEW = settings(FUZZ, max_examples=25)
untyped: Any = package
CONFIG = SMALL.replace(vocab_size=11, n_layers=1)
SETTINGS = package.TrainSettings(steps=1, batch_size=2, seq_len=4)
TOKENS = np.arange(40, dtype=np.uint32) % 11
TEXT = Corpus(TOKENS, TOKENS, 1, 11)
FIELDS = sorted(package.TrainSettings.__dataclass_fields__)


def with_one_wrong(data: st.DataObject, good: dict[str, Any]) -> dict[str, Any]:
    """The good arguments, with one of them replaced by junk."""
    name = data.draw(st.sampled_from(sorted(good)))
    return {**good, name: data.draw(junk())}


@FEW
@given(st.dictionaries(st.sampled_from(FIELDS), junk(), min_size=1, max_size=3))
def test_settings(fields):
    words = refused(untyped.TrainSettings, **fields)
    assert words or all(type(value) in (int, float) for value in fields.values())
    assert not words or any(name in words for name in fields)


@FEW
@given(st.data())
def test_batches(data):
    good = {"tokens": TOKENS, "batch_size": 2, "seq_len": 4, "seed": 0, "vocab_size": 11}
    if not refused(lambda kwargs: Batches(**kwargs), arguments := with_one_wrong(data, good)):
        batches = Batches(**arguments)
        step = data.draw(junk())
        refused(batches.batch_at, step) or batches.batch_at(step)


@FEW
@given(st.data())
def test_entropy_and_tokenizers(data):
    refused(lambda kwargs: unigram_entropy(**kwargs), with_one_wrong(
        data, {"train": TOKENS, "heldout": TOKENS, "vocab_size": 11}
    ))  # fmt: skip
    for call in (untyped.Tokenizer, untyped.load_corpus, read_documents):
        try:
            refused(call, data.draw(junk().filter(lambda value: value is not None)))
        except (FileNotFoundError, IsADirectoryError) as error:
            assert "There is no" in str(error)


@FEW
@given(junk())
def test_the_corpus_s_other_arguments(value):
    if value is not None:
        assert refused(untyped.load_corpus, tokenizer=value)
    if not isinstance(value, float):
        assert refused(untyped.load_corpus, heldout_fraction=value)


@FEW
@given(st.data())
def test_a_run_is_refused_before_anything_is_written(data):
    good = {"config": CONFIG, "corpus": TEXT, "settings": SETTINGS, "output_dir": "never", "plan": llamem.Plan(),
            "on_change": "refuse"}  # fmt: skip
    arguments = with_one_wrong(data, good)
    wrong = [name for name in good if arguments[name] is not good[name]]
    if wrong == ["output_dir"] and isinstance(arguments["output_dir"], str):
        return
    words = refused(untyped.train, **arguments)
    assert wrong[0] in words


@FEW
@given(st.data())
def test_what_makes_a_step(data):
    good = {"config": CONFIG, "settings": SETTINGS}
    for call in (untyped.abstract_state, untyped.abstract_step, untyped.make_train_step, untyped.init_state):
        arguments = with_one_wrong(data, good)
        assert refused(call, **arguments), "junk was taken"
    assert refused(untyped.make_model, **with_one_wrong(data, good))
