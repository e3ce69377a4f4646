"""Text to tokens and back: tokenizers, chat templates, answers."""

from llamem.text.completion import generate_text
from llamem.text.tokenizer import Tokenizer

__all__ = ["Tokenizer", "generate_text"]
