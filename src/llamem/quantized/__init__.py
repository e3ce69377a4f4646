"""Frozen matrices in blocks of four or eight bits."""

from llamem.quantized.quantized_model import check_trainable, dequantize, is_quantized, quantize

__all__ = ["check_trainable", "dequantize", "is_quantized", "quantize"]
