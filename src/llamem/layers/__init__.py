"""Anyone's layers in less memory: rematerialised stacks, tiles, attention."""

from llamem.layers.attention import Implementation, causal_attention
from llamem.layers.attention_tiles import flash_attention
from llamem.layers.partial_sums import sum_parts
from llamem.layers.remat import POLICIES, Policy, checkpoint
from llamem.layers.stack import Mode, apply_stack, stack_layers, unstack_layers
from llamem.layers.tiling import tiled_map, tiled_sum

__all__ = [
    "POLICIES",
    "Implementation",
    "Mode",
    "Policy",
    "apply_stack",
    "causal_attention",
    "checkpoint",
    "flash_attention",
    "stack_layers",
    "sum_parts",
    "tiled_map",
    "tiled_sum",
    "unstack_layers",
]
