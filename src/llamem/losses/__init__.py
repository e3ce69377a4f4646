"""Cross-entropy, log-probabilities, policy gradients and preferences without the logits."""

from llamem.losses.choice import TileChoice, choose_tiles
from llamem.losses.cross_entropy import tiled_cross_entropy, tiled_logprobs
from llamem.losses.policy_gradient import group_advantages, tiled_policy_loss
from llamem.losses.preferences import tiled_dpo_loss
from llamem.losses.token_loss import tiled_token_loss

__all__ = [
    "TileChoice",
    "choose_tiles",
    "group_advantages",
    "tiled_cross_entropy",
    "tiled_dpo_loss",
    "tiled_logprobs",
    "tiled_policy_loss",
    "tiled_token_loss",
]
