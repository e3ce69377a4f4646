"""The weighted sum of any loss of a token's logits, over tiles of tokens or of the vocabulary; which tokens count."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from llamem.layers.custom_rules import combine, with_rule
from llamem.layers.tile_loops import scaled, split_shares, sum_tiles, vary_together
from llamem.losses.loss_arguments import Batch
from llamem.losses.vocab_tiles import (
    LogitSummary,
    Softmax,
    Tiles,
    make_logits,
    scale_for_float16,
    summary_of_logits,
    summary_over_tiles,
)

# The summary of some tokens' logits, their weights and extras, to losses `[T]`.
LossOfSummary = Callable[[LogitSummary, Array, Any], Array]


def reduce_losses(
    loss_of: LossOfSummary,
    softmax: Softmax,
    tiles: tuple[Tiles, Tiles],
    reduction: str,
    ignore_index: int,
    batch: Batch,
    head: list,
    extras: Any,
    normalizer: Any,
) -> Array:
    """Return the losses of a batch, weighted and reduced. `tiles`: where the head is differentiated, and where not."""
    if tiles[0].devices > 1:
        head = [_gather_columns(matrix) for matrix in head]
    dims = batch.targets.ndim
    # On a mesh tokens keep their axes: in a row, those of an inner axis that is divided could not lie where they do.
    shape = batch.targets.shape if tiles[0].devices > 1 and dims else (-1,)
    x_ND, targets_N = batch.hidden.reshape(*shape, batch.hidden.shape[-1]), batch.targets.reshape(shape)
    extras = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[dims:]), extras)
    targets_N, counts_N, unknown_N = known_targets(targets_N, ignore_index, tiles[0].vocab(head))
    # 0 / 0 for an id that does not exist: there `jax.debug_nans` and NaN checks find it.
    known_N = (~unknown_N).astype(softmax.wide)
    weights_N = jnp.ones_like(known_N) if batch.weights is None else batch.weights.reshape(shape).astype(softmax.wide)
    weights_N = jnp.where(counts_N, weights_N, 0) * known_N / known_N
    if reduction == "none":
        summary = summary_over_tiles(softmax, tiles[0], x_ND, head, targets_N)
        return (weights_N * loss_of(summary, weights_N, extras)).reshape(batch.targets.shape)
    if reduction == "mean":
        # Divided before, not after: hidden's gradient is rounded once to its type, while it waits for the cotangent.
        divisor = jnp.sum(weights_N) if normalizer is None else normalizer
        if jnp.shape(divisor):
            raise ValueError(f"normalizer must be one number, such as a mask's sum; got shape {jnp.shape(divisor)}.")
        nothing_counts = jnp.all(weights_N == 0) & (divisor == 0)
        weights_N = weights_N / jnp.where(nothing_counts, 1, divisor)
    scale = scale_for_float16(softmax, weights_N)
    args = head, x_ND, targets_N, weights_N * scale, extras
    if tiles[0] == tiles[1]:
        return sum_losses(loss_of, softmax, tiles[0], *args) / scale
    return _sum_by_head(loss_of, softmax, tiles, vary_together(*args)) / scale


def sum_losses(
    loss_of: LossOfSummary,
    softmax: Softmax,
    tiles: Tiles,
    head: list,
    x_ND: Array,
    targets_N: Array,
    weights_N: Array,
    extras: Any,
) -> Array:
    """Return `sum(weights * loss_of(summary, weights, extras))`.

    Over tiles of the vocabulary: 4 matrix products, and no sum in the shape of the head. A tile of tokens sees the
    whole vocabulary, so `tiled_sum` makes its gradients while its logits are there: 3 products. A frozen head: 2.
    """
    if tiles.axis == "vocab":
        summary = summary_over_tiles(softmax, tiles, x_ND, head, targets_N)
        return jnp.sum(weights_N * loss_of(summary, weights_N, extras))

    def tile(head: list, xs: tuple) -> Array:
        x_TD, targets_T, w_T, extras = xs
        silent_T = (w_T == 0) & ~jnp.all(jnp.isfinite(x_TD), -1)  # 0 * NaN would be NaN
        x_TD = jnp.where(silent_T[..., None], 0, x_TD)
        summary = summary_of_logits(softmax, make_logits(softmax, x_TD, head), targets_T)
        return jnp.sum(w_T * loss_of(summary, w_T, extras))

    xs = x_ND, targets_N, weights_N, extras
    if tiles.devices > 1:
        xs = _shares(xs, targets_N.shape, tiles)
    return sum_tiles(tile, head, _pad_to_equal_tiles(xs, tiles.count), tiles.count)


def _gather_columns(matrix_VD: Array) -> Array:
    """Return a matrix of the head with whole rows on every device: gathered once, before any loop of tiles.

    Else each tile would be multiplied by columns, and its logits added up over devices.
    """
    mesh = jax.typeof(matrix_VD).sharding.mesh
    if mesh.empty:
        return matrix_VD
    spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, None)
    return jax.lax.with_sharding_constraint(matrix_VD, NamedSharding(mesh, spec))


def _shares(xs: Any, shape: tuple[int, ...], tiles: Tiles) -> Any:
    """Return arrays of tokens `[*shape, *any]` as `[T, .., *any]`, of which slices have something of every device.

    Whichever axis of `shape` a mesh divides, T is what one device has of the last, or a part of it.
    """
    dims = len(shape)
    shares = math.gcd(shape[-1], tiles.devices)  # whatever divides the axis is a part of them
    if shape[-1] // shares < tiles.count and dims > 1:
        in_a_row = jax.tree.map(lambda a: a.reshape(-1, *a.shape[dims:]), xs)
        return _shares(in_a_row, (math.prod(shape),), tiles)
    return split_shares(xs, dims - 1, shares)


def _pad_to_equal_tiles(xs: Any, num_tiles: int) -> Any:
    """Return the rows with zeros after them, so that all tiles are equal and run in one loop."""
    tokens = jax.tree.leaves(xs)[0].shape[0]
    rows_per_tile = max(1, -(-tokens // num_tiles))
    missing = -tokens % rows_per_tile
    return jax.tree.map(lambda a: jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)), xs) if missing else xs


def _sum_by_head(loss_of: LossOfSummary, softmax: Softmax, tiles: tuple[Tiles, Tiles], args: tuple) -> Array:
    """Return the weighted sum over the first tiles where the head is differentiated, else over the second.

    Gradients are made in the forward pass, where it is known which are asked for.
    """

    def value(*args: Any) -> Array:
        return sum_losses(loss_of, softmax, tiles[1], *args)

    def forward(wanted: tuple, frozen: tuple) -> tuple[Array, Any]:
        chosen = tiles[0] if jax.tree.leaves(wanted[0]) else tiles[1]
        return jax.value_and_grad(lambda w: sum_losses(loss_of, softmax, chosen, *combine(w, frozen)))(wanted)

    types = jax.tree.map(jax.typeof, args)
    return with_rule(value, lambda *kept: scaled(types, *kept), forward)(*args)


def known_targets(targets_N: Array, ignore_index: int, vocab: int) -> tuple[Array, Array, Array]:
    """Return targets as int32 ids inside the vocabulary, which of them count, and which are no ids at all.

    Targets are compared in their own type, whatever it is: a number that it does not hold equals none of them, but
    would wrap around.
    """
    limits = jnp.iinfo(targets_N.dtype)
    counts_N = jnp.ones(targets_N.shape, bool)
    if limits.min <= ignore_index <= limits.max:
        counts_N = targets_N != ignore_index
    inside_N = targets_N >= 0
    if vocab <= limits.max:
        inside_N &= targets_N < vocab
    return jnp.where(inside_N, targets_N, 0).astype(jnp.int32), counts_N, counts_N & ~inside_N
