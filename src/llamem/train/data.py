"""Text to tokens, read and tokenised once, and batches of them that are a function of the step number."""

import hashlib
import json
import os
import sysconfig
import tokenize
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer

from jaxmem.common.checks import check_number, check_whole, import_extra
from jaxmem.common.files import cache_folder, whole_folder
from llamem.text.tokenizer import Tokenizer
from llamem.train.plain_step import IGNORED


class Batch(NamedTuple):
    """Inputs and the token that follows each of them, both `[batch_size, seq_len]`."""

    inputs_BT: Int32[np.ndarray, "B T"]
    targets_BT: Int32[np.ndarray, "B T"]


@runtime_checkable
class BatchSource(Protocol):
    """Batches that are a function of the step number, once it is said where they go on."""

    batch_size: int
    num_sequences: int

    def batch_at(self, step: int, rows: slice = slice(None)) -> tuple[np.ndarray, ...]:
        """Return the arrays of a step's batch, `[rows, ...]` each; `rows`: only these of its sequences are read."""
        ...

    def read_before(self, step: int) -> int:
        """Return how many sequences the steps before this one read."""
        ...

    def continue_after(self, step: int, read: int) -> None:
        """Let the steps before this one have read so many sequences, in batches of whatever size."""
        ...


class Shuffled:
    """The order in which `num_sequences` sequences come: each once per epoch, and each epoch in an order of its own."""

    def __init__(self, num_sequences: int, batch_size: int, seed: int):
        self.num_sequences, self.batch_size = num_sequences, check_whole("batch_size", batch_size)
        self.seed = check_whole("seed", seed, at_least=0)
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self._first = 0  # the sequence with which step 0 begins, or would have in batches of today's size

    def read_before(self, step: int) -> int:
        """Return how many sequences the steps before this one read."""
        return self._first + step * self.batch_size

    def continue_after(self, step: int, read: int) -> None:
        """Let the steps before this one have read so many sequences, in batches of whatever size."""
        self._first = read - step * self.batch_size

    def sequences_of(self, step: int, rows: slice) -> list[int]:
        """Return the numbers of the sequences of a step's batch, counted from 0, or of some of its rows."""
        return [self._sequence(n) for n in range(self.read_before(step), self.read_before(step + 1))[rows]]

    def _sequence(self, number: int) -> int:
        epoch, position = divmod(number, self.num_sequences)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.num_sequences)
        return int(self._order[position])


class Batches(Shuffled):
    """Fixed-length sequences from a stream of tokens, in an order fixed by the seed.

    `batch_at(step)` depends on the step number alone, so that is all a training run must remember to resume; in batches
    of another size it goes on after the sequences that were read, `continue_after`.
    Every sequence appears once per epoch, and each epoch has an order of its own. Documents follow each other without
    padding: a sequence may begin in one document and end in another, with `<eos>` between, and `<bos>` where the
    tokenizer begins a text with one.

    tokens: ids, `[num_tokens]`, for instance `Corpus.train`.
    vocab_size: where given, every id is checked against it now rather than silently clamped inside the model;
    `tokenizer`, whose ids they are, is then named.
    Raise ValueError for fewer than `seq_len + 1` tokens, for sizes below one, for an id outside the vocabulary.
    """

    def __init__(
        self,
        tokens: Integer[np.ndarray, " num_tokens"],
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        *,
        vocab_size: int | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self.tokens, self.seq_len = tokens, check_whole("seq_len", seq_len)
        super().__init__((len(tokens) - 1) // self.seq_len, batch_size, seed)
        if not self.num_sequences:
            raise ValueError(
                f"The corpus has {len(tokens):,} tokens, but one sequence of seq_len {seq_len:,} needs {seq_len + 1:,} "
                "(a target for its last input). Take a shorter seq_len or a larger corpus."
            )
        check_vocabulary([tokens], vocab_size, tokenizer)

    def batch_at(self, step: int, rows: slice = slice(None)) -> Batch:
        """Return the batch of a step, counted from 0; `rows`: only these of its sequences, and only they are read.

        Which sequences a batch has does not depend on who reads them: hosts that share its rows out read each of them
        once, however many hosts there are.
        """
        starts = self.seq_len * np.asarray(self.sequences_of(step, rows), np.int64)
        windows = self.tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int32, casting="same_kind")
        return Batch(windows[:, :-1], windows[:, 1:])


class Once:
    """The sequences of a source, each once: after the last one come rows of which no target counts."""

    def __init__(self, source: BatchSource):
        self._source, self.batch_size, self.num_sequences = source, source.batch_size, source.num_sequences
        self.read_before, self.continue_after = source.read_before, source.continue_after

    def batch_at(self, step: int, rows: slice = slice(None)) -> tuple[np.ndarray, ...]:
        """Return the arrays of a step's batch, `[rows, ...]` each."""
        inputs_BT, targets_BT, *rest = self._source.batch_at(step, rows)
        left = self.num_sequences - step * self.batch_size
        is_new_B = np.arange(self.batch_size)[rows] < left
        return inputs_BT, np.where(is_new_B[:, None], targets_BT, np.int32(IGNORED)), *rest


class AdapterBatches:
    """Batches for several adapters: row `i` is of adapter and source `i % A`, whose number comes third."""

    def __init__(self, sources: Sequence[BatchSource]):
        self._sources = list(sources)
        self.batch_size = sum(source.batch_size for source in sources)
        self.num_sequences = len(self._sources) * max(source.num_sequences for source in sources)

    def batch_at(self, step: int, rows: slice = slice(None)) -> tuple[np.ndarray, ...]:
        """Return inputs, targets, the adapter of each sequence `[rows]`, and what else the sources give."""
        A, numbers = len(self._sources), range(self.batch_size)[rows]
        parts = [self._sources[0].batch_at(step, slice(0))]  # of no row: for no rows at all
        parts += [self._sources[i % A].batch_at(step, slice(i // A, i // A + 1)) for i in numbers]
        inputs_BT, targets_BT, *rest = (np.concatenate(part) for part in zip(*parts, strict=True))
        return inputs_BT, targets_BT, np.asarray([i % A for i in numbers], np.int32), *rest

    def read_before(self, step: int) -> int:
        """Return how many sequences the steps before this one read, of all sources."""
        return sum(source.read_before(step) for source in self._sources)

    def continue_after(self, step: int, read: int) -> None:
        """Let the steps before this one have read so many sequences, of each source as many."""
        for source in self._sources:
            source.continue_after(step, read // len(self._sources))


def check_vocabulary(arrays: Iterable[np.ndarray], vocab_size: int | None, tokenizer: Tokenizer | None = None) -> None:
    """Raise ValueError for ids outside a vocabulary of that size, None: of any; `tokenizer`: of which they are."""
    arrays = list(arrays)
    least, most = min(int(array.min()) for array in arrays), max(int(array.max()) for array in arrays)
    if vocab_size is not None and tokenizer is not None:
        tokenizer.check_table([most], vocab_size)
    if vocab_size is not None and not 0 <= least <= most < vocab_size:
        raise ValueError(
            f"The tokens reach from {least} to {most}, but the vocabulary has {vocab_size:,} entries (ids 0 to "
            f"{vocab_size - 1:,}). Model and tokenizer do not belong together: take the model's own tokenizer."
        )


def fingerprint(arrays: Iterable[np.ndarray]) -> str:
    """Return a short name for arrays of tokens: how many there are and a checksum of them."""
    count = crc = 0
    for array in arrays:
        count, crc = count + len(array), zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, crc)
    return f"{count} tokens, crc {crc:08x}"


STANDARD_LIBRARY = "python-standard-library"
HUGGING_FACE = "hf:"
TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".py", ".tex", ".html", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".rs"}
)

# Tables of numbers, other people's packages and tests teach a language model little.
_NOT_LIBRARY = frozenset(
    {"dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
)
_CACHE_FORMAT = 2  # raise it when the tokens written for the same text change


def read_documents(source: str | os.PathLike = STANDARD_LIBRARY) -> list[str]:
    """Read the documents of a corpus, in an order that depends on nothing but the corpus.

    `source` is one of
    - "python-standard-library": the source and docstrings of the running Python's standard library, without tests
      (about 9 MB, licensed under the Python Software Foundation License 2); needs no download;
    - a text file (one document) or a folder (one document for each text file in it, at any depth), in UTF-8;
    - "hf:owner/name" or "hf:owner/name:config": column `text` of the split `train` of a Hugging Face dataset.

    Errors: FileNotFoundError for a missing path, ValueError for bytes that are not UTF-8 or for a corpus without text.
    """
    name = os.fspath(source)
    path = Path(name).expanduser()
    if name == STANDARD_LIBRARY:
        documents = _standard_library()
    elif name.startswith(HUGGING_FACE):
        repository, _, config = name.removeprefix(HUGGING_FACE).partition(":")
        datasets = import_extra("datasets", "a Hugging Face dataset")
        documents = list(datasets.load_dataset(repository, config or None, split="train")["text"])
    elif path.suffix == ".jsonl":
        raise ValueError(
            f"{name!r} holds JSON and not prose: a model would learn to write JSON. Chats are read by "
            "llamem.train.load_chats; of other records write the text alone into a file."
        )
    elif name and path.exists():
        documents = [read_utf8(file) for file in ([path] if path.is_file() else _files(path, TEXT_SUFFIXES))]
    else:
        raise FileNotFoundError(
            f"There is no corpus {name!r}. Give a text file, a folder of text files, "
            f"{HUGGING_FACE + 'owner/name'!r} for a Hugging Face dataset, or {STANDARD_LIBRARY!r}, which is on "
            "every machine that runs Python. A relative path starts at this process's working directory."
        )
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(
            f"The corpus {name!r} is empty: no document in it holds any text. Folders are searched for files ending in "
            f"{', '.join(sorted(TEXT_SUFFIXES))}; name a file by its own path to have it read whatever its ending."
        )
    return documents


def _standard_library() -> list[str]:
    root, documents = Path(sysconfig.get_paths()["stdlib"]), []
    # `_sysconfigdata*` and `config-*/` hold the paths of the machine that built Python.
    built = ("_sysconfigdata", "config-")
    for file in _files(root, {".py"}, _NOT_LIBRARY):
        if not file.relative_to(root).as_posix().startswith(built):
            with tokenize.open(file) as handle:  # honours the file's own encoding line
                documents.append(handle.read())
    return documents


def _files(root: Path, suffixes: Iterable[str], skipped: Iterable[str] = ()) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(s for s in subfolders if s not in skipped and not s.startswith((".", "__pycache__")))
        yield from (Path(folder, name) for name in sorted(names) if Path(name).suffix in suffixes)


_NO_TEXT = {  # how files that hold no UTF-8 text begin, what they are, and what reads them
    b"PAR1": ("a Parquet file", 'its rows are datasets.load_dataset("parquet", data_files=..., split="train")'),
    b"\x1f\x8b": ("compressed by gzip", "gunzip it first"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unzstd it first"),
    b"\xff\xfe": ("text in UTF-16", "convert it, iconv -f utf-16 -t utf-8"),
    b"\xfe\xff": ("text in UTF-16", "convert it, iconv -f utf-16 -t utf-8"),
}


def read_utf8(file: Path) -> str:
    """Return the text of a file. Raise ValueError, with its name and what to do, where it is not UTF-8."""
    content = file.read_bytes()
    for mark, (what, remedy) in _NO_TEXT.items():
        if content.startswith(mark):
            raise ValueError(f"{str(file)!r} is not UTF-8 text: it is {what}; {remedy}.")
    if b"\0" in content[:4]:
        order = "utf-16be" if content.startswith(b"\0") else "utf-16le"
        raise ValueError(f"{str(file)!r} is not UTF-8 text: as UTF-16 it holds zeros; iconv -f {order} -t utf-8.")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8 text: {error}. Convert it: iconv -f latin1 -t utf-8.") from None


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus: two memory-mapped streams of uint32 ids, each document `encode(text, bos=True, eos=True)`."""

    train: Integer[np.ndarray, " train_tokens"]
    heldout: Integer[np.ndarray, " heldout_tokens"]
    num_documents: int
    vocab_size: int
    tokenizer: Tokenizer | None = None

    def batches(self, batch_size: int, seq_len: int, seed: int, vocab_size: int) -> "tuple[Batches, Batches]":
        """Return the batches to train on, in the order of `seed`, and those held out."""
        size, parts = (batch_size, seq_len), ((self.train, seed), (self.heldout, 0))
        train, heldout = (
            Batches(tokens, *size, seed, vocab_size=vocab_size, tokenizer=self.tokenizer) for tokens, seed in parts
        )
        return train, heldout

    @property
    def described(self) -> str:
        """How much there is, in words."""
        return f"{self.num_documents:,} documents, {len(self.train):,} tokens, {len(self.heldout):,} held out"

    def fingerprints(self) -> dict[str, str]:
        """Return short names for the two streams of tokens."""
        return {"training data": fingerprint([self.train]), "held-out data": fingerprint([self.heldout])}


def load_corpus(
    source: str | os.PathLike = STANDARD_LIBRARY,
    tokenizer: Tokenizer | None = None,
    *,
    heldout_fraction: float = 0.05,
    cache_dir: str | os.PathLike | None = None,
) -> Corpus:
    """Tokenise a corpus (see `read_documents`) once; every later call maps the same files into memory.

    Whole documents are held out, about `heldout_fraction` of the characters, chosen by a hash of their text, equal ones
    together; of a single document it is the end. The cache folder's name is a hash of the text, the tokenizer and the
    split, and it appears in one step when complete: a half-written one is never read, and two processes may race. The
    text itself is held in memory while it is tokenised.

    Default `cache_dir`: `corpora` under `$JAXMEM_CACHE`, or under `llamem` in `$XDG_CACHE_HOME` or `~/.cache`.
    """
    check_number("heldout_fraction", heldout_fraction, above=0, below=1)
    documents = read_documents(source)
    tokenizer = tokenizer or Tokenizer()
    digest = hashlib.blake2b(f"{_CACHE_FORMAT} {tokenizer.fingerprint} {heldout_fraction}".encode(), digest_size=12)
    for document in documents:
        digest.update(hashlib.blake2b(document.encode("utf-8", "surrogatepass")).digest())
    folder = Path(cache_dir or cache_folder("corpora")).expanduser() / digest.hexdigest()
    if not folder.is_dir():
        _write_cache(folder, documents, tokenizer, heldout_fraction)
    facts = json.loads((folder / "corpus.json").read_text())
    train, heldout = (_map_tokens(folder / f"{part}.bin", facts.get(f"{part}_bytes")) for part in ("train", "heldout"))
    return Corpus(train, heldout, facts["num_documents"], tokenizer.vocab_size, tokenizer)


def _map_tokens(file: Path, written: int | None) -> np.ndarray:
    """Map kept tokens into memory; `written` is how many bytes they had, None in a cache that does not say."""
    held = file.stat().st_size
    if written is not None and held != written:
        raise ValueError(
            f"{file} has {held:,} bytes, and {written:,} were written: the kept tokens are damaged. Delete "
            f"{file.parent}; they are made again from the text."
        )
    return np.memmap(file, np.dtype("<u4"), "r")


def _write_cache(folder: Path, documents: list[str], tokenizer: Tokenizer, heldout_fraction: float) -> None:
    try:
        with whole_folder(folder) as unfinished:
            train, heldout = _split(documents, heldout_fraction)
            for part, texts in (("train", train), ("heldout", heldout)):
                with open(unfinished / f"{part}.bin", "wb") as out, ThreadPoolExecutor() as pool:
                    for ids in pool.map(lambda text: tokenizer.encode_to_numpy(text, bos=True, eos=True), texts):
                        out.write(ids.astype("<u4").tobytes())
            sizes = {f"{part}_bytes": (unfinished / f"{part}.bin").stat().st_size for part in ("train", "heldout")}
            (unfinished / "corpus.json").write_text(json.dumps({"num_documents": len(documents), **sizes}))
    except OSError:
        if not folder.is_dir():  # else another process finished the same corpus first
            raise


def _split(documents: list[str], heldout_fraction: float) -> tuple[list[str], list[str]]:
    if len(set(documents)) == 1:
        text = documents[0]
        middle = text.rfind("\n", 1, int(len(text) * (1 - heldout_fraction))) + 1
        middle = middle or max(1, int(len(text) * (1 - heldout_fraction)))
        return [text[:middle]] * len(documents), [text[middle:]]
    sizes = [len(document) for document in documents]
    held = are_held_out([d.encode("utf-8", "surrogatepass") for d in documents], sizes, heldout_fraction * sum(sizes))
    train, heldout = ([d for d, out in zip(documents, held, strict=True) if out == wanted] for wanted in (False, True))
    return train, heldout


def are_held_out(texts: Iterable[bytes], sizes: Iterable[int], room: float) -> list[bool]:
    """Return which texts are held out, by their hash: those that have `room`, at least one; equal ones together."""
    names = [hashlib.blake2b(text).digest() for text in texts]
    size_of: Counter[bytes] = Counter()
    for name, size in zip(names, sizes, strict=True):
        size_of[name] += size
    chosen = set()
    for name in sorted(size_of):
        if size_of[name] <= room:
            chosen.add(name)
            room -= size_of[name]
    chosen = chosen or {min(sorted(size_of), key=size_of.__getitem__)}
    return [name in chosen for name in names]


def unigram_entropy(
    train: Integer[np.ndarray, " train_tokens"], heldout: Integer[np.ndarray, " heldout_tokens"], vocab_size: int
) -> float:
    """Return held-out tokens' cross-entropy, in nats each, under the training tokens' frequencies (counts plus one).

    What a model that looks at no context can reach: a validation loss above it has learned nothing about order.
    Raise ValueError for an id outside the vocabulary.
    """
    check_vocabulary([train, heldout], vocab_size)
    counts_V = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.mean(np.log(counts_V[heldout] / counts_V.sum())))
