"""Any function of a token's log-probability and entropy as a loss."""

import dataclasses
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from jaxmem.common.checks import check_one_of, check_whole
from llamem.layers.tile_loops import devices_of_compiler, partitioned
from llamem.losses.cross_entropy import Head, Scalar, reduce_compiled
from llamem.losses.loss_arguments import check_batch, check_head, static_number
from llamem.losses.tile_choice import resolve_tiles
from llamem.losses.vocab_tiles import LogitSummary, Softmax, Tiles
from llamem.losses.weighted_sum import reduce_losses

__all__ = ["tiled_token_loss"]

Mask = Float[Array, "*batch"] | Bool[Array, "*batch"] | Integer[Array, "*batch"]
TokenLoss = Callable[[Array, Array, Any], Array]


def tiled_token_loss(
    fn: TokenLoss,
    hidden: Float[Array, "*batch D"],
    head: Head,
    targets: Integer[Array, "*batch"],
    extras: Any = (),
    *,
    weights: Mask | None = None,
    normalizer: Scalar | None = None,
    num_tiles: int | Literal["auto"] = "auto",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    temperature: Scalar = 1.0,
    logit_softcap: Scalar | None = None,
    ignore_index: int = -100,
) -> Float[Array, ""]:
    """Return the mean over tokens of any function of a token's own log-probability and entropy.

    Tiles of tokens take 3 matrix products, 2 with a frozen head, and sum the head's gradient in float32, `4VD` bytes.
    Tiles of the vocabulary take 4 and need no such sum. 1 product without gradients; no array has `tokens * vocab`
    numbers. A loss of whole sequences, such as DPO, is none of these: take `tiled_logprobs`.

    Args:
        fn: takes two float32 scalars, nats, and one token's extras; returns a scalar. What differs from step to step
            belongs in extras: on tiles of tokens JAX refuses a gradient for what `fn` closes over. Outside of `jax.jit`
            a function is compiled in each call; a callable frozen dataclass, as `PolicyObjective` is one, once.
        hidden: `[..., D]`, of the last layer.
        head: `[V, D]`, or a tuple of matrices that side by side are one, of which the frozen ones cost no gradient.
        targets: `[...]`, ids below V, or `ignore_index`. Any other id makes the loss NaN.
        extras: tree of arrays `[..., *any]`: each token's advantage, old log-probability and so on.
        weights: `[...]`, of each token, default 1; a mask. Tokens of weight 0 add nothing, whatever their extras.
        normalizer: what the sum is divided by, default the sum of weights. Give the count over all devices or
            micro-batches where these are parts of one batch.
        num_tiles: at least 1, need not divide; "auto" asks `choose_tiles` about the chip that compiles.
        axis: "tokens" or "vocab". "auto" asks `choose_tiles` where the head is differentiated, and is "tokens" where it
            is frozen or `num_tiles` is given.
        temperature: the logits are divided by it, as they were when the targets were drawn.
        logit_softcap: `cap * tanh(logits / cap)`.
        ignore_index: the id of targets that do not count.

    Returns:
        A float32 scalar (0 where no token counts). Reverse mode only.

    Source: gradients in the forward pass are Liger-Kernel's (arXiv 2410.10989), there for fixed losses and by autodiff.
    """
    check_one_of("axis", axis, ("auto", "tokens", "vocab"))
    batch = check_batch(hidden, targets, weights)
    matrices = check_head(head, batch.hidden)
    extras = jax.tree.map(partial(_check_extra, batch.targets.shape), extras)
    softmax = Softmax(
        jnp.result_type(batch.hidden, *matrices),
        scale=1 / static_number("temperature", temperature, above=0),
        softcap=None if logit_softcap is None else static_number("logit_softcap", logit_softcap, above=0),
        with_entropy=True,
    )
    _check_token_loss(fn, extras, batch.targets.ndim, softmax.wide)
    devices = devices_of_compiler((batch, matrices))
    shape = -(-batch.targets.size // devices), batch.hidden.shape[-1], matrices[0].shape[0]
    facts = {"dtype": softmax.dtype, "with_entropy": True}
    trained, frozen = (
        Tiles(*resolve_tiles(num_tiles, axis, shape, head_trained=is_trained, **facts), devices=devices)
        for is_trained in (True, False)
    )
    ignore_index = check_whole("ignore_index", ignore_index, at_least=-(2**31))
    static = _LossOfTokens(fn), softmax, (trained, frozen), "mean", ignore_index
    # Kept by its function, each lambda would stay compiled for ever, whatever becomes of the values that it reads.
    compute = partial(reduce_compiled, *static) if _compares_by_value(fn) else jax.jit(partial(reduce_losses, *static))
    return partitioned(compute, PartitionSpec(), batch, matrices, extras, normalizer)


@dataclasses.dataclass(frozen=True)
class _LossOfTokens:
    """Losses `[T]`; tokens that do not count reach `fn` as zeros, and what it makes of them reaches nothing."""

    fn: TokenLoss

    def __call__(self, summary: LogitSummary, weights_T: Array, extras: Any) -> Array:
        def masked(leaf: Array) -> Array:
            counts = (weights_T != 0).reshape(*weights_T.shape, *[1] * (leaf.ndim - weights_T.ndim))
            return jnp.where(counts, leaf, jnp.zeros((), leaf.dtype))

        of_tokens = self.fn
        for _ in weights_T.shape:
            of_tokens = jax.vmap(of_tokens)
        return masked(of_tokens(*jax.tree.map(masked, (summary.logprob, summary.entropy, extras))))


def _compares_by_value(fn: Any) -> bool:
    """Return whether two that are equal compute the same: a frozen dataclass does, a function reads what changes."""
    is_data = dataclasses.is_dataclass(fn) and not isinstance(fn, type)
    return is_data and type(fn).__eq__ is not object.__eq__ and isinstance(fn, Hashable)


def _check_extra(shape: tuple[int, ...], leaf: Any) -> Array:
    leaf = jnp.asarray(leaf)
    if leaf.shape[: len(shape)] != shape:
        raise ValueError(
            f"Each array of extras must begin with hidden's batch shape {shape}, got {leaf.shape}. Broadcast what all "
            "tokens of a sequence share, such as its advantage."
        )
    return leaf


def _check_token_loss(fn: TokenLoss, extras: Any, dims: int, dtype: Any) -> None:
    of_token = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[dims:], leaf.dtype), extras)
    number = jax.ShapeDtypeStruct((), dtype)
    loss = jax.eval_shape(fn, number, number, of_token)
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"fn must return one real number for one token, got {loss}. It is given scalars: a token's log-probability "
            "and entropy, and its row of each array of extras."
        )
