"""Text to token ids and back: the Llama 3 tokenizer from a package on the machine, or any model's from its files."""

import datetime
import functools
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

from jaxmem.common.checks import check_whole
from jaxmem.common.files import read_json, user_path, write_whole
from llamem.text.chat_messages import Message, check_messages, check_texts
from llamem.text.chat_template import LLAMA3_TEMPLATE, Render, assistant_spans, make_render, trained_spans
from llamem.text.tokenizer_files import (
    BEGINS,
    DOCUMENT_ENDS,
    GENERATION,
    MAX_CONFIG_BYTES,
    TURN_ENDS,
    after_line,
    open_tokenizer,
)


class Tokenizer:
    """The Llama 3 tokenizer (128,256 entries), or that of any model from its files.

    Without a path it is Meta's own `tokenizer.model` out of the PyPI package `llama-models`: no download, no account.
    `path`: another `tokenizer.model` in Meta's format, a Hugging Face `tokenizer.json`, the folder of a model, or a
    `.gguf` file. A folder is read as transformers 5 reads it, its `tokenizer.json` to the letter (a class there that
    builds its own, such as `LlamaTokenizer`, may differ after a special token).
    `chat_template`: a Jinja template in place of the model's own (of several by name `default`, and `tool_use` with
    tools); Llama 3's where the files have none and the vocabulary has its tokens. One that can be trained on ends every
    turn, and begins an answer when it is asked to:
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
        file = _llama3_file() if path is None else user_path(path)
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
        self._templates = opened.chat_templates
        own = LLAMA3_TEMPLATE if has_llama3 and not self._templates else self._templates.get("default")
        self.chat_template = own if chat_template is None else chat_template
        # What a template is given: as the folder says, or what the vocabulary has.
        names = {"bos_token": self._name(self.bos_id), "eos_token": self._name(self.stop_ids[0])}
        self._names = {name: token for name, token in names.items() if token} if opened.names is None else opened.names
        self._today = today or datetime.date.today()
        self._tool_template = self._templates.get("tool_use") if chat_template is None else None
        self._renders: dict[str, Callable[..., Any]] = {}

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the token ids of a text.

        With `bos` what the model's files put before a text stands there, as transformers has it: `<|begin_of_text|>`
        for Llama 3, nothing for SmolLM2 or Qwen. With `eos` it ends in `eos_id`. Raise ValueError for a half of a
        surrogate pair, which is no character.
        """
        return self.encode_to_numpy(text, bos=bos, eos=eos).tolist()

    def encode_to_numpy(self, text: str, *, bos: bool = False, eos: bool = False) -> Integer[np.ndarray, " tokens"]:
        """Encode as `encode` does, to a uint32 array."""
        before = self._model.begins if bos else ()
        after = [self.eos_id] if eos else []
        ids = self._model.encode(_checked(text))
        return np.concatenate([np.asarray(part, np.uint32) for part in (before, ids, after)])

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
            return self._model.encode_special(_checked(render(messages, add_generation_prompt).text))

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
        folder = user_path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        added = sorted(self._model.save(folder).get_added_tokens_decoder().items())
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._names,
            "clean_up_tokenization_spaces": False,
            "chat_template": self._templates_to_write(),
            # Where it is missing, older files that may stand in the folder are read.
            "added_tokens_decoder": {str(i): token.__getstate__() for i, token in added},
            # Special by the configuration alone.
            "additional_special_tokens": [
                token.content for _, token in added if token.content in self._special and not token.special
            ],
        }
        write_whole(folder / "tokenizer_config.json", json.dumps(content, indent=2))
        if (folder / "chat_template.jinja").exists():  # it would be read in place of the other
            write_whole(folder / "chat_template.jinja", self.chat_template or "")
        _write_token_ids(folder, self.bos_id, self.stop_ids)
        return folder

    def _templates_to_write(self) -> str | list[dict[str, str]] | None:
        """Return the chat's template; with one for tools, both by name, as they were read."""
        if self._tool_template is None:
            return self.chat_template
        named = {"default": self.chat_template or "", "tool_use": self._tool_template}
        return [{"name": name, "template": text} for name, text in named.items()]

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
            whole = self._model.encode_special(_checked(text[:end]))
            if whole[: len(ids)] == ids:
                more = whole[len(ids) :]
            else:
                more = after_line(self._model.encode_special, text[begin:end])
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

    def _renderer(self, tools: Sequence[Any] | None, names: Mapping[str, Any]) -> Render:
        """Return what writes a chat, given tools and what else the template reads."""
        template = self._tool_template if tools and self._tool_template else self.chat_template
        if template is None:
            several = f"several chat templates by name, {', '.join(self._templates)}, none of them 'default'"
            raise ValueError(
                f"{self.source} has {several if self._templates else 'no chat template'}. Pass the one of the model: "
                "Tokenizer(..., chat_template=...)."
            )
        if template not in self._renders:
            self._renders[template] = make_render(template, self.source, self._names, self._today)
        given = {"tools": list(tools) if tools else None, **names}
        check_texts(given, "what the chat template is given", list(self._special))
        return functools.partial(self._renders[template], **given)

    def _name(self, token_id: int | None) -> str | None:
        return next((token for token, i in self._special.items() if i == token_id), None)


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start} of a text is half of a surrogate pair, {text[error.start]!r}, which stands for "
            "nothing: what wrote the text had cut it inside a character. Write that again, or leave the text out."
        ) from None
    return text


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
