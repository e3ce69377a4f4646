"""Batches that are a function of the step number: of a stream of text, and for several adapters."""

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer

from jaxmem.checks import check_whole
from llamem.text.tokenizer import Tokenizer


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
    padding: a sequence may begin in one document and end in another, with `<eos> <bos>` between.

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


class AdapterBatches:
    """Batches for several adapters: row `i` is of adapter and source `i % A`, whose number comes third."""

    def __init__(self, sources: Sequence[BatchSource]):
        self._sources = list(sources)
        self.batch_size = sum(source.batch_size for source in sources)
        self.num_sequences = len(self._sources) * min(source.num_sequences for source in sources)

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
