"""Llama 3 in less memory: rematerialised layer stacks, tiled losses, and the truth about what they cost."""

from llamem import _quiet as _quiet  # isort: split

from llamem.config import PRESETS, LlamaConfig, RopeScaling
from llamem.losses import tiled_cross_entropy, tiled_logprobs
from llamem.memory import compile_report
from llamem.model import KVCache, Llama
from llamem.pretrained import load_pretrained, save_pretrained
from llamem.remat import POLICIES, Policy
from llamem.report import Comparison, Report, compare
from llamem.residuals import saved_residuals
from llamem.sample import generate
from llamem.stack import apply_stack, stack_layers, unstack_layers
from llamem.step import TrainSettings, abstract_step
from llamem.targets import TARGETS, available, target
from llamem.tile_choice import TileChoice, choose_tiles
from llamem.tiling import tiled_map, tiled_sum
from llamem.verify import assert_remat, verify_remat

__all__ = [
    "POLICIES",
    "PRESETS",
    "TARGETS",
    "Comparison",
    "KVCache",
    "Llama",
    "LlamaConfig",
    "Policy",
    "Report",
    "RopeScaling",
    "TileChoice",
    "TrainSettings",
    "abstract_step",
    "apply_stack",
    "assert_remat",
    "available",
    "choose_tiles",
    "compare",
    "compile_report",
    "generate",
    "load_pretrained",
    "save_pretrained",
    "saved_residuals",
    "stack_layers",
    "target",
    "tiled_cross_entropy",
    "tiled_logprobs",
    "tiled_map",
    "tiled_sum",
    "unstack_layers",
    "verify_remat",
]
