"""Low-rank adapters over one frozen model: any number of them, each sequence of a batch with its own."""

from llamem.adapters.adapted_weights import IN_LAYERS
from llamem.adapters.lora import TARGET_MODULES, Adapters, LoraConfig, merge_adapter
from llamem.adapters.lora_step import init_lora_state, lora_losses, make_lora_step

__all__ = [
    "IN_LAYERS",
    "TARGET_MODULES",
    "Adapters",
    "LoraConfig",
    "init_lora_state",
    "lora_losses",
    "make_lora_step",
    "merge_adapter",
]
