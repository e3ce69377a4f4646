"""Tiles of the vocabulary: how notebook 04 cuts the head, and the backward pass of its loss."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_matmul = partial(jnp.matmul, preferred_element_type=jnp.float32)


def word_tiles(W_VD: Float[Array, "V D"]) -> Float[Array, "tiles U D"]:
    """Return the head in tiles of equally many words: the largest multiple of 8, up to 768, that divides V."""
    sizes = [size for size in range(8, 769, 8) if len(W_VD) % size == 0]
    if not sizes:
        raise ValueError(
            f"W_VD has {len(W_VD)} words, and these tiles want a multiple of 8. Pad it, and mask the rest."
        )
    return W_VD.reshape(-1, sizes[-1], W_VD.shape[1])


def vocabulary_backward(kept: Any, cotangent: Any) -> tuple[Any, Any, None]:
    """Return the gradients of a sum of losses for hidden states and head, one tile of words after the other.

    `kept`: hidden states, head, targets and each token's finished logsumexp. A tile's logits are made again. Its rows
    of the head's gradient are finished at once; its part of the hidden states' is added to a sum in float32.
    """
    x_ND, W_VD, y_N, lse_N = kept
    tiles = word_tiles(W_VD)
    words = jnp.arange(len(W_VD)).reshape(len(tiles), -1)

    def add_tile(dx_ND: Any, tile: Any) -> tuple[Any, Any]:
        W_UD, words_U = tile
        softmax_NU = jnp.exp(_matmul(x_ND, W_UD.T) - lse_N[:, None])
        one_hot_NU = y_N[:, None] == words_U
        dz_NU = (cotangent * (softmax_NU - one_hot_NU)).astype(x_ND.dtype)
        return dx_ND + _matmul(dz_NU, W_UD), _matmul(dz_NU.T, x_ND).astype(W_VD.dtype)

    dx_ND, dW = jax.lax.scan(add_tile, jnp.zeros(x_ND.shape, jnp.float32), (tiles, words))
    return dx_ND.astype(x_ND.dtype), dW.reshape(W_VD.shape), None
