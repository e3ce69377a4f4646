"""Tiles of the vocabulary: how notebook 04 cuts the head."""

from jaxtyping import Array, Float


def word_tiles(W_VD: Float[Array, "V D"]) -> Float[Array, "tiles U D"]:
    """Return the head in tiles of equally many words: the largest multiple of 8, up to 768, that divides V."""
    sizes = [size for size in range(8, 769, 8) if len(W_VD) % size == 0]
    if not sizes:
        raise ValueError(
            f"W_VD has {len(W_VD)} words, and these tiles want a multiple of 8. Pad it, and mask the rest."
        )
    return W_VD.reshape(-1, sizes[-1], W_VD.shape[1])
