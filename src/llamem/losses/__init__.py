"""Cross-entropy and log-probabilities without the logits."""

from llamem.losses.choice import TileChoice, choose_tiles
from llamem.losses.cross_entropy import tiled_cross_entropy, tiled_logprobs

__all__ = ["TileChoice", "choose_tiles", "tiled_cross_entropy", "tiled_logprobs"]
