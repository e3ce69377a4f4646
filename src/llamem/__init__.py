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
from llamem.losses import TileChoice, choose_tiles, tiled_cross_entropy, tiled_logprobs
from llamem.memory import TARGETS, Comparison, Report, available, compare, compile_report, saved_residuals, target
from llamem.planner import (
    Estimate,
    Found,
    NothingFits,
    estimate,
    find_plan,
    largest_batch,
    longest_context,
    smallest_chip,
)
from llamem.train import TrainSettings, abstract_lora_step, abstract_step
from llamem.verify import assert_remat, verify_remat

__all__ = [
    "POLICIES",
    "PRESETS",
    "TARGETS",
    "Adapters",
    "Comparison",
    "Estimate",
    "Found",
    "KVCache",
    "Llama",
    "LlamaConfig",
    "LoraConfig",
    "NothingFits",
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
    "estimate",
    "find_plan",
    "generate",
    "largest_batch",
    "load_adapters",
    "load_pretrained",
    "longest_context",
    "merge_adapter",
    "save_adapter",
    "save_pretrained",
    "saved_residuals",
    "smallest_chip",
    "stack_layers",
    "target",
    "tiled_cross_entropy",
    "tiled_logprobs",
    "tiled_map",
    "tiled_sum",
    "unstack_layers",
    "verify_remat",
]
