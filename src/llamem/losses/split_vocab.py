"""Cross-entropy where every device holds some rows of the head: inside `jax.shard_map(..., check_vma=False)`.

Each device goes over the tiles of its own rows alone. Devices meet after the loop, with one maximum and one sum per
token, and after the gradients' loop, with one sum of the hidden states' gradients.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from llamem.losses.choice import cache_columns, choose_tiles
from llamem.losses.one_tile import Softmax
from llamem.losses.passes import online_softmax, vocab_gradients


def split_vocab_cross_entropy(
    hidden: Float[Array, "*batch D"],
    head: Float[Array, "rows D"],
    targets: Int[Array, "*batch"],
    *,
    axis_name: str,
    num_tiles: int | Literal["auto"] = "auto",
    normalizer: float | None = None,
) -> Float[Array, ""]:
    """Mean softmax cross-entropy of `hidden @ whole.T`, where the devices of `axis_name` hold the whole head's rows.

    `hidden` and `targets` are the same on all of them, and so is the result, f32. Tiles cut the device's own rows:
    4 matrix products in all, and no collective inside the loops. `num_tiles`, `normalizer`: as in
    `tiled_cross_entropy`. An id outside the whole vocabulary gives NaN.
    Source: Megatron-LM's vocabulary-parallel cross-entropy (arXiv 1909.08053).
    """
    x_ND, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    rows = head.shape[0]
    if num_tiles == "auto":
        num_tiles = choose_tiles(targets.size, hidden.shape[-1], rows, dtype=head.dtype, axis="vocab").num_tiles
    cfg = Softmax(num_tiles=num_tiles, axis="vocab", columns=cache_columns())
    loss_N = _losses(cfg, axis_name, x_ND, head, targets_N - lax.axis_index(axis_name) * rows)
    known_N = (targets_N >= 0) & (targets_N < rows * lax.axis_size(axis_name))
    return jnp.sum(jnp.where(known_N, loss_N, jnp.nan)) / (normalizer or targets_N.size)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(cfg: Softmax, axis: str, x_ND: Array, head: Array, own_N: Array) -> Array:
    return _forward(cfg, axis, x_ND, head, own_N)[0]


def _forward(cfg: Softmax, axis: str, x_ND: Array, head: Array, own_N: Array) -> tuple[Array, Any]:
    max_N, sum_N, target_N = online_softmax(cfg, x_ND, [head], own_N)  # of a target elsewhere: 0
    top_N = lax.pmax(max_N, axis)
    # One message: what is left of each device's sum, and the logit of the target from the one that has it.
    sum_N, target_N = lax.psum((sum_N * jnp.exp(max_N - top_N), target_N), axis)
    return top_N + jnp.log(sum_N) - target_N, (x_ND, head, own_N, top_N, sum_N)


def _backward(cfg: Softmax, axis: str, residuals: Any, d_N: Array) -> tuple[Array, Array, None]:
    x_ND, head, own_N, top_N, sum_N = residuals
    # Else XLA may keep logits of the forward pass until now instead of making them again.
    x_ND = lax.optimization_barrier(x_ND)
    grads = vocab_gradients(cfg, x_ND, [head], own_N, (top_N, sum_N), d_N, ("x", "0"))
    return lax.psum(grads["x"], axis), grads["0"], None


_losses.defvjp(_forward, _backward)
