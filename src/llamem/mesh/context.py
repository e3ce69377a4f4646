"""Context parallelism: the devices of one mesh axis share a sequence, inside `jax.shard_map(..., check_vma=False)`.

The sequence is cut into 2c pieces for c devices, and device i holds the pieces i and 2c - 1 - i ("zigzag"): under a
causal mask a late piece sees much and an early one little, and so every device computes as much as the others.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmem.chips import compiling_for
from llamem.layers.attention import SPLASH_BLOCK, Implementation, causal_attention, choose_attention, splash_attention
from llamem.layers.tiled_attention import flash_attention, visible_pairs


def local_positions(length: int, axis: str | None) -> Int[Array, " t"]:
    """Return the places, in a sequence of `length` tokens, of those on this device; of all without an axis."""
    if axis is None:
        return jnp.arange(length)
    return jnp.asarray(_zigzag(length, lax.axis_size(axis)))[lax.axis_index(axis)]


def context_attention(
    q_BTHh: Float[Array, "B t H h"],
    k_BTKh: Float[Array, "B t K h"],
    v_BTKh: Float[Array, "B t K h"],
    *,
    axis: str,
    implementation: Implementation = "auto",
) -> Float[Array, "B t H h"]:
    """Compute `causal_attention` of one device's queries, at `local_positions`, over everybody's keys and values.

    Keys and values, which have few heads, are gathered; the queries stay where they are. "auto" chooses as
    `causal_attention` does, with Splash where a piece is a multiple of its block. Raises ValueError for "cudnn".
    """
    devices, t = lax.axis_size(axis), q_BTHh.shape[1]
    k_BSKh, v_BSKh = (_in_order(lax.all_gather(a, axis), devices) for a in (k_BTKh, v_BTKh))
    if implementation == "cudnn":
        raise ValueError("implementation='cudnn' computes whole sequences: with context parallelism use 'tiled'.")
    if implementation == "auto":
        implementation = choose_attention(t, tpu="TPU" in compiling_for(), block=2 * SPLASH_BLOCK)
    places = _zigzag(t * devices, devices)
    if implementation == "splash":
        return splash_attention(q_BTHh, k_BSKh, v_BSKh, places=places, axis=axis)
    positions_BT = jnp.broadcast_to(jnp.asarray(places)[lax.axis_index(axis)], q_BTHh.shape[:2])
    if implementation == "tiled":
        pairs = jnp.asarray(visible_pairs(places, t * devices))[lax.axis_index(axis)]
        return flash_attention(q_BTHh, k_BSKh, v_BSKh, positions_BT, pairs=pairs)
    return causal_attention(q_BTHh, k_BSKh, v_BSKh, q_positions=positions_BT, implementation=implementation)


def _zigzag(length: int, devices: int) -> np.ndarray:
    """Return positions `[devices, length / devices]`: each device's two pieces."""
    pieces = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return np.concatenate([pieces[:devices], pieces[: devices - 1 : -1]], axis=1)


def _in_order(a: Array, devices: int) -> Array:
    """Return `[devices, B, t, ..]`, two pieces from each device, as `[B, T, ..]` in the order of the sequence."""
    first, second = jnp.split(a, 2, axis=2)
    pieces = jnp.concatenate([first, second[::-1]])
    return jnp.moveaxis(pieces, 0, 1).reshape(a.shape[1], devices * a.shape[2], *a.shape[3:])
