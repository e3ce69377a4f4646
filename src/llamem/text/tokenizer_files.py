"""Tokenizers out of files: Meta's format, a Hugging Face folder or `tokenizer.json`, a GGUF file.

A GGUF file holds a vocabulary and merges: a byte-level BPE is made from them.
"""

import base64
import dataclasses
import functools
import hashlib
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.common.checks import import_extra, show
from jaxmem.common.files import read_json
from llamem.text.gguf_reader import Gguf, open_gguf

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before pairs are merged, by `tokenizer.ggml.pre`; None is GPT-2's way, after digits one by one.
# Source: llama.cpp, src/llama-vocab.cpp.
PATTERNS = {
    "smollm": None,
    "llama-bpe": LLAMA3_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
}
LLAMA3_CUTS = ("llama-bpe", "llama3")


def byte_level_bpe(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    cut: str,
    *,
    special: Sequence[str],
    added: Sequence[str] = (),
    bos: str | None = None,
) -> Any:
    """Return a `tokenizers.Tokenizer` that cuts text by `PATTERNS[cut]`; `bos` stands before what it encodes itself.

    `special` and `added` are whole tokens wherever they stand; those that `vocab` lacks take the ids after it.
    """
    tokenizers = import_extra("tokenizers", "a byte-level tokenizer")
    # Llama 3 takes a whole word that is a token before it merges any of its parts.
    bpe = tokenizers.models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=cut in LLAMA3_CUTS)
    model = tokenizers.Tokenizer(bpe)
    if cut == "qwen2":
        model.normalizer = tokenizers.normalizers.NFC()
    pre, pattern = tokenizers.pre_tokenizers, PATTERNS[cut]
    first = pre.Split(tokenizers.Regex(pattern), behavior="isolated") if pattern else pre.Digits(individual_digits=True)
    model.pre_tokenizer = pre.Sequence([first, pre.ByteLevel(add_prefix_space=False, use_regex=pattern is None)])
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    model.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in added])
    if bos is not None:
        whole = {"single": f"{bos} $A", "pair": f"{bos} $A {bos}:1 $B:1"}
        ids = [(bos, model.token_to_id(bos))]
        model.post_processor = tokenizers.processors.TemplateProcessing(special_tokens=ids, **whole)
    return model


def merges_of(ranks: Mapping[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and the merges of tokens by their rank, as tiktoken has them: bytes written as letters.

    tiktoken joins whichever neighbours make the token of lowest rank: every way to part a token in two is a merge.
    """
    letters = _letters()
    text = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in parts if a in ranks and b in ranks]
        merges += [(text[a], text[b]) for a, b in sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    return {text[token]: rank for token, rank in ranks.items()}, merges


def _letters() -> list[str]:
    """Return the letter of each of the 256 bytes: printable ones stand for themselves (GPT-2, `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


# Special tokens by their meaning, as model families call them; the first that a vocabulary has is taken.
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")
DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<end_of_turn>")
GENERATION = "generation_config.json"
MAX_CONFIG_BYTES = 10_000_000  # of a `config.json` or what stands beside it; real ones have a few thousand
_MAX_BYTES = 200_000_000  # of a JSON file; those of large vocabularies have some twenty million
_CHUNK = 400_000  # characters that are encoded at once


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """What the files say of a tokenizer."""

    model: Any  # a _Tiktoken or a _HuggingFace, which have the same methods
    fingerprint: str  # of the vocabulary, and of what stands before a text
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by name; one alone is "default"
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
    said = read_folder(path) if path.is_dir() else FolderSays()
    content = file.read_bytes()
    if file.suffix != ".json":
        model, fingerprint = _Tiktoken(file, content), hashlib.blake2b(content, digest_size=8).hexdigest()
    else:
        model = _HuggingFace(_of_json(file, said), said.special)
        fingerprint = model.fingerprint(content)
        said.warn_of_begin(model.begins, path)
    stops = [model.special.get(said.names.get("eos_token", "")), *said.stop_ids]
    return TokenizerParts(
        model,
        fingerprint,
        model.special.get(said.names.get("bos_token", "")),
        tuple(dict.fromkeys(i for i in stops if i is not None)),
        said.chat_templates,
        said.names if said.has_names else None,
    )


@dataclasses.dataclass(frozen=True)
class FolderSays:
    """What a folder's small files say of its tokenizer, as transformers 5 reads them."""

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    special: tuple[str, ...] = ()  # tokens that have a name, or are listed as special
    added: Mapping[int, dict[str, Any]] = dataclasses.field(
        default_factory=dict
    )  # tokens by id, an AddedToken's fields
    stop_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    add_bos: bool | None = None
    has_names: bool = False
    decides_flags: bool = False  # whether those of `added` stand for those of a tokenizer.json

    def warn_of_begin(self, begins: Sequence[int], folder: Path) -> None:
        """Warn where `add_bos_token` says another thing than the `tokenizer.json`, which is followed."""
        if self.add_bos is not None and self.add_bos != bool(begins):
            warnings.warn(
                f"tokenizer_config.json in {folder} says add_bos_token={str(self.add_bos).lower()}, and the "
                f"post-processor of its tokenizer.json puts {list(begins) or 'nothing'} before a text. That is what is "
                "done here and by transformers 5; transformers 4 does the other in some classes. Correct one of them.",
                stacklevel=5,
            )


def read_folder(folder: Path) -> FolderSays:
    """Return what a folder's small files say. Raise ValueError, with a file's name, for what cannot be read.

    `added_tokens_decoder` in tokenizer_config.json stands for two older files, which are read where it is missing.
    """

    def content(name: str) -> dict[str, Any]:
        return read_json(folder / name, _MAX_BYTES) if (folder / name).is_file() else {}

    fields = content("tokenizer_config.json")
    added = fields.get("added_tokens_decoder")
    if added is None:
        fields = fields | content("special_tokens_map.json")
    tokens = {name: _text_of(value) for name, value in fields.items() if name.endswith("_token")}
    names = {name: token for name, token in tokens.items() if token}
    extra = fields.get("extra_special_tokens") or fields.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, Mapping) else extra
    special = tuple(dict.fromkeys([*names.values(), *filter(None, map(_text_of, extra))]))
    if added is None:
        ids = content("added_tokens.json").items()
        added = {
            i: {"content": token, "special": token in special, "normalized": token not in special} for token, i in ids
        }
    try:
        by_id = {int(i): {"content": str(token["content"]), **token} for i, token in added.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"the added tokens that {folder} lists, {show(added)}, cannot be read: expected ids and tokens in "
            "added_tokens.json or in `added_tokens_decoder` of tokenizer_config.json. Download the files again."
        ) from None
    stops: list[Any] = []
    for name in (GENERATION, "config.json"):
        ids = content(name).get("eos_token_id")
        stops += ids if isinstance(ids, list) else [ids]
    add_bos = fields.get("add_bos_token")
    return FolderSays(
        names,
        special,
        by_id,
        tuple(i for i in stops if type(i) is int and i >= 0),
        _chat_templates(folder, fields.get("chat_template")),
        add_bos if isinstance(add_bos, bool) else None,
        bool(fields),
        fields.get("added_tokens_decoder") is not None,
    )


def _text_of(token: Any) -> str | None:
    """Return a token's text: files have it alone, or as an AddedToken's fields."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _chat_templates(folder: Path, said: Any) -> dict[str, str]:
    """Return a folder's chat templates by name: files of their own come before what tokenizer_config.json says."""
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / "chat_template.jinja"} | {file.stem: file for file in more}
    if found := {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}:
        return found
    if isinstance(said, list):
        said = {entry.get("name"): entry.get("template") for entry in said if isinstance(entry, Mapping)}
    by_name = said if isinstance(said, Mapping) else {"default": said} if said else {}
    if not all(isinstance(text, str) for pair in by_name.items() for text in pair):
        raise ValueError(
            f"chat_template in {folder / 'tokenizer_config.json'} is {show(said)}: expected a Jinja template, or "
            "several by their names."
        )
    return dict(by_name)


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
        self.begins = (meta.bos_id,)  # what stands before a text

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text in which nothing is special.

        It is cut as Meta's own class cuts it: tiktoken's regular expressions fail on far longer strings.
        """
        chunks = (text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK))
        ids = [self._encoding.encode_to_numpy(chunk, disallowed_special=()) for chunk in chunks]
        return np.concatenate([np.empty(0, np.uint32), *ids])

    def encode_special(self, text: str) -> list[int]:
        """Return the ids of a text whose special tokens are meant."""
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)

    def save(self, folder: Path) -> Any:
        """Write `tokenizer.json`, and return it; transformers has no other file with this format's special tokens."""
        lines = (line.split() for line in self._ranks.splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        vocab, merges = merges_of(ranks)
        model = byte_level_bpe(vocab, merges, "llama-bpe", special=list(self.special), bos="<|begin_of_text|>")
        model.save(str(folder / "tokenizer.json"))
        return model


# Where no tokenizer joins what stands before and after: a long text is cut here.
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")


class _HuggingFace:
    """A `tokenizers.Tokenizer`; `named`: tokens that are special by their use, whatever the tokenizer says of them.

    A text whose special tokens are meant and one in which they are letters are encoded by two objects: the library has
    a switch for that, and a thread that turned it would turn it for all.
    """

    def __init__(self, model: Any, named: Collection[str] = ()):
        # As transformers: what the last call of a training program has left in the file says nothing of this one.
        model.no_truncation()
        model.no_padding()
        self._model, self._added = model, dict(sorted(model.get_added_tokens_decoder().items()))
        self.special = {t.content: i for i, t in self._added.items() if t.special or t.content in named}
        self.vocab_size = 1 + max(model.get_vocab(with_added_tokens=True).values())
        whole = model.encode("a", add_special_tokens=True)
        of_ours = zip(whole.ids, whole.special_tokens_mask, strict=True)
        self.begins = tuple(i for i, _ in itertools.takewhile(lambda pair: pair[1], of_ours))

    @functools.cached_property
    def _letters(self) -> Any:
        letters = type(self._model).from_str(self._model.to_str())
        letters.add_special_tokens(list(self.special))
        letters.encode_special_tokens = True
        return letters

    def fingerprint(self, content: bytes) -> str:
        """Return a short name of this tokenizer, whose file has this content."""
        beside = repr((self._added, sorted(self.special), self.begins)).encode()
        return hashlib.blake2b(content + beside, digest_size=8).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text in which nothing is special: those that it has whole, made part by part."""
        parts, begin = [np.empty(0, np.uint32)], 0
        while begin < len(text):
            cut = _BETWEEN_WORDS.search(text, begin + _CHUNK)
            part = text[begin : cut.start() if cut else len(text)]
            ids = after_line(self._encode, part) if begin else self._encode(part)
            parts.append(np.asarray(ids, np.uint32))
            begin += len(part)
        return np.concatenate(parts)

    def _encode(self, text: str) -> list[int]:
        return self._letters.encode(text, add_special_tokens=False).ids

    def encode_special(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> Any:
        self._model.save(str(folder / "tokenizer.json"))
        return self._model


def after_line(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Return the ids of a text that another stands before: tokenizers like Llama 2's put a space before a first."""
    line, both = encode("\n"), encode("\n" + text)
    return both[len(line) :] if both[: len(line)] == line else encode(text)


def _of_json(file: Path, said: FolderSays) -> Any:
    """Return a `tokenizer.json` as a `tokenizers.Tokenizer`, with the tokens that the folder's other files add.

    Flags of a token in `added_tokens_decoder` of tokenizer_config.json come before those of the `tokenizer.json`.

    Raise ValueError for one that is none, and where a token would get another id than those files say.
    """
    tokenizers = import_extra("tokenizers", "a Hugging Face tokenizer")
    try:
        model = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{str(file)!r} is not a Hugging Face tokenizer: {error}.") from None
    known = {token.content for token in model.get_added_tokens_decoder().values()}
    decided = {token["content"] for token in said.added.values()} if said.decides_flags else set()
    more = {token["content"]: token for _, token in sorted(said.added.items())}
    more |= {token: {"content": token, "special": True} for token in said.special if token not in more}
    try:
        model.add_tokens([tokenizers.AddedToken(**more[token]) for token in more if token not in known - decided])
    except TypeError as error:
        raise ValueError(f"the tokens that files beside {file} add cannot be read: {error}.") from None
    for i, token in said.added.items():
        if (other := model.token_to_id(token["content"])) != i:
            raise ValueError(
                f"{file} gives {token['content']!r} the id {other}, and a file beside it (`added_tokens_decoder` in "
                f"tokenizer_config.json, or added_tokens.json) {i}: the model was trained with one of them. Correct or "
                "remove the other file."
            )
    return model


_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens


def tokenizer_of(gguf: Gguf) -> Any:
    """Return the file's tokenizer as a `tokenizers.Tokenizer`.

    Raise ValueError for one of another kind than byte-level BPE, or one that cuts text in a way not known here: it
    would give other tokens than the model was trained on.
    """
    kind, cut = gguf.get("tokenizer.ggml.model"), gguf.get("tokenizer.ggml.pre", "(none)")
    if kind != "gpt2" or cut not in PATTERNS:
        raise ValueError(
            f"{gguf.file} has a tokenizer of the kind {kind!r} that cuts text as {cut!r}: only byte-level BPE ('gpt2') "
            f"cut as {', '.join(map(repr, PATTERNS))} is read here. Pass the tokenizer.json of the model that the "
            "file was made from."
        )
    tokens, kinds = gguf.get("tokenizer.ggml.tokens"), gguf.get("tokenizer.ggml.token_type")
    pairs = [tuple(merge.split(" ")) for merge in gguf.get("tokenizer.ggml.merges")]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise ValueError(f"{gguf.file} has the token {twice!r} twice: whose id is meant? Convert the model again.")
    special, added = (
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == of_kind]
        for of_kind in (_CONTROL, _USER_DEFINED)
    )
    special += [tokens[i] for i in _named_ids(gguf) if tokens[i] not in special]  # whatever its kind, as llama.cpp
    added = [token for token in added if token not in special]
    begins = gguf.get("tokenizer.ggml.add_bos_token", cut in LLAMA3_CUTS)
    bos = _token_id(gguf, "bos")
    first = tokens[bos] if begins and bos is not None else None
    return byte_level_bpe(ids, pairs, cut, special=special, added=added, bos=first)


def _token_id(gguf: Gguf, name: str) -> int | None:
    """Return the id that a file gives to a token by what it is for, "bos"; None where it gives none."""
    i, count = gguf.get(f"tokenizer.ggml.{name}_token_id", None), len(gguf.get("tokenizer.ggml.tokens"))
    if i is not None and not 0 <= i < count:
        raise ValueError(f"{gguf.file} has {count:,} tokens, and names { ({name: i}) }: no such ids. Convert it again.")
    return i


def _named_ids(gguf: Gguf) -> tuple[int, ...]:
    """Return the ids of the tokens that a file names as the ends of a text or of a turn."""
    ids = [_token_id(gguf, name) for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _of_gguf(file: Path) -> TokenizerParts:
    gguf = open_gguf(file)
    whole = tokenizer_of(gguf)
    model = _HuggingFace(whole)
    template = gguf.get("tokenizer.chat_template", None)
    return TokenizerParts(
        model,
        model.fingerprint(whole.to_str().encode()),
        _token_id(gguf, "bos"),
        _named_ids(gguf),
        {"default": template} if template else {},
    )
