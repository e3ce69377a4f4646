"""The tokenizer inside a GGUF file: byte-level BPE, made from the file's vocabulary and merges."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem.checks import import_extra
from llamem.text.gguf_reader import Gguf

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
