"""Llama 3 in less memory: rematerialised layer stacks, tiled losses, and the truth about what they cost."""

from llamem.config import PRESETS, LlamaConfig, RopeScaling
from llamem.losses import tiled_cross_entropy, tiled_logprobs
from llamem.model import KVCache, Llama
from llamem.remat import POLICIES, Policy
from llamem.sample import generate
from llamem.stack import apply_stack, stack_layers, unstack_layers
from llamem.step import TrainSettings, abstract_step
from llamem.tiling import tiled_map, tiled_sum

__all__ = [
    "POLICIES",
    "PRESETS",
    "KVCache",
    "Llama",
    "LlamaConfig",
    "Policy",
    "RopeScaling",
    "TrainSettings",
    "abstract_step",
    "apply_stack",
    "generate",
    "stack_layers",
    "tiled_cross_entropy",
    "tiled_logprobs",
    "tiled_map",
    "tiled_sum",
    "unstack_layers",
]
