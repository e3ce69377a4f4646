"""Text to token ids and back: the Llama 3 tokenizer from a package on the machine, or any model's from its files.

A GGUF file holds a vocabulary and merges: a byte-level BPE is made from them.
"""

import base64
import dataclasses
import datetime
import functools
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

from jaxmem.common.checks import check_whole, import_extra
from jaxmem.common.files import read_json, write_whole
from llamem.text.chat_messages import Message, check_messages, check_texts
from llamem.text.chat_template import LLAMA3_TEMPLATE, Render, assistant_spans, make_render, trained_spans
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
    special, added = (
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == of_kind]
        for of_kind in (_CONTROL, _USER_DEFINED)
    )
    begins = gguf.get("tokenizer.ggml.add_bos_token", cut in LLAMA3_CUTS)
    bos = gguf.get("tokenizer.ggml.bos_token_id", None) if begins else None
    return byte_level_bpe(ids, pairs, cut, special=special, added=added, bos=None if bos is None else tokens[bos])


# Special tokens by their meaning, as model families call them; the first that a vocabulary has is taken.
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>")
DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<end_of_turn>")
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")  # what transformers gives to a template
GENERATION = "generation_config.json"
MAX_CONFIG_BYTES = 10_000_000  # of a `config.json` or what stands beside it; real ones have a few thousand
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
        return TokenizerParts(model, fingerprint, *_small_files(path, model.special))
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


def _small_files(
    folder: Path, special: dict[str, int]
) -> tuple[int | None, tuple[int, ...], str | None, Mapping[str, str] | None]:
    """Return what a folder's small files say: the id of bos, those that end an answer, the chat template, the names."""

    def content(name: str) -> dict[str, Any]:
        return read_json(folder / name, _MAX_BYTES) if (folder / name).is_file() else {}

    fields = content("special_tokens_map.json") | content("tokenizer_config.json")
    named = {name: fields[name] for name in _NAMES if fields.get(name)}
    names = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
    stops: list[Any] = [special.get(names.get("eos_token", ""))]
    for name in ("generation_config.json", "config.json"):
        ids = content(name).get("eos_token_id")
        stops += ids if isinstance(ids, list) else [ids]
    template = fields.get("chat_template")
    if isinstance(template, list):  # several by name
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    known = tuple(dict.fromkeys(i for i in stops if type(i) is int and i >= 0))
    return special.get(names.get("bos_token", "")), known, template, names if fields else None


def _of_gguf(file: Path) -> TokenizerParts:
    gguf = open_gguf(file)
    model = _HuggingFace(tokenizer_of(gguf))
    ids = [gguf.get(f"tokenizer.ggml.{name}_token_id", None) for name in ("eos", "eot", "eom")]
    stops = tuple(dict.fromkeys(i for i in ids if i is not None))
    template = gguf.get("tokenizer.chat_template", None)
    fingerprint = hashlib.blake2b(model._model.to_str().encode(), digest_size=8).hexdigest()
    return TokenizerParts(model, fingerprint, gguf.get("tokenizer.ggml.bos_token_id", None), stops, template)


_CHUNK = 400_000  # characters; the regular expression engine under tiktoken fails on far longer strings


class Tokenizer:
    """The Llama 3 tokenizer (128,256 entries), or that of any model from its files.

    Without a path it is Meta's own `tokenizer.model` out of the PyPI package `llama-models`: no download, no account.
    `path`: another `tokenizer.model` in Meta's format, a Hugging Face `tokenizer.json`, the folder of a model, or a
    `.gguf` file. `chat_template`: a Jinja template in place of the model's own; Llama 3's where the files have none and
    the vocabulary has its tokens. One that can be trained on ends every turn, and begins an answer when it is asked to:
    `"{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"`. Some templates write the day: `today`, by default that on
    which the tokenizer is made. Give it where the same chats must have the same tokens on another day.

    `eos_id` ends a document. An answer ends at any of `stop_ids`; the first is the one that the model was taught. Text
    never becomes a special token: `<|end_of_text|>` written in a document is encoded letter by letter.
    Raise ImportError for a missing package, FileNotFoundError or ValueError for an unusable file.
    Source: meta-llama/llama-models, `llama3/tokenizer.py`; Hugging Face's `apply_chat_template`.
    """

    bos_id: int | None
    eos_id: int
    vocab_size: int
    stop_ids: tuple[int, ...]

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        *,
        chat_template: str | None = None,
        today: datetime.date | None = None,
    ):
        file = _llama3_file() if path is None else Path(path).expanduser()
        opened = open_tokenizer(file)
        self._model, self.source, self.fingerprint = opened.model, str(file), opened.fingerprint
        self.vocab_size, self._special = opened.model.vocab_size, opened.model.special
        named = [self._special[token] for token in (*TURN_ENDS, *DOCUMENT_ENDS) if token in self._special]
        self.stop_ids = tuple(dict.fromkeys((*opened.stop_ids, *named)))
        if not self.stop_ids:
            raise ValueError(
                f"{str(file)!r} has none of the end-of-document tokens {', '.join(DOCUMENT_ENDS)}, so documents could "
                "not be told apart. Add one of them to the tokenizer's `added_tokens`."
            )
        begins = [self._special[token] for token in BEGINS if token in self._special]
        self.bos_id = opened.bos_id if opened.bos_id is not None else next(iter(begins), None)
        self.eos_id = next((self._special[t] for t in DOCUMENT_ENDS if t in self._special), self.stop_ids[0])
        has_llama3 = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= set(self._special)
        own = opened.chat_template or (LLAMA3_TEMPLATE if has_llama3 else None)
        self.chat_template = own if chat_template is None else chat_template
        # What a template is given: as the folder says, or what the vocabulary has.
        names = {"bos_token": self._name(self.bos_id), "eos_token": self._name(self.stop_ids[0])}
        self._names = {name: token for name, token in names.items() if token} if opened.names is None else opened.names
        self._today = today or datetime.date.today()
        self._render: Callable[..., Any] | None = None

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the token ids of a text, with the begin- and end-of-document tokens where asked for."""
        return self.encode_to_numpy(text, bos=bos, eos=eos).tolist()

    def encode_to_numpy(self, text: str, *, bos: bool = False, eos: bool = False) -> Integer[np.ndarray, " tokens"]:
        """Encode as `encode` does, to a uint32 array."""
        before = [self.bos_id] if bos and self.bos_id is not None else []
        after = [self.eos_id] if eos else []
        chunks = [self._model.encode(text[i : i + _CHUNK]) for i in range(0, len(text), _CHUNK)]
        return np.concatenate([np.asarray(part, np.uint32) for part in (before, *chunks, after)])

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " tokens"]) -> str:
        """Return the text of token ids, special tokens written out; bytes that are not UTF-8 become U+FFFD.

        Raise ValueError for an id outside the vocabulary.
        """
        ids = np.asarray(ids).tolist()
        if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(
                f"Token id {wrong[0]} is outside this tokenizer's vocabulary of {self.vocab_size:,} entries. If a "
                "model made it, the model's vocabulary is larger than the tokenizer's: mask the logits beyond it."
            )
        return self._model.decode(ids)

    def apply_chat_template(
        self,
        messages: Sequence[Message] | str,
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **names: Any,
    ) -> list[int]:
        """Return the token ids of a chat, by the model's template; a string alone is one question of the user's.

        `tools`: descriptions of functions that the model may call; `names`: others that the template reads, such as
        `enable_thinking`. With `add_generation_prompt` the beginning of an answer follows: what `generate` continues.
        Answers among the messages are encoded as by `chat`, so that a model is asked with the tokens that it was
        trained on; the rest is what transformers' `apply_chat_template` gives. Raise ValueError for messages that are
        none, for special tokens in them, and where there is no template, it fails or does not read what it is given.
        """
        messages, _ = check_messages(messages, list(self._special))
        render = self._renderer(tools, names)
        try:
            text, answers = assistant_spans(messages, render, self._stops(), add_generation_prompt)
            return self._encode_turns(text, [(span, True) for span, _ in answers])[0]
        except ValueError:  # no template to train on, but one that a model may be asked by
            return self._model.encode_special(render(messages, add_generation_prompt).text)

    def chat(
        self, messages: Sequence[Message] | str, *, tools: Sequence[Mapping[str, Any]] | None = None, **names: Any
    ) -> tuple[Integer[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """Return the token ids `[tokens]`, uint32, of a whole chat, and which of them the assistant wrote.

        Those are the tokens that a loss is for: each answer whole, with the token that ends it, no prompt, no role's
        name; no turn with `"weight": 0`. What stands before it is, token by token, `apply_chat_template(...,
        add_generation_prompt=True)` of the messages before it: where the tokenizer would join the prompt's end and the
        answer's first word in one token (`"assistant: "` and `"Yes"`), the two are encoded apart. What a template
        itself marks by `{% generation %}` is taken to the letter instead, whatever its prompt is.
        Raise ValueError as `apply_chat_template`, where the template does not tell whose a token is, and where it
        leaves a field, or words of a turn that is trained, out.
        """
        messages, trained = check_messages(messages, list(self._special))
        text, answers = trained_spans(messages, trained, tools or (), self._renderer(tools, names), self._stops())
        ids, wrote = self._encode_turns(text, answers)
        return np.asarray(ids, np.uint32), np.asarray(wrote, bool)

    def check_table(self, ids: Sequence[int] | Integer[np.ndarray, " tokens"], vocab_size: int) -> None:
        """Raise ValueError, with its text, for a token beyond a model's table of `vocab_size` entries."""
        most = int(np.max(ids, initial=0))
        if most >= check_whole("vocab_size", vocab_size):
            raise ValueError(
                f"the token {most} of {self.source}, {self.decode([most])!r}, is beyond the model's table of "
                f"{vocab_size:,} entries: the tokenizer has {self.vocab_size:,}. Take the tokenizer that belongs to "
                f"the model, llamem.text.Tokenizer(folder), or make a model with vocab_size={self.vocab_size}."
            )

    def save(self, folder: str | os.PathLike) -> Path:
        """Write what `Tokenizer(folder)` and transformers read into a folder; return it. Files there are replaced.

        A `generation_config.json` and, where there is one, the `config.json` say at which tokens a text begins and
        ends; what else they say stays. A vocabulary in Meta's format is written as a `tokenizer.json`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._model.save(folder)
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._names,
            "clean_up_tokenization_spaces": False,
            "chat_template": self.chat_template,
        }
        write_whole(folder / "tokenizer_config.json", json.dumps(content, indent=2))
        if (folder / "chat_template.jinja").exists():  # it would be read in place of the other
            write_whole(folder / "chat_template.jinja", self.chat_template or "")
        _write_token_ids(folder, self.bos_id, self.stop_ids)
        return folder

    def _stops(self) -> list[str]:
        return [token for token, i in self._special.items() if i in self.stop_ids]

    def _encode_turns(self, text: str, answers: Sequence[tuple[slice, bool]]) -> tuple[list[int], list[bool]]:
        """Return a chat's ids, and which of them are in those `answers`, parts of its text, that are trained.

        A part that the tokenizer joins with the one before is encoded apart: no id depends on what follows it.
        """
        ends = [(end, of) for span, trained in answers for end, of in ((span.start, False), (span.stop, trained))]
        ids: list[int] = []
        wrote: list[bool] = []
        begin = 0
        for end, written in (*ends, (len(text), False)):
            if end == begin:
                continue
            whole = self._model.encode_special(text[:end])
            if whole[: len(ids)] == ids:
                more = whole[len(ids) :]
            else:
                more = self._apart(text[begin:end])
                if self._model.decode([*ids, *more]) != self._model.decode(whole):
                    raise ValueError(
                        f"{self.source} joins the end of a prompt, {text[:begin][-20:]!r}, with the answer, and writes "
                        "another text where the two are encoded apart: no answer could be trained as a model writes "
                        "it. Take a chat template whose prompt does not end in a space or a new line."
                    )
            ids += more
            wrote += [written] * len(more)
            begin = end
        return ids, wrote

    def _apart(self, text: str) -> list[int]:
        """Return the ids of a text that another stands before: tokenizers like Llama 2's put a space before a first."""
        line = self._model.encode_special("\n")
        after_line = self._model.encode_special("\n" + text)
        return after_line[len(line) :] if after_line[: len(line)] == line else self._model.encode_special(text)

    def _renderer(self, tools: Sequence[Any] | None, names: Mapping[str, Any]) -> Render:
        """Return what writes a chat, given tools and what else the template reads."""
        if self.chat_template is None:
            raise ValueError(
                f"{self.source} has no chat template. Pass the one of the model: Tokenizer(..., chat_template=...)."
            )
        if self._render is None:
            self._render = make_render(self.chat_template, self.source, self._names, self._today)
        given = {"tools": list(tools) if tools else None, **names}
        check_texts(given, "what the chat template is given", list(self._special))
        return functools.partial(self._render, **given)

    def _name(self, token_id: int | None) -> str | None:
        return next((token for token, i in self._special.items() if i == token_id), None)


def _llama3_file() -> Path:
    # find_spec of a top-level package locates it without importing what it would pull in.
    spec = importlib.util.find_spec("llama_models")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "The Llama 3 tokenizer comes with the PyPI package `llama-models`, which is not installed: "
            '`pip install "llamem[train]"`. Or pass the path of your own `tokenizer.model` or `tokenizer.json`.'
        )
    return Path(spec.submodule_search_locations[0]) / "llama3" / "tokenizer.model"


def _write_token_ids(folder: Path, bos_id: int | None, stop_ids: Sequence[int]) -> None:
    """Write where a text begins and ends into a folder's `generation_config.json` and its `config.json`, if it has one.

    What else they say stays.
    """
    token_ids = {"bos_token_id": bos_id, "eos_token_id": list(stop_ids) if len(stop_ids) > 1 else stop_ids[0]}
    for file in (folder / GENERATION, folder / "config.json"):
        if file.is_file() or file.name == GENERATION:
            content = read_json(file, MAX_CONFIG_BYTES) if file.is_file() else {}
            write_whole(file, json.dumps(content | token_ids, indent=2))
