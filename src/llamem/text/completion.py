"""Text out of a model: prompts and chats through its own tokenizer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmem.common.checks import show
from llamem.llama.model import Llama
from llamem.llama.sample import generate
from llamem.text.chat_messages import check_texts
from llamem.text.tokenizer import Tokenizer


def generate_text(
    model: Llama, tokenizer: Tokenizer, prompts: Sequence[Any], max_new_tokens: int, **options: Any
) -> list[str]:
    """Return a text for each prompt, up to the token that ends it.

    A prompt is a string, which is continued, or a chat, a list of `{"role": ..., "content": ...}`, which is answered by
    the tokenizer's template, after the very tokens that stand before an answer in training (`Tokenizer.chat`).
    `options`: see `generate`; by default nothing is drawn, and `tokenizer.stop_ids` end. Raise ValueError for a token
    beyond the model's table, for half a character in a prompt (a lone surrogate), and as `generate` and
    `Tokenizer.apply_chat_template`.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        raise TypeError(f"generate_text(prompts={show(prompts)}): expected a list of strings or of chats.")
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_texts(prompt, f"prompts[{i}]")
    ids = [
        tokenizer.encode(prompt, bos=True)
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        for prompt in prompts
    ]
    for row in ids:
        tokenizer.check_table(row, model.config.vocab_size)
    stop_ids = options.pop("stop_ids", tokenizer.stop_ids)
    options = {"temperature": 0, **options}
    texts = []
    for row in np.asarray(generate(model, ids, max_new_tokens, stop_ids=stop_ids, **options)):
        ends = np.flatnonzero(np.isin(row, stop_ids))
        texts.append(tokenizer.decode(row[: ends[0]] if ends.size else row))
    return texts
