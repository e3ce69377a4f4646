import sys

import numpy as np
import pytest

from llamem.text.tokenizer import Tokenizer
from llamem.train.chats import load_chats
from llamem.train.data import AdapterBatches, Batches, load_corpus, read_documents, unigram_entropy

TEXT = "def f(x):\n    return x ** 2  # ünï-çødé 漢字 🦙 1234567\r\n\n\n\t  we're HERE'LL <|end_of_text|> end\n   "


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer()


class ByteTokenizer(Tokenizer):
    """Stands in for the real one where its 128,256 entries would only slow a test down."""

    def __init__(self, fingerprint="bytes"):
        self.bos_id, self.eos_id, self.vocab_size, self.fingerprint = 256, 257, 258, fingerprint

    def encode_to_numpy(self, text, *, bos=False, eos=False):
        return np.array([256] * bos + list(text.encode()) + [257] * eos, np.uint32)


def test_llama3_tokenizer_agrees_with_metas_own_class(tokenizer):
    theirs = pytest.importorskip("llama_models.llama3.tokenizer").Tokenizer.get_instance()
    for text in ["", TEXT, TEXT * 20_000, " " * 9_999 + "x"]:
        ids = tokenizer.encode(text, bos=True, eos=True)
        assert ids == theirs.encode(text, bos=True, eos=True)
        assert tokenizer.decode(ids) == "<|begin_of_text|>" + text + "<|end_of_text|>"
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (128_256, theirs.bos_id, theirs.eos_id)
    for name, token_id in theirs.special_tokens.items():
        assert tokenizer.decode([token_id]) == name


def test_the_default_corpus_is_on_this_machine_and_names_no_path_of_it():
    documents = read_documents()
    assert 3_000_000 < sum(map(len, documents)) < 30_000_000
    assert documents == read_documents()
    assert any("class JSONDecoder" in text for text in documents)
    assert not any("class TestCase(unittest" in text for text in documents)
    assert not any(sys.base_prefix in text for text in documents if len(sys.base_prefix) > len("/usr/local"))


def test_files_and_folders(tmp_path):
    for name, text in {
        "b.txt": "second",
        "a.md": "first",
        "sub/test/c.py": "third",
        "d.png": "no",
        ".git/e.txt": "no",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "empty.txt").write_text(" \n")
    assert read_documents(tmp_path) == ["first", "second", "third"]
    assert read_documents(str(tmp_path / "d.png")) == ["no"]


def test_unusable_corpora(tmp_path):
    for load in (load_corpus, load_chats):
        with pytest.raises(ValueError, match="heldout_fraction=5: expected a finite number above 0 and below 1"):
            load(tmp_path, heldout_fraction=5)
    with pytest.raises(FileNotFoundError, match=r"There is no corpus 'no/such/folder'.*hf:owner/name"):
        read_documents("no/such/folder")
    with pytest.raises(ValueError, match="is empty"):
        read_documents(tmp_path)
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt' is not UTF-8 text: .* 0xe9 in position 3"):
        read_documents(tmp_path)


def test_hugging_face_datasets(monkeypatch):
    asked = []

    class Datasets:
        @staticmethod
        def load_dataset(*name, split):
            asked.append((*name, split))
            return {"text": ["one", "two"]}

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert read_documents("hf:some/stories:plain") == read_documents("hf:some/stories") == ["one", "two"]
    assert asked == [("some/stories", "plain", "train"), ("some/stories", None, "train")]


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(
            f"document {i} " + "".join(rng.choice(list("abc \n"), rng.integers(1, 400)))
        )
    return folder


def test_corpus_holds_every_document_once_and_holds_whole_ones_out(folder, tmp_path):
    corpus = load_corpus(folder, ByteTokenizer(), heldout_fraction=0.2, cache_dir=tmp_path / "cache")

    def documents(stream):
        parts = np.split(stream, np.flatnonzero(stream == 256)[1:])
        assert all(part[0] == 256 and part[-1] == 257 for part in parts)
        return [bytes(part[1:-1].astype(np.uint8)).decode() for part in parts]

    train, heldout = documents(corpus.train), documents(corpus.heldout)
    assert sorted(train + heldout) == sorted(read_documents(folder)) and corpus.num_documents == 40
    assert train == [d for d in read_documents(folder) if d in train], "the order is that of the files"
    assert 0.1 < sum(map(len, heldout)) / sum(map(len, train + heldout)) <= 0.2


def test_equal_documents_are_all_trained_or_all_held_out(tmp_path):
    for name, text in (("a", "ab\n" * 5), ("b", "ab\n" * 5), ("c", "cd\n" * 100)):
        (tmp_path / f"{name}.txt").write_text(text)
    corpus = load_corpus(tmp_path, ByteTokenizer(), heldout_fraction=0.05, cache_dir=tmp_path / "cache")
    assert (len(corpus.train), len(corpus.heldout)) == (302, 2 * 17)
    (tmp_path / "c.txt").unlink()
    corpus = load_corpus(tmp_path, ByteTokenizer(), heldout_fraction=0.2, cache_dir=tmp_path / "cache")
    assert (len(corpus.train), len(corpus.heldout)) == (2 * 14, 5)


def test_a_single_document_gives_up_its_end(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    corpus = load_corpus(tmp_path / "book.txt", ByteTokenizer(), heldout_fraction=0.1, cache_dir=tmp_path / "cache")
    assert bytes(corpus.heldout[1:8].astype(np.uint8)).startswith(b"line 9") and len(corpus.heldout) > 50
    (tmp_path / "word.txt").write_text("ab")
    corpus = load_corpus(tmp_path / "word.txt", ByteTokenizer(), cache_dir=tmp_path / "cache")
    assert list(corpus.train) == [256, ord("a"), 257] and list(corpus.heldout) == [256, ord("b"), 257]


def test_the_cache_is_used_and_keyed_by_text_tokenizer_and_split(folder, tmp_path, monkeypatch):
    cache = tmp_path / "cache"

    def load(fraction=0.1, tokenizer=None):
        return load_corpus(folder, tokenizer or ByteTokenizer(), heldout_fraction=fraction, cache_dir=cache)

    first = load()
    assert isinstance(first.train, np.memmap) and first.train.dtype == np.uint32
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode_to_numpy", None)
        np.testing.assert_array_equal(load().train, first.train)
    (file,) = cache.glob("*/train.bin")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2 - 1])
    with pytest.raises(ValueError, match=rf"train.bin has {len(whole) // 2 - 1:,} bytes, and {len(whole):,} were writ"):
        load()
    file.write_bytes(whole)
    load(0.2)
    load(tokenizer=ByteTokenizer("other"))
    (folder / "00.txt").write_text("another text")
    load()
    assert len(list(cache.iterdir())) == 4


def test_a_failure_half_way_leaves_nothing_to_load(folder, tmp_path, monkeypatch):
    whole = ByteTokenizer.encode_to_numpy

    def fails(self, text, **kwargs):
        if text.startswith("document 33"):
            raise KeyboardInterrupt
        return whole(self, text, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ByteTokenizer, "encode_to_numpy", fails)
        load_corpus(folder, ByteTokenizer(), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_of_two_that_write_the_same_corpus_at_once_the_first_to_end_stays(folder, tmp_path, monkeypatch):
    """In the middle of writing it, another one writes it all."""
    encode, cache, theirs = ByteTokenizer.encode_to_numpy, tmp_path / "cache", []

    def overtaken(self, text, **options):
        if text.startswith("document 7 "):
            monkeypatch.setattr(ByteTokenizer, "encode_to_numpy", encode)
            theirs.append(load_corpus(folder, ByteTokenizer(), cache_dir=cache))
        return encode(self, text, **options)

    monkeypatch.setattr(ByteTokenizer, "encode_to_numpy", overtaken)
    mine = load_corpus(folder, ByteTokenizer(), cache_dir=cache)
    (winner,), (_,) = theirs, cache.iterdir()
    for part in ("train", "heldout"):
        np.testing.assert_array_equal(getattr(mine, part), getattr(winner, part))


@pytest.mark.parametrize(("num_tokens", "batch_size", "seq_len"), [(101, 3, 7), (8, 5, 7), (1000, 4, 16)])
def test_every_sequence_appears_once_per_epoch_with_shifted_targets(num_tokens, batch_size, seq_len):
    tokens = np.arange(num_tokens, dtype=np.uint32) * 3
    batches = Batches(tokens, batch_size, seq_len, seed=5)
    steps = 4 * batches.num_sequences
    rows = [row for step in range(steps) for row in zip(*batches.batch_at(step), strict=True)]
    assert batches.batch_at(0).inputs_BT.shape == (batch_size, seq_len)
    assert batches.batch_at(0).inputs_BT.dtype == np.int32
    for inputs, targets in rows:
        np.testing.assert_array_equal(targets, inputs + 3)
        np.testing.assert_array_equal(inputs, inputs[0] + 3 * np.arange(seq_len))
    starts = [int(inputs[0]) // 3 for inputs, _ in rows]
    whole = [i * seq_len for i in range((num_tokens - 1) // seq_len)]
    epochs = [starts[i : i + len(whole)] for i in range(0, len(starts), len(whole))]
    assert all(sorted(epoch) == whole for epoch in epochs[: 4 * batch_size])
    if len(whole) > 10:
        assert epochs[0] != whole and epochs[0] != epochs[1], "shuffled, and again for each epoch"


def test_a_batch_depends_on_seed_and_step_alone():
    tokens = np.random.default_rng(1).integers(0, 99, 5_000).astype(np.uint32)

    def make(seed=3):
        return Batches(tokens, 3, 11, seed)

    one = make()
    in_order = [one.batch_at(step) for step in range(400)]
    for step in [399, 0, 151, 152, 7]:  # 454 sequences: the second epoch begins within step 151
        np.testing.assert_array_equal(make().batch_at(step), in_order[step])
        shares = [make().batch_at(step, slice(i, i + 1)) for i in range(3)]  # as hosts read them
        np.testing.assert_array_equal(np.concatenate(shares, axis=1), in_order[step])
    assert not np.array_equal(make(4).batch_at(0), in_order[0])


def test_adapters_batches_go_on_after_what_was_read_of_each_source():
    def make(batch_size):
        tokens = np.arange(500, dtype=np.uint32)
        return AdapterBatches([Batches(tokens + 500 * i, batch_size // 2, 7, seed=i) for i in range(2)])

    def rows(batches, steps):
        parts = [batches.batch_at(step) for step in steps]
        first, _, adapter = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return [first[adapter == i, 0].tolist() for i in range(2)]

    before, after = make(6), make(4)
    after.continue_after(3, before.read_before(3))
    both = [a + b for a, b in zip(rows(before, range(3)), rows(after, range(3, 8)), strict=True)]
    assert both == [row[:19] for row in rows(make(2), range(19))] and after.read_before(8) == 38


@pytest.mark.usefixtures("as_a_user")
def test_unusable_batches():
    tokens = np.arange(10, dtype=np.uint32)
    with pytest.raises(ValueError, match="10 tokens, but one sequence of seq_len 10 needs 11"):
        Batches(tokens, 1, 10)
    with pytest.raises(ValueError, match="batch_size=0: expected"):
        Batches(tokens, 0, 3)
    with pytest.raises(ValueError, match="seq_len=True: expected a whole number"):
        Batches(tokens, 1, True)
    with pytest.raises(ValueError, match="reach from 0 to 9, but the vocabulary has 9 entries"):
        Batches(tokens, 1, 3, vocab_size=9)
    Batches(tokens, 1, 9, vocab_size=10)
    with pytest.raises(TypeError, match=r"Cannot cast .*float64"):
        Batches(tokens / 2, 1, 3).batch_at(0)


def test_unigram_entropy():
    train, heldout = np.array([0, 0, 0, 2], np.uint32), np.array([0, 2, 1], np.uint32)
    p = [4 / 8, 1 / 8, 2 / 8, 1 / 8]
    assert unigram_entropy(train, heldout, 4) == pytest.approx(-np.mean(np.log([p[0], p[2], p[1]])))
    with pytest.raises(ValueError, match="reach from 0 to 2, but the vocabulary has 2"):
        unigram_entropy(train, heldout, 2)
