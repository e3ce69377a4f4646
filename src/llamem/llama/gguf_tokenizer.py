"""The tokenizer inside a GGUF file: byte-level BPE, made from the file's vocabulary and merges."""

from typing import Any

from llamem.llama.byte_level import LLAMA3_CUTS, PATTERNS, byte_level_bpe
from llamem.llama.gguf_files import Gguf

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
