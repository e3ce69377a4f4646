"""Two bytes a number for what tiles of tokens keep: the logits of a tile, and the head's gradient while it grows.

bfloat16 spends eight of its bits on a range that neither needs: a sum that is rounded to it once per tile ends up with
two or three correct digits. Sixteen bits that count equal steps keep four. Logits are steps below the largest of their
row, so that no two of them share a scale with a third's. A row of the gradient is steps of its own size, after each
column is divided by that of hidden: one large feature, as language models have them, would else take all the bits.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from llamem.losses.one_tile import Operands, quiet
from llamem.losses.online_softmax import AddOn, Seen, kept_logits, kept_tile

_STEPS_PER_NAT = 2048  # 65,536 steps reach 32 nats down, where a probability is 1e-14 of the largest
_MOST = 32_767


def two_bytes(*arrays: Array) -> bool:
    """Whether the common type of these arrays has two bytes."""
    return jnp.result_type(*arrays).itemsize == 2


class KeptLogits(NamedTuple):
    """Tiles of logits `[tiles, N, columns]` as steps below the maximum `[tiles, N]` of their row in that tile."""

    codes: Array
    top: Array


def keep(operands: Operands, columns: int) -> tuple[AddOn, Callable[[Array | KeptLogits, Array], Array]]:
    """An add-on that keeps the logits in so many columns at a time, and the function that reads a tile `[N, U]`.

    In 16 bits where hidden and head have no more, to 1/4096 of a nat; else as they are.
    """
    x_ND, head, _ = operands
    if not two_bytes(x_ND, *head):
        return kept_logits(operands, columns), kept_tile
    tiles, tokens = -(-len(head[0]) // columns), len(x_ND)
    start = KeptLogits(jnp.zeros((tiles, tokens, columns), jnp.int16), jnp.zeros((tiles, tokens, 1), jnp.float32))

    def step(state: KeptLogits, seen: Seen) -> KeptLogits:
        top_N1 = jnp.max(seen.z_NU, -1, keepdims=True)
        steps_NU = jnp.minimum(jnp.round((top_N1 - seen.z_NU) * _STEPS_PER_NAT), 2 * _MOST)
        codes_NU = (steps_NU - _MOST).astype(jnp.int32).astype(jnp.int16)
        place = (lax.div(seen.ids_U[0], columns), 0, 0)
        return KeptLogits(
            lax.dynamic_update_slice(state.codes, codes_NU[None], place),
            lax.dynamic_update_slice(state.top, top_N1[None], place),
        )

    def read(state: KeptLogits, ids_U: Array) -> Array:
        place = (lax.div(ids_U[0], columns), 0, 0)
        codes_NU = lax.dynamic_slice(state.codes, place, (1, tokens, len(ids_U)))[0]
        top_N1 = lax.dynamic_slice(state.top, place, (1, tokens, 1))[0]
        return top_N1 - (codes_NU.astype(jnp.int32) + _MOST).astype(jnp.float32) / _STEPS_PER_NAT

    return AddOn(start, step), read


class WideSum(NamedTuple):
    """A gradient `[V, D]` that grows by some rows at a time, in a floating-point type."""

    sum_VD: Array

    def grow(self, rows_UD: Array, first: Array) -> "WideSum":
        """With these rows added to those from `first` on."""
        old_UD = lax.dynamic_slice_in_dim(self.sum_VD, first, len(rows_UD))
        new_UD = old_UD + rows_UD.astype(old_UD.dtype)
        return WideSum(lax.dynamic_update_slice_in_dim(self.sum_VD, new_UD, first, 0))

    def scaled(self, cotangent: Array) -> Array:
        """The sum for this cotangent of the loss, in the wider type of both."""
        return self.sum_VD * cotangent


class SteppedSum(NamedTuple):
    """The same in two bytes a number: `steps_VD * size_V * ruler_D`, the whole numbers lying in the bits of floats.

    In a floating-point type of two bytes, since only so does a compiler write the result over them.
    """

    steps_VD: Array
    size_V1: Array
    ruler_D: Array

    def grow(self, rows_UD: Array, first: Array) -> "SteppedSum":
        """With these rows added to those from `first` on: rounded to 1/65,534 of what their largest number takes."""
        count = len(rows_UD)
        steps_UD = lax.dynamic_slice_in_dim(self.steps_VD, first, count)
        size_U1 = lax.dynamic_slice_in_dim(self.size_V1, first, count)
        new_UD = _whole(steps_UD) * size_U1 + rows_UD / self.ruler_D
        size_U1 = jnp.max(jnp.abs(new_UD), -1, keepdims=True) / _MOST
        whole_UD = jnp.round(new_UD / jnp.where(size_U1 == 0, 1, size_U1)).astype(jnp.int32).astype(jnp.int16)
        steps_UD = lax.bitcast_convert_type(whole_UD, self.steps_VD.dtype)
        return self._replace(
            steps_VD=lax.dynamic_update_slice_in_dim(self.steps_VD, steps_UD, first, 0),
            size_V1=lax.dynamic_update_slice_in_dim(self.size_V1, size_U1, first, 0),
        )

    def scaled(self, cotangent: Array) -> Array:
        """The sum for this cotangent of the loss, float32."""
        return _whole(self.steps_VD) * (self.size_V1 * cotangent) * self.ruler_D


def _whole(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.int16).astype(jnp.float32)


def stepped_sum(head_VD: Array, x_ND: Array, w_N: Array) -> SteppedSum:
    """No gradient yet, of a head in two bytes; the ruler is the root mean square of each column of hidden."""
    ruler_D = jnp.sqrt(jnp.sum(jnp.square(quiet(x_ND, w_N).astype(jnp.float32)), 0) / max(1, len(x_ND)))
    zero_V1 = jnp.zeros((len(head_VD), 1), jnp.float32)
    return SteppedSum(jnp.zeros_like(head_VD), zero_V1, jnp.where(ruler_D == 0, 1, ruler_D))
