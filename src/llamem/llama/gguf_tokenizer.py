"""The tokenizer inside a GGUF file: byte-level BPE, made from the file's vocabulary and merges."""

from typing import Any

from llamem._extras import import_extra
from llamem.llama.gguf_files import Gguf

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before pairs are merged, by `tokenizer.ggml.pre`; None is GPT-2's way, after digits one by one.
# Source: llama.cpp, src/llama-vocab.cpp.
_PATTERNS = {
    "smollm": None,
    "llama-bpe": LLAMA3_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
}
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens


def tokenizer_of(gguf: Gguf) -> Any:
    """Return the file's tokenizer as a `tokenizers.Tokenizer`.

    Raise ValueError for one of another kind than byte-level BPE, or one that cuts text in a way not known here: it
    would give other tokens than the model was trained on.
    """
    tokenizers = import_extra("tokenizers", "the tokenizer of a GGUF file")
    kind, cut = gguf.get("tokenizer.ggml.model"), gguf.get("tokenizer.ggml.pre", "(none)")
    if kind != "gpt2" or cut not in _PATTERNS:
        raise ValueError(
            f"{gguf.file} has a tokenizer of the kind {kind!r} that cuts text as {cut!r}: only byte-level BPE ('gpt2') "
            f"cut as {', '.join(map(repr, _PATTERNS))} is read here. Pass the tokenizer.json of the model that the "
            "file was made from."
        )
    tokens, kinds = gguf.get("tokenizer.ggml.tokens"), gguf.get("tokenizer.ggml.token_type")
    pairs = [tuple(merge.split(" ")) for merge in gguf.get("tokenizer.ggml.merges")]
    # Llama 3 takes a whole word that is a token before it merges any of its parts.
    ids, whole_words = {token: i for i, token in enumerate(tokens)}, cut in ("llama-bpe", "llama3")
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=pairs, ignore_merges=whole_words))
    if cut == "qwen2":
        model.normalizer = tokenizers.normalizers.NFC()
    pre, pattern = tokenizers.pre_tokenizers, _PATTERNS[cut]
    first = pre.Split(tokenizers.Regex(pattern), behavior="isolated") if pattern else pre.Digits(individual_digits=True)
    model.pre_tokenizer = pre.Sequence([first, pre.ByteLevel(add_prefix_space=False, use_regex=pattern is None)])
    model.decoder = tokenizers.decoders.ByteLevel()
    for add, of_kind in ((model.add_special_tokens, _CONTROL), (model.add_tokens, _USER_DEFINED)):
        mine = [token for token, kind in zip(tokens, kinds, strict=True) if kind == of_kind]
        add([tokenizers.AddedToken(token, special=of_kind == _CONTROL, normalized=False) for token in mine])
    return model
