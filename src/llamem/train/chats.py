"""Chats to batches: a file of conversations, the assistant's tokens marked, packed to whole sequences."""

import bisect
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, UInt32

from jaxmem.common.checks import check_number, check_whole, few, show
from llamem.text.tokenizer import Tokenizer
from llamem.train.chat_records import read_record, records_of
from llamem.train.data import Shuffled, are_held_out, check_vocabulary, fingerprint
from llamem.train.plain_step import IGNORED


class Chat(NamedTuple):
    """The tokens of one conversation, and which of them the assistant wrote: those that a loss is for."""

    ids: UInt32[np.ndarray, " tokens"]
    wrote: Bool[np.ndarray, " tokens"]


@dataclass(frozen=True)
class Chats:
    """Conversations to train on, and others that are held out."""

    train: tuple[Chat, ...]
    heldout: tuple[Chat, ...]
    vocab_size: int
    tokenizer: Tokenizer | None = None

    def batches(
        self, batch_size: int, seq_len: int, seed: int = 0, vocab_size: int | None = None
    ) -> "tuple[PackedBatches, PackedBatches | None]":
        """Return the batches to train on, in the order of `seed`, and those held out, None where nothing is."""
        size, more = (batch_size, seq_len), {"vocab_size": vocab_size, "tokenizer": self.tokenizer}
        heldout = PackedBatches(self.heldout, *size, 0, **more) if self.heldout else None
        return PackedBatches(self.train, *size, seed, **more), heldout

    @property
    def described(self) -> str:
        """How much there is, in words."""
        return f"{len(self.train):,} chats, {len(self.heldout):,} held out"

    def fingerprints(self) -> dict[str, str]:
        """Return short names for the tokens of the two parts."""
        parts = {"training data": self.train, "held-out data": self.heldout}
        return {name: fingerprint(array for chat in chats for array in chat) for name, chats in parts.items()}


_Source = str | os.PathLike | Sequence[Mapping[str, Any]]


def load_chats(
    source: _Source,
    tokenizer: Tokenizer | None = None,
    *,
    heldout_fraction: float = 0.1,
    heldout: _Source | int | float | None = None,
) -> Chats:
    """Return the chats of a JSONL file, as tokens by the tokenizer's chat template; the assistant's turns are marked.

    Each line is a chat, `{"messages": [{"role": ..., "content": ...}, ...]}` with at least one turn of the assistant,
    or `{"prompt": "...", "completion": "..."}`, which is one question of the user's and its answer. `source` may also
    be a list of such objects. `tokenizer`: of the model that is trained, `Tokenizer(folder)`; by default Llama 3's.
    A template that writes the day gives other tokens tomorrow: for a run that goes on then, fix it,
    `Tokenizer(folder, today=...)`.

    Beside the messages a record may have `tools`, a `system` text and `chat_template_kwargs`, which the template gets,
    and in a message `tool_calls`, `reasoning_content` and whatever else it reads; `weight`, `train`, `training`,
    `trainable`, `loss_mask` or `loss` of 0 say that a turn is not trained. A field that only tells something about a
    chat (`id`, `source` ...) is named in a warning. Any other is refused by name, and so is one of which the template
    writes nothing: nothing is left out silently.

    Whole chats are held out, about `heldout_fraction` of them and at least one, chosen by a hash of their tokens, equal
    ones together. `heldout`: a file or a list of your own instead, or 0: all chats of `source` are trained on, and a
    run has no validation loss.

    Raise FileNotFoundError for a missing file; ValueError for no chat, for one text alone of which one is to be held
    out, and, with file, line and what was expected, for a line that holds none or is not read whole.
    """
    check_number("heldout_fraction", heldout_fraction, above=0, below=1)
    if heldout is not None and (isinstance(heldout, bool) or (isinstance(heldout, int | float) and heldout != 0)):
        raise ValueError(
            f"load_chats(heldout={heldout!r}): expected a file or a list of chats, or 0 for none. A share of the chats "
            f"is heldout_fraction={heldout!r}."
        )
    tokenizer = tokenizer or Tokenizer()
    chats = _tokens_of(source, tokenizer)
    texts = [chat.ids.tobytes() for chat in chats]
    if len(set(texts)) < 2 and (heldout is None or not chats):
        least = "at least two, one of them to hold out (heldout=0 holds none)" if heldout is None else "at least one"
        raise ValueError(f"{show(source)} has {len(set(texts))} different chats: expected {least}.")
    if heldout is not None:
        own = () if isinstance(heldout, int | float) else _tokens_of(heldout, tokenizer)
        return Chats(tuple(chats), tuple(own), tokenizer.vocab_size, tokenizer)
    room = min(len(chats) - 1, max(1, round(heldout_fraction * len(chats))))
    held = are_held_out(texts, [1] * len(chats), room)
    train, out = (tuple(c for c, is_held in zip(chats, held, strict=True) if is_held == part) for part in (False, True))
    return Chats(train, out, tokenizer.vocab_size, tokenizer)


def _tokens_of(source: _Source, tokenizer: Tokenizer) -> list[Chat]:
    """Return each chat's tokens. Raise ValueError, with file and line, for a record that is not read whole."""
    chats, about = [], set()
    for where, record in records_of(source):
        try:
            read = read_record(record)
            chat = Chat(*tokenizer.chat(read.messages, tools=read.tools, **read.names))
        except (ValueError, RecursionError) as error:
            what = f"{show(record)} is nested too deeply." if isinstance(error, RecursionError) else error
            raise ValueError(f"{where}: {what} Nothing was loaded.") from None
        if not chat.wrote.any():
            raise ValueError(f"{where}: no turn of the assistant that is trained, so there is nothing to learn.")
        about |= set(read.about)
        chats.append(chat)
    if about:
        what = f"in {source}" if isinstance(source, str | os.PathLike) else "of the chats"
        warnings.warn(f"the fields {few(sorted(about))} {what} are not read: they stand in no text.", stacklevel=3)
    return chats


class PackedBatches(Shuffled):
    """Chats packed to sequences of `seq_len` tokens, with the number of the chat that each token belongs to.

    Every chat stands whole in one sequence, its targets are the assistant's tokens (-100 elsewhere), and by their
    segments chats in one sequence do not see each other. What is longer than `seq_len` is cut at its end, and left out
    where no token of the assistant is left: `cut` says how much and why. `chats` are those that are left, and `rows`
    says which of them stand in each of the `num_sequences` sequences. They come as those of `Batches`.

    Raise ValueError for sizes below one, for an id outside the vocabulary, and where no chat is left.
    """

    def __init__(
        self,
        chats: Sequence[Chat],
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        *,
        vocab_size: int | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self.seq_len = T = check_whole("seq_len", seq_len)
        fitting = [Chat(chat.ids[: T + 1], chat.wrote[: T + 1]) for chat in chats]
        self.chats = [chat for chat in fitting if chat.wrote[1:].any()]
        self.cut = _what_is_cut(chats, self.chats, T)
        if not self.chats:
            raise ValueError(f"no chat has a token of the assistant among its first {T} tokens. Take a longer seq_len.")
        check_vocabulary((chat.ids for chat in self.chats), vocab_size, tokenizer)
        self.rows = _pack([len(chat.ids) - 1 for chat in self.chats], T)
        super().__init__(len(self.rows), batch_size, seed)

    def batch_at(
        self, step: int, rows: slice = slice(None)
    ) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"]]:
        """Return inputs, targets and segments of a step's batch; `rows`: of some of its sequences. Padding is 0."""
        numbers = self.sequences_of(step, rows)
        shape = len(numbers), self.seq_len
        inputs_BT, segments_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        targets_BT = np.full(shape, IGNORED, np.int32)
        for row, number in enumerate(numbers):
            end = 0
            for segment, i in enumerate(self.rows[number], start=1):
                ids, wrote = self.chats[i]
                start, end = end, end + len(ids) - 1
                place = slice(start, end)
                inputs_BT[row, place], segments_BT[row, place] = ids[:-1], segment
                targets_BT[row, place] = np.where(wrote[1:], ids[1:].astype(np.int32), IGNORED)
        return inputs_BT, targets_BT, segments_BT


def _pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return which chats share a sequence: the longest first, each into the fullest sequence that has room for it."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # what is free in each sequence, and its number, in rising order
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(left, (lengths[i], -1))
        free, row = left.pop(at) if at < len(left) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        bisect.insort(left, (free - lengths[i], row))
    return rows


def _what_is_cut(chats: Sequence[Chat], left: Sequence[Chat], T: int) -> str:
    """Return how many of the assistant's tokens are not trained on, and why; nothing where all are."""
    lost = sum(int(chat.wrote[1:].sum()) for chat in chats) - sum(int(chat.wrote[1:].sum()) for chat in left)
    if not lost:
        return ""
    longer = sum(len(chat.ids) > T + 1 for chat in chats)
    return (
        f"{lost:,} of the assistant's tokens are cut: {longer} of {len(chats)} chats are longer than seq_len={T}, and "
        f"{len(chats) - len(left)} of them have no answer before that and are left out."
    )
