"""Byte-level BPE as `tokenizers` computes it, made from a vocabulary: of a GGUF file, or of Meta's ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from llamem._extras import import_extra

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
