"""Llama 3 in less memory: rematerialised layer stacks, tiled losses, and the powers that put other weights in place."""

from importlib import metadata
from typing import TYPE_CHECKING

import jaxmem as jaxmem  # isort: split

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.adapters.lora import Adapters, LoraConfig, merge_adapter
    from llamem.files.peft import load_adapters, save_adapter
    from llamem.files.pretrained import load_pretrained, save_pretrained
    from llamem.layers.remat import POLICIES, Policy
    from llamem.layers.stack import apply_stack, stack_layers, unstack_layers
    from llamem.layers.tiling import tiled_map, tiled_sum
    from llamem.llama.config import PRESETS, LlamaConfig
    from llamem.llama.model import Llama
    from llamem.llama.plan import Plan
    from llamem.llama.sample import generate
    from llamem.losses.cross_entropy import tiled_cross_entropy, tiled_logprobs
    from llamem.losses.rewards_and_preferences import (
        PolicyObjective,
        group_advantages,
        tiled_dpo_loss,
        tiled_policy_loss,
    )
    from llamem.losses.token_loss import tiled_token_loss
    from llamem.planner.estimates import estimate
    from llamem.planner.search import find_plan, longest_context
    from llamem.runs.step_of_plan import abstract_lora_step, abstract_step
    from llamem.text.completion import generate_text
    from llamem.train.settings import TrainSettings

# The same for whoever runs: a name is imported when it is asked for.
_NAMES = {
    "llamem.adapters.lora": ("Adapters", "LoraConfig", "merge_adapter"),
    "llamem.files.peft": ("load_adapters", "save_adapter"),
    "llamem.files.pretrained": ("load_pretrained", "save_pretrained"),
    "llamem.layers.remat": ("POLICIES", "Policy"),
    "llamem.layers.stack": ("apply_stack", "stack_layers", "unstack_layers"),
    "llamem.layers.tiling": ("tiled_map", "tiled_sum"),
    "llamem.llama.config": ("PRESETS", "LlamaConfig"),
    "llamem.llama.model": ("Llama",),
    "llamem.llama.plan": ("Plan",),
    "llamem.llama.sample": ("generate",),
    "llamem.losses.cross_entropy": ("tiled_cross_entropy", "tiled_logprobs"),
    "llamem.losses.rewards_and_preferences": (
        "PolicyObjective",
        "group_advantages",
        "tiled_dpo_loss",
        "tiled_policy_loss",
    ),
    "llamem.losses.token_loss": ("tiled_token_loss",),
    "llamem.planner.estimates": ("estimate",),
    "llamem.planner.search": ("find_plan", "longest_context"),
    "llamem.runs.step_of_plan": ("abstract_lora_step", "abstract_step"),
    "llamem.text.completion": ("generate_text",),
    "llamem.train.settings": ("TrainSettings",),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
__version__ = metadata.version("llamem")
