"""Tokenizer folders as people publish them, made on the spot: three small vocabularies, each in many states."""

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors, trainers

from llamem.files import smollm2_file
from llamem.text import Tokenizer
from llamem.text.gguf_reader import open_gguf
from llamem.text.tokenizer_files import byte_level_bpe, merges_of

WORDS = "the quick brown fox jumps over a lazy dog while seven old llamas write short letters to their aunts in Lima "
TEMPLATE = (
    "{% for m in messages %}{{ m.role + eos_token }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
OTHER = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{% if tools %}{{ tools }}{% endif %}"


@functools.cache
def llama3_like():
    """Return the first 3,000 tokens of Llama 3's, with a few special ones and a begin of text."""
    ranks = dict(list(Tokenizer()._model._encoding._mergeable_ranks.items())[:3000])
    vocab, merges = merges_of(ranks)
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    return byte_level_bpe(vocab, merges, "llama-bpe", special=special, bos="<|begin_of_text|>"), special


@functools.cache
def smollm2_like():
    """Return the first 3,000 tokens of SmolLM2's, which begins no text."""
    gguf = open_gguf(smollm2_file())
    vocab = {token: i for i, token in enumerate(gguf.get("tokenizer.ggml.tokens")[:3000])}
    pairs = (tuple(merge.split(" ")) for merge in gguf.get("tokenizer.ggml.merges"))
    merges = [pair for pair in pairs if {*pair, "".join(pair)} <= vocab.keys()]
    special = ["<|im_start|>", "<|endoftext|>", "<|im_end|>"]
    return byte_level_bpe(vocab, merges, "smollm", special=special), special


@functools.cache
def llama2_like():
    """Return a tokenizer built as Llama 2's: a space before the text, bytes for what it does not know."""
    model = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    model.train_from_iterator(WORDS.split(" "), trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    content = json.loads(model.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(content)), special[1:] + special[2:]


BASES = {"llama3": llama3_like, "smollm2": smollm2_like, "llama2": llama2_like}


def _added(content: str, **more):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return flags | {"content": content} | more


class Folder:
    """A tokenizer's files before they are written: its own, the config, and what else stands beside them."""

    def __init__(self, base: str):
        model, (self.begin, _, self.end) = BASES[base]()
        self.json = json.loads(model.to_str())
        self.n = model.get_vocab_size(with_added_tokens=True)
        self.config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.begin,
            "eos_token": self.end,
            "chat_template": TEMPLATE,
        }
        self.files: dict[str, str] = {}

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text(json.dumps(self.json))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config))
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)
        return folder


def as_saved(f):
    """Leave the folder as transformers 5 writes it."""


def truncated(f):
    f.json["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}


def padded(f):
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    f.json["padding"] = padding | {"pad_id": 2, "pad_type_id": 0, "pad_token": f.end}


def truncated_and_padded(f):
    truncated(f)
    padded(f)


def no_post_processor(f):
    f.json["post_processor"] = None


def begins(f):
    i = next(t["id"] for t in f.json["added_tokens"] if t["content"] == f.begin)
    parts = [{"SpecialToken": {"id": f.begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    ids = {f.begin: {"id": f.begin, "ids": [i], "tokens": [f.begin]}}
    f.json["post_processor"] = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": ids}


def flag_says_begin(f):
    f.config["add_bos_token"] = True


def flag_says_none(f):
    f.config["add_bos_token"] = False


def added_json(f):
    f.files["added_tokens.json"] = json.dumps({"<tool>": f.n, "<call>": f.n + 1})


def added_json_named(f):
    f.files["added_tokens.json"] = json.dumps({"<|turn|>": f.n})
    f.config["eos_token"] = "<|turn|>"


def added_decoder(f):
    f.config["added_tokens_decoder"] = {str(t["id"]): t for t in f.json["added_tokens"]}
    for t in f.config["added_tokens_decoder"].values():
        t.pop("id")
    f.json = json.loads(json.dumps(f.json))
    f.json["added_tokens"] = [t | {"id": int(i)} for i, t in f.config["added_tokens_decoder"].items()]
    f.config["added_tokens_decoder"] |= {str(f.n): _added("<tool>"), str(f.n + 1): _added("<|x|>", special=True)}


def added_with_spaces(f):
    f.config["added_tokens_decoder"] = {str(f.n): _added("<tool>", lstrip=True, rstrip=True)}


def config_flags_otherwise(f):
    """Give two tokens that tokenizer.json has other flags in the configuration."""
    f.json["added_tokens"].append(_added("<tool>") | {"id": f.n})
    f.json["added_tokens"].append(_added("<call>", special=True) | {"id": f.n + 1})
    f.config["added_tokens_decoder"] = {str(f.n): _added("<tool>", lstrip=True, rstrip=True)}
    f.config["added_tokens_decoder"] |= {str(f.n + 1): _added("<call>", rstrip=True)}


def end_is_not_special(f):
    for token in f.json["added_tokens"]:
        token["special"] = token["content"] != f.end


def end_is_a_word(f):
    """Name a token of the vocabulary that is no added one, and that no test's text has."""
    words = [word for word in f.json["model"]["vocab"] if word.isalpha() and len(word) > 5 and word not in WORDS]
    f.config["eos_token"] = (words or ["<0x7F>"])[0]


def end_as_fields(f):
    f.config["added_tokens_decoder"] = {}
    f.config["eos_token"] = {"__type": "AddedToken", **_added(f.end, special=True)}


def new_pad(f):
    f.config["pad_token"] = "<|pad|>"


def extra_special(f):
    f.config["additional_special_tokens"] = ["<|tool|>", f.end]


def extra_special_by_name(f):
    f.config["extra_special_tokens"] = {"image_token": "<|image|>"}


def map_says_otherwise(f):
    f.files["special_tokens_map.json"] = json.dumps({"eos_token": f.begin, "pad_token": _added(f.end)})


def map_that_is_not_read(f):
    map_says_otherwise(f)
    f.config["added_tokens_decoder"] = {}


def templates_in_a_dict(f):
    f.config["chat_template"] = {"default": TEMPLATE, "tool_use": OTHER}


def templates_in_a_list(f):
    f.config["chat_template"] = [{"name": "rag", "template": OTHER}, {"name": "default", "template": TEMPLATE}]


def template_file(f):
    f.config["chat_template"] = OTHER
    f.files["chat_template.jinja"] = TEMPLATE
    f.files["additional_chat_templates/rag.jinja"] = OTHER


def of_llama_tokenizer(f):
    f.config |= {"tokenizer_class": "LlamaTokenizerFast", "legacy": False, "add_bos_token": True, "unk_token": "<unk>"}


STATES = [
    *(as_saved, truncated, padded, truncated_and_padded, no_post_processor, begins, flag_says_begin, flag_says_none),
    *(added_json, added_json_named, added_decoder, added_with_spaces, config_flags_otherwise, end_is_not_special),
    *(end_is_a_word, end_as_fields, new_pad, extra_special, extra_special_by_name),
    *(map_says_otherwise, map_that_is_not_read),
    *(templates_in_a_dict, templates_in_a_list, template_file),
]
