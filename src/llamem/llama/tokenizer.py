"""Text to token ids and back: the Llama 3 tokenizer from a package on the machine, or any model's from its files."""

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Integer

from llamem._files import write_whole
from llamem.llama.chat_template import LLAMA3_TEMPLATE, Message, Render, assistant_spans, check_messages, make_render
from llamem.llama.tokenizer_files import BEGINS, DOCUMENT_ENDS, TURN_ENDS, open_tokenizer

_CHUNK = 400_000  # characters; the regular expression engine under tiktoken fails on far longer strings


class Tokenizer:
    """The Llama 3 tokenizer (128,256 entries), or that of any model from its files.

    Without a path it is Meta's own `tokenizer.model` out of the PyPI package `llama-models`: no download, no account.
    `path`: another `tokenizer.model` in Meta's format, a Hugging Face `tokenizer.json`, the folder of a model, or a
    `.gguf` file. `chat_template`: a Jinja template, such as
    `"{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"`, in place of the model's
    own; Llama 3's where the files have none and the vocabulary has its tokens.

    `eos_id` ends a document. An answer ends at any of `stop_ids`; the first is the one that the model was taught. Text
    never becomes a special token: `<|end_of_text|>` written in a document is encoded letter by letter.
    Raise ImportError for a missing package, FileNotFoundError or ValueError for an unusable file.
    Source: meta-llama/llama-models, `llama3/tokenizer.py`; Hugging Face's `apply_chat_template`.
    """

    bos_id: int | None
    eos_id: int
    vocab_size: int
    stop_ids: tuple[int, ...]

    def __init__(self, path: str | os.PathLike | None = None, *, chat_template: str | None = None):
        file = _llama3_file() if path is None else Path(path).expanduser()
        found = open_tokenizer(file)
        self._model, self._source, self.fingerprint = found.model, str(file), found.fingerprint
        self.vocab_size, self._special = found.model.vocab_size, found.model.special
        named = [self._special[token] for token in (*TURN_ENDS, *DOCUMENT_ENDS) if token in self._special]
        self.stop_ids = tuple(dict.fromkeys((*found.stop_ids, *named)))
        if not self.stop_ids:
            raise ValueError(
                f"{str(file)!r} has none of the end-of-document tokens {', '.join(DOCUMENT_ENDS)}, so documents could "
                "not be told apart. Add one of them to the tokenizer's `added_tokens`."
            )
        begins = [self._special[token] for token in BEGINS if token in self._special]
        self.bos_id = found.bos_id if found.bos_id is not None else next(iter(begins), None)
        self.eos_id = next((self._special[t] for t in DOCUMENT_ENDS if t in self._special), self.stop_ids[0])
        has_llama3 = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= set(self._special)
        own = found.chat_template or (LLAMA3_TEMPLATE if has_llama3 else None)
        self.chat_template = own if chat_template is None else chat_template
        self._render: Render | None = None

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
        self, messages: Sequence[Message] | str, *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the token ids of a chat, by the model's template; a string alone is one question of the user's.

        With `add_generation_prompt` the beginning of an answer follows: what `generate` continues. Raise ValueError for
        messages that are none, for special tokens in them, and where there is no template or it fails.
        """
        messages = check_messages(messages, list(self._special))
        return self._model.encode_special(self._renderer()(messages, add_generation_prompt))[0]

    def chat(
        self, messages: Sequence[Message] | str
    ) -> tuple[Integer[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
        """Return the token ids `[tokens]`, uint32, of a whole chat, and which of them the assistant wrote.

        Those are the tokens that a loss is for: each answer with the token that ends it, no prompt, no role's name.
        Raise ValueError as `apply_chat_template`, and where the template does not tell whose a token is.
        """
        messages = check_messages(messages, list(self._special))
        stops = [token for token, i in self._special.items() if i in self.stop_ids]
        text, spans = assistant_spans(messages, self._renderer(), stops)
        ids, starts = self._model.encode_special(text)
        starts = np.asarray(starts)
        wrote = np.zeros(len(ids), bool)
        for span in spans:
            wrote |= (starts >= span.start) & (starts < span.stop)
        return np.asarray(ids, np.uint32), wrote

    def save(self, folder: str | os.PathLike) -> Path:
        """Write what `Tokenizer(folder)` and transformers read into a folder; return it. Files there are replaced."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._model.save(folder)
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self._name(self.bos_id),
            "eos_token": self._name(self.stop_ids[0]),
            "chat_template": self.chat_template,
        }
        write_whole(folder / "tokenizer_config.json", json.dumps(content, indent=2))
        return folder

    def _renderer(self) -> Render:
        if self.chat_template is None:
            raise ValueError(
                f"{self._source} has no chat template. Pass the one of the model: Tokenizer(..., chat_template=...)."
            )
        if self._render is None:
            names = {"bos_token": self._name(self.bos_id), "eos_token": self._name(self.stop_ids[0])}
            self._render = make_render(self.chat_template, self._source, **names)
        return self._render

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
