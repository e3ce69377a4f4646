"""The files in which tokenizers come: Meta's `tokenizer.model`, Hugging Face's folders, GGUF."""

import base64
import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamem._extras import import_extra
from llamem._files import read_json
from llamem.llama.byte_level import byte_level_bpe, merges_of
from llamem.llama.gguf_files import open_gguf
from llamem.llama.gguf_tokenizer import tokenizer_of

# Special tokens by their meaning, as model families call them; the first that a vocabulary has is taken.
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")
DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<end_of_turn>")
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")  # what transformers gives to a template
_MAX_BYTES = 200_000_000  # of a JSON file; those of large vocabularies have some twenty million


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """What the files say of a tokenizer."""

    model: Any  # a _Tiktoken or a _HuggingFace, which have the same methods
    fingerprint: str  # of the vocabulary
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    names: Mapping[str, str] | None = None  # of special tokens by their use, where a folder says them: `bos_token` ...


def open_tokenizer(path: Path) -> TokenizerParts:
    """Open a tokenizer's file or a model's folder. Raise FileNotFoundError, or ValueError with the file's name."""
    file = path
    if path.is_dir():
        file = next((path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()), path)
    if not file.is_file():
        raise FileNotFoundError(
            f"There is no tokenizer file {str(file)!r}. Give a `tokenizer.model` in Meta's format, a Hugging Face "
            "`tokenizer.json`, a folder that holds one of them or a `.gguf` file, or no path at all for the Llama 3 "
            "tokenizer of the PyPI package `llama-models`."
        )
    if file.suffix == ".gguf":
        return _of_gguf(file)
    content = file.read_bytes()
    model = _HuggingFace.open(file) if file.suffix == ".json" else _Tiktoken(file, content)
    fingerprint = hashlib.blake2b(content, digest_size=8).hexdigest()
    if path.is_dir():
        return TokenizerParts(model, fingerprint, *_told_in(path, model.special))
    return TokenizerParts(model, fingerprint)


class _Tiktoken:
    """Meta's format: one base64 token and its rank per line, read by Meta's own class."""

    def __init__(self, file: Path, content: bytes):
        if not re.match(rb"[A-Za-z0-9+/=]+ \d+\s", content):
            raise ValueError(
                f"{str(file)!r} is not a tokenizer in Meta's format, which has one base64 token and its rank per line. "
                "A Hugging Face tokenizer must end in `.json`; a Git LFS pointer must be downloaded first."
            )
        import_extra("tiktoken", "the Llama 3 tokenizer")
        meta = import_extra("llama_models.llama3.tokenizer", "the Llama 3 tokenizer").Tokenizer(file)
        self._ranks, self._encoding = content, meta.model
        self.special, self.vocab_size = meta.special_tokens, meta.n_words

    def encode(self, text: str) -> Any:
        """Return the ids, a list or an array, of a text in which nothing is special."""
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def encode_special(self, text: str) -> list[int]:
        """Return the ids of a text whose special tokens are meant."""
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`: transformers has no other file with this format's special tokens."""
        lines = (line.split() for line in self._ranks.splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        vocab, merges = merges_of(ranks)
        model = byte_level_bpe(vocab, merges, "llama-bpe", special=list(self.special), bos="<|begin_of_text|>")
        model.save(str(folder / "tokenizer.json"))


class _HuggingFace:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, model: Any):
        self._model = model
        added = model.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in sorted(added.items()) if token.special}
        self.vocab_size = 1 + max(model.get_vocab(with_added_tokens=True).values())

    @classmethod
    def open(cls, file: Path) -> "_HuggingFace":
        tokenizers = import_extra("tokenizers", "a Hugging Face tokenizer")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{str(file)!r} is not a Hugging Face tokenizer: {error}.") from None

    def encode(self, text: str) -> Sequence[int]:
        self._model.encode_special_tokens = True  # as letters, that is
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_special(self, text: str) -> list[int]:
        self._model.encode_special_tokens = False
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        self._model.save(str(folder / "tokenizer.json"))


def _told_in(
    folder: Path, special: dict[str, int]
) -> tuple[int | None, tuple[int, ...], str | None, Mapping[str, str] | None]:
    """Return what a folder's small files say: the id of bos, those that end an answer, the chat template, the names."""

    def content(name: str) -> dict[str, Any]:
        return read_json(folder / name, _MAX_BYTES) if (folder / name).is_file() else {}

    told = content("special_tokens_map.json") | content("tokenizer_config.json")
    named = {name: told[name] for name in _NAMES if told.get(name)}
    names = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
    stops: list[Any] = [special.get(names.get("eos_token", ""))]
    for name in ("generation_config.json", "config.json"):
        ids = content(name).get("eos_token_id")
        stops += ids if isinstance(ids, list) else [ids]
    template = told.get("chat_template")
    if isinstance(template, list):  # several by name
        by_name = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = by_name.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    known = tuple(dict.fromkeys(i for i in stops if type(i) is int and i >= 0))
    return special.get(names.get("bos_token", "")), known, template, names if told else None


def _of_gguf(file: Path) -> TokenizerParts:
    gguf = open_gguf(file)
    model = _HuggingFace(tokenizer_of(gguf))
    ids = [gguf.get(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
    stops = tuple(dict.fromkeys(i for i in ids if i is not None))
    template = gguf.get("tokenizer.chat_template", None)
    fingerprint = hashlib.blake2b(model._model.to_str().encode(), digest_size=8).hexdigest()
    return TokenizerParts(model, fingerprint, gguf.get("tokenizer.ggml.bos_token_id", None), stops, template)
