"""One model family, its weights in and out, and how a step of it is computed."""

from llamem.adapters.files import load_adapters, save_adapter
from llamem.adapters.lora import TARGET_MODULES, Adapters, LoraConfig
from llamem.adapters.merge import merge_adapter
from llamem.adapters.weights import IN_LAYERS, adapted_head
from llamem.llama.config import PRESETS, LlamaConfig, RopeScaling
from llamem.llama.hf_config import config_from_hf, config_to_hf
from llamem.llama.mesh_shape import MeshShape
from llamem.llama.model import Block, KVCache, Llama, rope_tables, rotate
from llamem.llama.plan import ACTIVATIONS, Plan
from llamem.llama.pretrained import load_pretrained, save_pretrained
from llamem.llama.sample import generate, generate_text
from llamem.llama.smollm2 import smollm2_file
from llamem.llama.tokenizer import Tokenizer
from llamem.llama.weights import rms_norm
from llamem.quantized.model import check_trainable, dequantize, is_quantized, quantize

__all__ = [
    "ACTIVATIONS",
    "IN_LAYERS",
    "PRESETS",
    "TARGET_MODULES",
    "Adapters",
    "Block",
    "KVCache",
    "Llama",
    "LlamaConfig",
    "LoraConfig",
    "MeshShape",
    "Plan",
    "RopeScaling",
    "Tokenizer",
    "adapted_head",
    "check_trainable",
    "config_from_hf",
    "config_to_hf",
    "dequantize",
    "generate",
    "generate_text",
    "is_quantized",
    "load_adapters",
    "load_pretrained",
    "merge_adapter",
    "quantize",
    "rms_norm",
    "rope_tables",
    "rotate",
    "save_adapter",
    "save_pretrained",
    "smollm2_file",
]
