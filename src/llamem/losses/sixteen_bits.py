"""Two bytes a number for what tiles of tokens keep: the logits of a tile, and the head's gradient while it grows.

bfloat16 spends eight of its bits on a range that neither needs: a sum that is rounded to it once per tile ends up with
two or three correct digits. Sixteen bits that count equal steps keep four. Logits are steps below the largest of their
row, so that no two of them share a scale with a third's. A row of the gradient is steps of its own size, after each
column is divided by that of hidden: one large feature, as language models have them, would else take all the bits.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from llamem.layers.varying import vary_together
from llamem.losses.one_tile import Operands, quiet, wide
from llamem.losses.online_softmax import AddOn, Seen

_STEPS_PER_NAT = 2048  # 65,536 steps reach 32 nats down, where a probability is 1e-14 of the largest
_MOST = 32_767
_ROWS = 2048  # of the head's gradient that are decoded at a time


def two_bytes(*arrays: Array) -> bool:
    """Whether the common type of these arrays has two bytes."""
    return jnp.result_type(*arrays).itemsize == 2


class Scratch(NamedTuple):
    """Room for the logits of a tile, `[tiles of columns, T, columns]`, or steps, `[.., columns, T]`.

    Steps lie below `top`, the maximum `[tiles of columns, T, 1]` of their row in that tile of columns; and they lie the
    other way round, as TPUs want them for the products: else the compiler turns them around in a copy.
    """

    logits: Array
    top: Array | None


def scratch(operands: Operands, rows: int, columns: int) -> Scratch:
    """Room for so many rows, in 16 bits where hidden and head have no more; one for all tiles of tokens."""
    x_ND, head, _ = operands
    tiles = -(-len(head[0]) // columns)
    if not two_bytes(x_ND, *head):
        return Scratch(jnp.zeros((tiles, rows, columns), wide(x_ND, *head)), None)
    return Scratch(jnp.zeros((tiles, columns, rows), jnp.int16), jnp.zeros((tiles, rows, 1), jnp.float32))


def keep(room: Scratch, columns: int) -> AddOn:
    """An add-on that keeps a tile's logits, steps to 1/4096 of a nat."""

    def step(state: Scratch, seen: Seen) -> Scratch:
        place = (lax.div(seen.ids_U[0], columns), 0, 0)
        if state.top is None:
            return Scratch(lax.dynamic_update_slice(state.logits, seen.z_NU[None], place), None)
        top_N1 = jnp.max(seen.z_NU, -1, keepdims=True)
        steps_NU = jnp.minimum(jnp.round((top_N1 - seen.z_NU) * _STEPS_PER_NAT), 2 * _MOST)
        codes_NU = (steps_NU - _MOST).astype(jnp.int32).astype(jnp.int16)
        return Scratch(
            lax.dynamic_update_slice(state.logits, codes_NU.T[None], place),
            lax.dynamic_update_slice(state.top, top_N1[None], place),
        )

    return AddOn(room, step)


def kept(room: Scratch, columns: int, rows: int, ids_U: Array) -> Array:
    """A tile of columns of what was kept of so many rows, `[N, U]`."""
    place = (lax.div(ids_U[0], columns), 0, 0)
    if room.top is None:
        return lax.dynamic_slice(room.logits, place, (1, rows, len(ids_U)))[0]
    found_NU = lax.dynamic_slice(room.logits, place, (1, len(ids_U), rows))[0].T
    top_N1 = lax.dynamic_slice(room.top, place, (1, rows, 1))[0]
    return top_N1 - (found_NU.astype(jnp.int32) + _MOST).astype(jnp.float32) / _STEPS_PER_NAT


class WideSum(NamedTuple):
    """A gradient `[V, D]` that grows by some rows at a time, in a floating-point type."""

    sum_VD: Array

    def grow(self, rows_UD: Array, first: Array) -> "WideSum":
        """With these rows added to those from `first` on."""
        old_UD = lax.dynamic_slice_in_dim(self.sum_VD, first, len(rows_UD))
        new_UD = old_UD + rows_UD.astype(old_UD.dtype)
        return WideSum(lax.dynamic_update_slice_in_dim(self.sum_VD, new_UD, first, 0))

    def scaled(self, cotangent: Array, dtype: Any) -> Array:
        """The sum for this cotangent of the loss, in this type."""
        return (self.sum_VD * cotangent).astype(dtype)


class SteppedSum(NamedTuple):
    """The same in two bytes a number: `steps_VD * size_V * ruler_D`, the whole numbers lying in the bits of floats.

    In a floating-point type of two bytes, since only so does a compiler write the result over them. Zero is the bits of
    that type's smallest normal number, and each step the next bits: compilers for CPUs carry such floats through
    float32, where NaN loses its bits and subnormal numbers become 0.
    """

    steps_VD: Array
    size_V1: Array
    ruler_D: Array

    def grow(self, rows_UD: Array, first: Array) -> "SteppedSum":
        """With these rows added to those from `first` on: rounded to 1/65,022 of what their largest number takes."""
        count = len(rows_UD)
        steps_UD = lax.dynamic_slice_in_dim(self.steps_VD, first, count)
        size_U1 = lax.dynamic_slice_in_dim(self.size_V1, first, count)
        new_UD = _whole(steps_UD) * size_U1 + rows_UD / self.ruler_D
        _, most = _codes(steps_UD.dtype)
        size_U1 = jnp.max(jnp.abs(new_UD), -1, keepdims=True) / most
        steps_UD = _in_bits(jnp.round(new_UD / jnp.where(size_U1 == 0, 1, size_U1)), steps_UD.dtype)
        return self._replace(
            steps_VD=lax.dynamic_update_slice_in_dim(self.steps_VD, steps_UD, first, 0),
            size_V1=lax.dynamic_update_slice_in_dim(self.size_V1, size_U1, first, 0),
        )

    def scaled(self, cotangent: Array, dtype: Any) -> Array:
        """The sum for this cotangent of the loss, written over the steps: a compiler would write beside them."""
        (bits_VD, size_V1, ruler_D), cotangent = vary_together(self, cotangent)
        assert bits_VD.dtype == dtype
        V, count = len(bits_VD), min(_ROWS, len(bits_VD))

        def decoded(bits_VD: Array, start: Array) -> tuple[Array, None]:
            # The last rows once more with some before them, which are done: a smaller tile outside the loop would be
            # written to a copy of everything by XLA of JAX 0.12.
            first = jnp.minimum(start, V - count)
            steps_UD = lax.dynamic_slice_in_dim(bits_VD, first, count)
            size_U1 = lax.dynamic_slice_in_dim(size_V1, first, count) * cotangent
            sum_UD = (_whole(steps_UD) * size_U1 * ruler_D).astype(dtype)
            new_U1 = first + jnp.arange(count)[:, None] >= start
            return lax.dynamic_update_slice_in_dim(bits_VD, jnp.where(new_U1, sum_UD, steps_UD), first, 0), None

        return lax.scan(decoded, bits_VD, jnp.arange(-(-V // max(1, count))) * count)[0]


def _codes(dtype: Any) -> tuple[int, int]:
    """The bits that mean 0, and how many steps there are to those of the type's largest number."""
    info = jnp.finfo(dtype)
    first, last = (int(np.asarray(x, dtype).view(np.int16)) for x in (info.smallest_normal, info.max))
    return first, last - first


def _in_bits(whole: Array, dtype: Any) -> Array:
    first, _ = _codes(dtype)
    code = jnp.abs(whole).astype(jnp.int32) + first
    return lax.bitcast_convert_type(jnp.where(whole < 0, code - 2**15, code).astype(jnp.int16), dtype)


def _whole(bits: Array) -> Array:
    first, _ = _codes(bits.dtype)
    code = lax.bitcast_convert_type(bits, jnp.int16).astype(jnp.int32)
    return jnp.where(code < 0, first - 2**15 - code, code - first).astype(jnp.float32)


def stepped_sum(head_VD: Array, x_ND: Array, w_N: Array) -> SteppedSum:
    """No gradient yet, of a head in two bytes; the ruler is the root mean square of each column of hidden."""
    ruler_D = jnp.sqrt(jnp.sum(jnp.square(quiet(x_ND, w_N).astype(jnp.float32)), 0) / max(1, len(x_ND)))
    zero_V1 = jnp.zeros((len(head_VD), 1), jnp.float32)
    return SteppedSum(jnp.zeros_like(head_VD), zero_V1, jnp.where(ruler_D == 0, 1, ruler_D))
