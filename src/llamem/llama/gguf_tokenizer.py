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
    kind, cut = gguf.text("tokenizer.ggml.model"), gguf.text("tokenizer.ggml.pre", "(none)")
    if kind != "gpt2" or cut not in _PATTERNS:
        raise ValueError(
            f"{gguf.file} has a tokenizer of the kind {kind!r} that cuts text as {cut!r}: only byte-level BPE ('gpt2') "
            f"cut as {', '.join(map(repr, _PATTERNS))} is read here. Pass the tokenizer.json of the model that the "
            "file was made from."
        )
    tokens, merges = gguf.texts("tokenizer.ggml.tokens"), gguf.texts("tokenizer.ggml.merges")
    kinds = gguf.wholes("tokenizer.ggml.token_type")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens) or not all(len(pair) == 2 for pair in pairs):
        raise ValueError(
            f"the vocabulary in {gguf.file} is damaged: {len(tokens)} tokens, {len(set(tokens))} of them different, "
            f"{len(kinds)} kinds, and merges that must be two tokens each. Download it again."
        )
    try:
        # Llama 3 takes a whole word that is a token before it merges any of its parts.
        ids, whole_words = {token: i for i, token in enumerate(tokens)}, cut in ("llama-bpe", "llama3")
        bpe = tokenizers.models.BPE(vocab=ids, merges=pairs, ignore_merges=whole_words)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the vocabulary in {gguf.file} is damaged: {error}. Download it again.") from None
    model = tokenizers.Tokenizer(bpe)
    if cut == "qwen2":
        model.normalizer = tokenizers.normalizers.NFC()
    model.pre_tokenizer, model.decoder = _pre_tokenizer(tokenizers, _PATTERNS[cut]), tokenizers.decoders.ByteLevel()

    def added(token: str, special: bool) -> Any:
        return tokenizers.AddedToken(token, special=special, normalized=False)

    model.add_special_tokens([added(t, True) for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    model.add_tokens([added(t, False) for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED])
    return model


def _pre_tokenizer(tokenizers: Any, pattern: str | None) -> Any:
    pre = tokenizers.pre_tokenizers
    if pattern is None:
        return pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    split = pre.Split(tokenizers.Regex(pattern), behavior="isolated")
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
