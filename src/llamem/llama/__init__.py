"""The plain Llama: its shape, its weights, how a step of it is computed, and tokens out of it."""

from llamem.llama.config import PRESETS, LlamaConfig, RopeScaling
from llamem.llama.model import Block, KVCache, Llama, rope_tables, rotate
from llamem.llama.plan import ACTIVATIONS, MeshShape, Plan
from llamem.llama.sample import generate
from llamem.llama.weights import rms_norm

__all__ = [
    "ACTIVATIONS",
    "PRESETS",
    "Block",
    "KVCache",
    "Llama",
    "LlamaConfig",
    "MeshShape",
    "Plan",
    "RopeScaling",
    "generate",
    "rms_norm",
    "rope_tables",
    "rotate",
]
