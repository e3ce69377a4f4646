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

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
__version__ = metadata.version("llamem")
