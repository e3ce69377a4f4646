"""Text to tokens and back: tokenizers, chat templates, answers."""

from typing import TYPE_CHECKING

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.text.completion import generate_text
    from llamem.text.tokenizer import Tokenizer

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
