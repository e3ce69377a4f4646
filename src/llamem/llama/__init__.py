"""One model family, its weights in and out, and how a step of it is computed."""

from llamem.llama.block import ACTIVATIONS, Block, rms_norm, rope_tables, rotate
from llamem.llama.config import PRESETS, LlamaConfig, RopeScaling
from llamem.llama.model import KVCache, Llama
from llamem.llama.plan import Plan
from llamem.llama.pretrained import load_pretrained, save_pretrained
from llamem.llama.sample import generate
from llamem.llama.sharding import MeshShape

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
    "load_pretrained",
    "rms_norm",
    "rope_tables",
    "rotate",
    "save_pretrained",
]
