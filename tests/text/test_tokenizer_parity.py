"""Folders of tokenizers against transformers, which opens them its own way. `make parity` runs it."""

import pytest
from tokenizer_folders import BASES, STATES, WORDS, Folder, of_llama_tokenizer

from llamem.text import Tokenizer

transformers = pytest.importorskip("transformers")

CHAT = [
    {"role": "user", "content": "Who wrote 1984?"},
    {"role": "assistant", "content": "George Orwell."},
    {"role": "user", "content": "the lazy dog"},
    {"role": "assistant", "content": "No."},
]
TEXT = "I'LL pay $1234567 for\tünï  the <tool> quick <call> fox\r\n\n  now 漢字 🦙"
CASES = [(base, state) for base in BASES for state in STATES]


@pytest.mark.filterwarnings("ignore:tokenizer_config.json in")
@pytest.mark.parametrize(("base", "state"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_folder_is_opened_as_transformers_opens_it(base, state, tmp_path):
    folder = Folder(base)
    state(folder)
    path = folder.write(tmp_path / "m")
    mine, theirs = Tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
    for text in (TEXT, WORDS, "", "a"):
        assert mine.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert mine.encode(text, bos=True) == theirs(text)["input_ids"], text
    meant = f"{folder.begin}a b{folder.end}c <|tool|> <|pad|>{folder.end}"
    assert mine._model.encode_special(meant) == theirs(meant, add_special_tokens=False)["input_ids"]
    assert (mine.stop_ids[0], mine.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert mine.vocab_size == len(theirs)
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    asked = theirs.apply_chat_template(CHAT, **options)
    ids, wrote = mine.chat(CHAT)
    assert mine.decode(ids) == theirs.decode(asked["input_ids"])
    assert ids.tolist() == asked["input_ids"] and wrote.astype(int).tolist() == list(asked["assistant_masks"])
    # What we write of it is read alike.
    again = Tokenizer(mine.save(tmp_path / "again"))
    assert (again.encode(TEXT, bos=True), again.stop_ids) == (mine.encode(TEXT, bos=True), mine.stop_ids)
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "again")(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
    )


def test_a_class_of_transformers_that_builds_the_tokenizer_anew(tmp_path):
    """What it does after a special token differs: we, and transformers 4, read the file to the letter."""
    folder = Folder("llama2")
    of_llama_tokenizer(folder)
    path = folder.write(tmp_path / "m")
    mine, theirs = Tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
    for text in (TEXT, WORDS, "a"):
        assert mine.encode(text, bos=True) == theirs(text)["input_ids"], text
