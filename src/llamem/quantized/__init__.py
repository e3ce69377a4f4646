"""Frozen matrices in blocks of four or eight bits."""

from typing import TYPE_CHECKING

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.quantized.quantized_model import check_trainable, dequantize, is_quantized, quantize

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
