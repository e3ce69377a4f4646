"""Losses over a vocabulary without its logits."""

from typing import TYPE_CHECKING

from jaxmem.common.lazy import lazy_names

if TYPE_CHECKING:
    from llamem.losses.cross_entropy import tiled_cross_entropy, tiled_logprobs
    from llamem.losses.rewards_and_preferences import (
        PolicyObjective,
        group_advantages,
        tiled_dpo_loss,
        tiled_policy_loss,
    )
    from llamem.losses.tile_choice import TileChoice, choose_tiles
    from llamem.losses.token_loss import tiled_token_loss

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
