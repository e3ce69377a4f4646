"""Llama 3 in less memory: rematerialised layer stacks, tiled losses, and the truth about what they cost."""

from llamem import _startup as _startup  # isort: split

from llamem.layers import POLICIES, Policy, apply_stack, stack_layers, tiled_map, tiled_sum, unstack_layers
from llamem.llama import (
    PRESETS,
    Adapters,
    KVCache,
    Llama,
    LlamaConfig,
    LoraConfig,
    Plan,
    RopeScaling,
    generate,
    load_adapters,
    load_pretrained,
    merge_adapter,
    save_adapter,
    save_pretrained,
)
from llamem.losses import (
    TileChoice,
    choose_tiles,
    group_advantages,
    tiled_cross_entropy,
    tiled_dpo_loss,
    tiled_logprobs,
    tiled_policy_loss,
    tiled_token_loss,
)
from llamem.memory import TARGETS, Comparison, Report, available, compare, compile_report, saved_residuals, target
from llamem.train import TrainSettings, abstract_lora_step, abstract_step
from llamem.verify import assert_remat, verify_remat

__all__ = [
    "POLICIES",
    "PRESETS",
    "TARGETS",
    "Adapters",
    "Comparison",
    "KVCache",
    "Llama",
    "LlamaConfig",
    "LoraConfig",
    "Plan",
    "Policy",
    "Report",
    "RopeScaling",
    "TileChoice",
    "TrainSettings",
    "abstract_lora_step",
    "abstract_step",
    "apply_stack",
    "assert_remat",
    "available",
    "choose_tiles",
    "compare",
    "compile_report",
    "generate",
    "group_advantages",
    "load_adapters",
    "load_pretrained",
    "merge_adapter",
    "save_adapter",
    "save_pretrained",
    "saved_residuals",
    "stack_layers",
    "target",
    "tiled_cross_entropy",
    "tiled_dpo_loss",
    "tiled_logprobs",
    "tiled_map",
    "tiled_policy_loss",
    "tiled_sum",
    "tiled_token_loss",
    "unstack_layers",
    "verify_remat",
]
