"""The online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) over tiles of the vocabulary, and its add-ons.

By itself it keeps a maximum and a sum of exponentials per token. Whatever else is wanted of the logits is summed up by
an add-on while a tile of them is alive.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from llamem.layers.tiling import fold_tiles
from llamem.losses.one_tile import (
    Operands,
    Softmax,
    Tiles,
    logits,
    matmul,
    matrices_of,
    project,
    row_losses,
    side_by_side,
    slope,
    wide,
)


class Partition(NamedTuple):
    """The softmax's denominator of each token, as `exp(max) * sum`, which cannot overflow."""

    max_N: Array
    sum_N: Array

    @property
    def lse_N(self) -> Array:
        """Its logarithm, logsumexp."""
        return self.max_N + jnp.log(self.sum_N)


class Seen(NamedTuple):
    """One tile of the online softmax, as add-ons see it."""

    ids_U: Array
    head_UD: Array
    z_NU: Array  # logits
    exp_NU: Array  # exp(z - maximum so far)
    shrink_N: Array  # exp(maximum before - maximum so far): what a sum of earlier exponentials is multiplied by
    raised_N: Array  # where this tile raised the maximum


class Meeting(NamedTuple):
    """What the devices of a mesh axis find when they compare their maxima, each after its own rows of the head."""

    axis: str
    shrink_N: Array  # exp(own maximum - that of all)
    leads_N: Array  # where the own maximum is that of all


def _psum(state: Array, meeting: Meeting) -> Array:
    return lax.psum(state, meeting.axis)


def _shrunken_psum(state: Array, meeting: Meeting) -> Array:
    return lax.psum(state * meeting.shrink_N, meeting.axis)


class AddOn(NamedTuple):
    """Something that is summed up along with the softmax.

    The first state, the next one, the state of all devices where they hold a part of the head each, and the result.
    """

    init: Array
    step: Callable[[Array, Seen], Array]
    join: Callable[[Array, Meeting], Array] = _psum
    end: Callable[[Array, Partition], Array] = lambda state, partition: state


def over_vocab(step: Callable, init: Any, head: list, tiles: Tiles) -> tuple[Any, Any]:
    """`fold_tiles` over tiles of the head's rows and their ids: `step(carry, (leaves, ids_U))`."""
    ids_V = tiles.first_id(head) + jnp.arange(head[0].shape[0])
    return fold_tiles(step, init, (head, ids_V), tiles.num_tiles, align=tiles.vocab_align)


def softmax_over_tiles(
    softmax: Softmax, tiles: Tiles, operands: Operands, add_ons: dict[str, AddOn]
) -> tuple[Partition, dict[str, Array]]:
    """The softmax's denominators, and the result of each add-on. One matrix product."""
    x_ND, head, _ = operands

    def step(carry: tuple, tile: tuple) -> tuple[tuple, tuple]:
        old, states = carry
        leaves, ids_U = tile
        z_NU = logits(softmax, project(softmax, x_ND, leaves))
        top_N = jnp.max(z_NU, -1)
        max_N = jnp.maximum(old.max_N, top_N)
        finite_N = jnp.where(jnp.isneginf(max_N), 0, max_N)  # -inf before the first id that a bias leaves in
        exp_NU, shrink_N = jnp.exp(z_NU - finite_N[:, None]), jnp.exp(old.max_N - finite_N)
        seen = Seen(ids_U, side_by_side(matrices_of(leaves)), z_NU, exp_NU, shrink_N, top_N > old.max_N)
        states = {name: add_on.step(states[name], seen) for name, add_on in add_ons.items()}
        return (Partition(max_N, old.sum_N * shrink_N + jnp.sum(exp_NU, -1)), states), ()

    zero_N = zeros(operands)
    start = Partition(jnp.full_like(zero_N, -jnp.inf), zero_N), {name: a.init for name, a in add_ons.items()}
    (partition, states), _ = over_vocab(step, start, head, tiles)
    if tiles.vocab_axis is not None:
        own, max_N = partition, lax.pmax(partition.max_N, tiles.vocab_axis)
        meeting = Meeting(tiles.vocab_axis, jnp.exp(own.max_N - max_N), own.max_N == max_N)
        partition = Partition(max_N, _shrunken_psum(own.sum_N, meeting))
        states = {name: add_on.join(states[name], meeting) for name, add_on in add_ons.items()}
    return partition, {name: add_on.end(states[name], partition) for name, add_on in add_ons.items()}


def loss_add_ons(softmax: Softmax, tiles: Tiles, operands: Operands) -> dict[str, AddOn]:
    """What a loss and its statistics need to know of the logits, beside maximum and sum."""
    add_ons = {"target": target_logit(operands)}
    if softmax.label_smoothing:
        add_ons["mean"] = mean_logit(operands, tiles.vocab(operands.head))
    if softmax.with_stats:
        add_ons |= {"entropy": entropy(operands), "accuracy": accuracy(operands, tiles.vocab(operands.head))}
    return add_ons


def rows_of(softmax: Softmax, partition: Partition, found: dict[str, Array]) -> dict:
    """Losses and statistics `[N]` from what `loss_add_ons` found."""
    stats = {name: found[name] for name in ("entropy", "accuracy") if name in found}
    return row_losses(softmax, partition.lse_N, found["target"], found.get("mean"), stats)


def zeros(operands: Operands) -> Array:
    """A zero for each token `[N]`, in the type of logits and losses."""
    return jnp.zeros(operands.x_ND.shape[0], wide(operands.x_ND, *operands.head))


def target_logit(operands: Operands) -> AddOn:
    """The logit of each token's target `[N]`."""
    targets_N1 = operands.targets_N[:, None]

    def step(state: Array, seen: Seen) -> Array:
        return state + jnp.sum(jnp.where(seen.ids_U == targets_N1, seen.z_NU, 0), -1)

    return AddOn(zeros(operands), step)


def mean_logit(operands: Operands, vocab: int) -> AddOn:
    """The mean of each token's logits `[N]`."""

    def step(state: Array, seen: Seen) -> Array:
        return state + jnp.sum(seen.z_NU, -1) / vocab

    return AddOn(zeros(operands), step)


def entropy(operands: Operands) -> AddOn:
    """The entropy of each token's softmax `[N]`, in nats: logsumexp less the mean of logits under the softmax."""

    def step(state: Array, seen: Seen) -> Array:
        # 0 * -inf, a logit that a bias took out, adds nothing.
        return state * seen.shrink_N + jnp.sum(jnp.where(seen.exp_NU == 0, 0, seen.exp_NU * seen.z_NU), -1)

    def end(state: Array, partition: Partition) -> Array:
        return partition.lse_N - state / partition.sum_N

    return AddOn(zeros(operands), step, _shrunken_psum, end)


def accuracy(operands: Operands, vocab: int) -> AddOn:
    """1 where the target has the largest logit, else 0: `[N]`. The state is the id of the largest so far."""

    def step(state: Array, seen: Seen) -> Array:
        return jnp.where(seen.raised_N, seen.ids_U[jnp.argmax(seen.z_NU, -1)], state)

    def end(state: Array, partition: Partition) -> Array:
        return (state == operands.targets_N).astype(partition.sum_N.dtype)

    def join(state: Array, meeting: Meeting) -> Array:
        return lax.pmin(jnp.where(meeting.leads_N, state, vocab), meeting.axis)

    return AddOn(jnp.zeros(operands.targets_N.shape, int), step, join, end)


def attended(softmax: Softmax, operands: Operands) -> AddOn:
    """`softmax(logits) @ head`, `[N, D]`: attention with the head for keys and values. The gradient of logsumexp.

    Of a device's own rows of the head alone, where it holds some.
    """
    x_ND, dtype = operands.x_ND, zeros(operands).dtype

    def step(state: Array, seen: Seen) -> Array:
        d_NU = seen.exp_NU * slope(softmax, seen.z_NU)
        narrow_NU = d_NU.astype(jnp.result_type(x_ND, seen.head_UD))
        return state * seen.shrink_N[:, None] + matmul(narrow_NU, seen.head_UD, (1, 0))

    def join(state: Array, meeting: Meeting) -> Array:
        return state * meeting.shrink_N[:, None]

    def end(state: Array, partition: Partition) -> Array:
        return state / partition.sum_N[:, None]

    return AddOn(jnp.zeros(x_ND.shape, dtype), step, join, end)


def head_sum(softmax: Softmax, operands: Operands) -> AddOn:
    """The sum of the head's rows, each by the slope of its logit: the gradient of a token's sum of logits.

    `[N, D]`, one matrix product; or `[D]` without soft-cap, where the slope is the same for all tokens. Of a device's
    own rows alone, where it holds some.
    """
    x_ND, dtype = operands.x_ND, zeros(operands).dtype

    def same_for_all(state: Array, seen: Seen) -> Array:
        return state + softmax.scale * jnp.sum(seen.head_UD, 0, dtype=dtype)

    def by_token(state: Array, seen: Seen) -> Array:
        narrow_NU = slope(softmax, seen.z_NU).astype(jnp.result_type(x_ND, seen.head_UD))
        return state + matmul(narrow_NU, seen.head_UD, (1, 0))

    def join(state: Array, meeting: Meeting) -> Array:
        return state

    if softmax.softcap is None:
        return AddOn(jnp.zeros(x_ND.shape[1:], dtype), same_for_all, join)
    return AddOn(jnp.zeros(x_ND.shape, dtype), by_token, join)


def kept_logits(operands: Operands, columns: int) -> AddOn:
    """The logits themselves, tile by tile of so many columns: `[tiles, N, columns]`."""
    zero_N, vocab = zeros(operands), operands.head[0].shape[0]

    def step(state: Array, seen: Seen) -> Array:
        return lax.dynamic_update_slice(state, seen.z_NU[None], (_number(seen.ids_U, columns), 0, 0))

    return AddOn(jnp.zeros((-(-vocab // columns), len(zero_N), columns), zero_N.dtype), step)


def kept_tile(kept: Array, ids_U: Array) -> Array:
    """One tile of `kept_logits` again, `[N, U]`."""
    _, tokens, columns = kept.shape
    return lax.dynamic_slice(kept, (_number(ids_U, columns), 0, 0), (1, tokens, len(ids_U)))[0]


def _number(ids_U: Array, columns: int) -> Array:
    return lax.div(ids_U[0], columns)  # XLA would work out `//`, which asks for signs, anew for every logit
