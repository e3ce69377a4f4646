"""The Llama 3 tokenizer from a package on the machine, or another one from a file."""

import base64
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from llamem._extras import import_extra

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPECIAL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
    *[f"<|reserved_special_token_{i}|>" for i in range(2, 246)],
]
_CHUNK = 400_000  # characters; the regular expression engine under tiktoken fails on far longer strings


class Tokenizer:
    """The Llama 3 tokenizer (128,256 entries), or any other one from a file.

    Without a path it is Meta's own `tokenizer.model` out of the PyPI package `llama-models`: no download, no account.
    `path` names another `tokenizer.model` in Meta's format, or a Hugging Face `tokenizer.json`.

    Text never becomes a special token: `<|end_of_text|>` written in a document is encoded letter by letter.
    Errors: ImportError when the package is missing, FileNotFoundError or ValueError for an unusable file.
    Source: meta-llama/llama-models, `llama3/tokenizer.py`.
    """

    bos_id: int | None
    eos_id: int
    vocab_size: int

    def __init__(self, path: str | os.PathLike | None = None):
        if not isinstance(path, str | os.PathLike | None):
            raise TypeError(f"Tokenizer({path!r}): expected the path of a tokenizer's file, or nothing.")
        file = _llama3_file() if path is None else Path(path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(
                f"There is no tokenizer file {str(file)!r}. Give a `tokenizer.model` in Meta's format or a Hugging "
                "Face `tokenizer.json`, or no path at all for the Llama 3 tokenizer of the PyPI package `llama-models`."
            )
        content = file.read_bytes()
        self.fingerprint = hashlib.blake2b(content, digest_size=8).hexdigest()
        if file.suffix == ".json":
            self._open_hugging_face(file)
        else:
            self._open_tiktoken(file, content)

    def _open_tiktoken(self, file: Path, content: bytes) -> None:
        tiktoken = import_extra("tiktoken", "the Llama 3 tokenizer")
        try:
            pairs = (line.split() for line in content.splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        except ValueError as error:
            raise ValueError(
                f"{str(file)!r} is not a tokenizer in Meta's format, which has one base64 token and its rank per line "
                f"({error}). A Hugging Face tokenizer must end in `.json`; a Git LFS pointer must be downloaded first."
            ) from None
        special = {name: len(ranks) + i for i, name in enumerate(_LLAMA3_SPECIAL)}
        model = tiktoken.Encoding("llama3", pat_str=_LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self._encode_chunk = lambda text: model.encode_to_numpy(text, disallowed_special=())
        self._decode = model.decode
        self.vocab_size = len(ranks) + len(special)
        self.bos_id, self.eos_id = special["<|begin_of_text|>"], special["<|end_of_text|>"]

    def _open_hugging_face(self, file: Path) -> None:
        tokenizers = import_extra("tokenizers", "a Hugging Face tokenizer")
        try:
            model = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{str(file)!r} is not a Hugging Face tokenizer ({error}). Write it again with its save(), or give a "
                "`tokenizer.model` in Meta's format."
            ) from None
        model.encode_special_tokens = True

        def first_known(names: list[str]) -> int | None:
            return next((i for name in names if (i := model.token_to_id(name)) is not None), None)

        self.bos_id = first_known(["<|begin_of_text|>", "<s>", "<bos>"])
        eos_id = first_known(["<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>"])
        if eos_id is None:
            raise ValueError(
                f"{str(file)!r} has none of the end-of-document tokens <|end_of_text|>, <|endoftext|>, </s>, <eos>, so "
                "documents could not be told apart. Add one of them to the tokenizer's `added_tokens`."
            )
        self.eos_id = eos_id
        self._encode_chunk = lambda text: model.encode(text, add_special_tokens=False).ids
        self._decode = lambda ids: model.decode(ids, skip_special_tokens=False)
        self.vocab_size = 1 + max(model.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Token ids of a text, with the begin- and end-of-document tokens where asked for."""
        return self.encode_to_numpy(text, bos=bos, eos=eos).tolist()

    def encode_to_numpy(self, text: str, *, bos: bool = False, eos: bool = False) -> Integer[np.ndarray, " tokens"]:
        """Like `encode`, as a uint32 array."""
        if not isinstance(text, str):
            raise TypeError(f"encode({type(text).__name__} {str(text)[:60]!r}): expected a str.")
        before = [self.bos_id] if bos and self.bos_id is not None else []
        after = [self.eos_id] if eos else []
        chunks = [self._encode_chunk(text[i : i + _CHUNK]) for i in range(0, len(text), _CHUNK)]
        return np.concatenate([np.asarray(part, np.uint32) for part in (before, *chunks, after)])

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " tokens"]) -> str:
        """Text of token ids, special tokens written out; bytes that are not UTF-8 become U+FFFD.

        Errors: ValueError for an id outside the vocabulary, TypeError for what are no whole numbers.
        """
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise TypeError(
                f"decode({str(ids)[:60]}): expected the ids of one text, whole numbers [tokens]; has the shape "
                f"{array.shape} and the type {array.dtype}."
            )
        ids = array.tolist()
        wrong = [i for i in ids if not 0 <= i < self.vocab_size]
        if wrong:
            raise ValueError(
                f"Token id {wrong[0]} is outside this tokenizer's vocabulary of {self.vocab_size:,} entries. If a "
                "model made it, the model's vocabulary is larger than the tokenizer's: mask the logits beyond it."
            )
        return self._decode(ids)


def _llama3_file() -> Path:
    # find_spec of a top-level package locates it without importing what it would pull in.
    spec = importlib.util.find_spec("llama_models")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "The Llama 3 tokenizer comes with the PyPI package `llama-models`, which is not installed: "
            '`pip install "llamem[train]"`. Or pass the path of your own `tokenizer.model` or `tokenizer.json`.'
        )
    return Path(spec.submodule_search_locations[0]) / "llama3" / "tokenizer.model"
