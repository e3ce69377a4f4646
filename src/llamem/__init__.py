"""Llama 3 in less memory: rematerialised layer stacks, tiled losses, and the truth about what they cost."""

from llamem import _startup as _startup  # isort: split

from llamem.layers import POLICIES, Policy, apply_stack, stack_layers, tiled_map, tiled_sum, unstack_layers
from llamem.llama import (
    PRESETS,
    Adapters,
    Llama,
    LlamaConfig,
    LoraConfig,
    Plan,
    generate,
    generate_text,
    load_adapters,
    load_pretrained,
    merge_adapter,
    save_adapter,
    save_pretrained,
)
from llamem.losses import (
    group_advantages,
    tiled_cross_entropy,
    tiled_dpo_loss,
    tiled_logprobs,
    tiled_policy_loss,
    tiled_token_loss,
)
from llamem.memory import CHIPS, Report, available, compare, compile_report, find_chip, saved_residuals
from llamem.planner import (
    NothingFits,
    estimate,
    find_fitting,
    find_plan,
    largest,
    longest_context,
    options,
)
from llamem.train import TrainSettings, abstract_lora_step, abstract_step
from llamem.verify import assert_remat, verify_remat

__all__ = [
    "CHIPS",
    "POLICIES",
    "PRESETS",
    "Adapters",
    "Llama",
    "LlamaConfig",
    "LoraConfig",
    "NothingFits",
    "Plan",
    "Policy",
    "Report",
    "TrainSettings",
    "abstract_lora_step",
    "abstract_step",
    "apply_stack",
    "assert_remat",
    "available",
    "compare",
    "compile_report",
    "estimate",
    "find_chip",
    "find_fitting",
    "find_plan",
    "generate",
    "generate_text",
    "group_advantages",
    "largest",
    "load_adapters",
    "load_pretrained",
    "longest_context",
    "merge_adapter",
    "options",
    "save_adapter",
    "save_pretrained",
    "saved_residuals",
    "stack_layers",
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
