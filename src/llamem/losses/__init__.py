"""Losses over a vocabulary without its logits."""

from llamem.losses.cross_entropy import tiled_cross_entropy, tiled_logprobs
from llamem.losses.rewards_and_preferences import (
    PolicyObjective,
    group_advantages,
    tiled_dpo_loss,
    tiled_policy_loss,
)
from llamem.losses.tile_choice import TileChoice, choose_tiles
from llamem.losses.token_loss import tiled_token_loss

__all__ = [
    "PolicyObjective",
    "TileChoice",
    "choose_tiles",
    "group_advantages",
    "tiled_cross_entropy",
    "tiled_dpo_loss",
    "tiled_logprobs",
    "tiled_policy_loss",
    "tiled_token_loss",
]
