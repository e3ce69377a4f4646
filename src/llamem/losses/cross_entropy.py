"""Cross-entropy and log-probabilities of `hidden @ head.T` that never hold the `[tokens, vocab]` array."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer

from llamem.layers.tiling import check_num_tiles, floating_type
from llamem.layers.varying import axes_of, partitioned, vary, vary_together
from llamem.losses import arguments
from llamem.losses.choice import choose_tiles, tiles_for_chip
from llamem.losses.gradients import loss_rows, summed_loss
from llamem.losses.one_tile import STATISTICS, Softmax, Tiles, quiet, wide

__all__ = ["tiled_cross_entropy", "tiled_logprobs"]

Head = Float[Array, "V D"] | tuple[Float[Array, "V _"], ...] | Callable[[Array], Array]
Scalar = Float[Array, ""] | float


@overload
def tiled_cross_entropy(
    hidden: Float[Array, "*batch D"],
    head: Head,
    targets: Integer[Array, "*batch"],
    *,
    weights: Float[Array, "*batch"] | None = None,
    bias: Float[Array, " V"] | None = None,
    num_tiles: int | Literal["auto"] = "auto",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    reduction: Literal["mean", "sum", "none"] = "mean",
    normalizer: Scalar | None = None,
    ignore_index: int = -100,
    label_smoothing: Scalar = 0.0,
    z_loss: Scalar = 0.0,
    logit_softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    accumulate_dtype: Any = jnp.float32,
    vocab_axis_name: str | None = None,
    return_stats: Literal[False] = False,
    explain: Callable[[str], Any] | None = None,
) -> Float[Array, "*out"]: ...


@overload
def tiled_cross_entropy(
    hidden: Float[Array, "*batch D"],
    head: Head,
    targets: Integer[Array, "*batch"],
    *,
    return_stats: Literal[True],
    weights: Float[Array, "*batch"] | None = None,
    bias: Float[Array, " V"] | None = None,
    num_tiles: int | Literal["auto"] = "auto",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    reduction: Literal["mean", "sum", "none"] = "mean",
    normalizer: Scalar | None = None,
    ignore_index: int = -100,
    label_smoothing: Scalar = 0.0,
    z_loss: Scalar = 0.0,
    logit_softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    accumulate_dtype: Any = jnp.float32,
    vocab_axis_name: str | None = None,
    explain: Callable[[str], Any] | None = None,
) -> tuple[Float[Array, "*out"], dict[str, Array]]: ...


def tiled_cross_entropy(
    hidden: Float[Array, "*batch D"],
    head: Head,
    targets: Integer[Array, "*batch"],
    *,
    weights: Float[Array, "*batch"] | None = None,
    bias: Float[Array, " V"] | None = None,
    num_tiles: int | Literal["auto"] = "auto",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    reduction: Literal["mean", "sum", "none"] = "mean",
    normalizer: Scalar | None = None,
    ignore_index: int = -100,
    label_smoothing: Scalar = 0.0,
    z_loss: Scalar = 0.0,
    logit_softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    accumulate_dtype: Any = jnp.float32,
    vocab_axis_name: str | None = None,
    return_stats: bool = False,
    explain: Callable[[str], Any] | None = None,
) -> Any:
    """Softmax cross-entropy of `hidden @ head.T` against `targets`, a tile of logits at a time.

    Tiles of tokens make all gradients in the forward pass (3 matrix products). Tiles of the vocabulary compute the
    logits a second time (4), but need no float32 `[V, D]` accumulator. Only what is differentiated is computed: 2
    products with a frozen head, 1 in evaluation. `reduction="none"` with a trained head takes 4 on either axis.

    Logits and losses are float32 whatever the inputs; products are in the common type of hidden and head and
    accumulate in float32. Reverse mode, and forward over reverse, differentiate it; for `jax.jvp` alone put a plain
    loss per token into `tiled_map`.

    A token that is ignored or has a weight of 0 adds nothing to the loss, nor to any gradient but that of its own
    weight, even where its hidden state is not finite. Gradients wait for the loss's cotangent in a type wide enough
    for a loss scale, so float16 works with one.

    Args:
        hidden: `[..., D]`, of the last layer.
        head: `[V, D]`, tied to the embedding or not; or a tuple of matrices `[V, D_i]` that side by side are one, of
            which the frozen ones cost no gradient; or a callable pytree from `[tokens, D]` to `[tokens, V]` that
            carries its own parameters, such as `jax.tree_util.Partial(fn, *params)` (tiles of tokens only).
        targets: `[...]`, ids below V, or `ignore_index`, in any integer type. Any other id makes the loss NaN,
            which `jax.debug_nans` and checkify's `nan_checks` turn into an error.
        weights: `[...]`, of each token, default 1; differentiable. The mean under weights that cancel out to 0 is
            not defined: NaN or infinite.
        bias: `[V]`, added to the logits.
        num_tiles: at least 1, need not divide; "auto" asks `choose_tiles` about the chip that compiles.
        axis: "tokens" or "vocab"; "auto" asks `choose_tiles`, or is "tokens" when `num_tiles` is given.
        reduction: "mean" divides by `normalizer`, "none" returns `[...]`.
        normalizer: for "mean"; default the sum of weights that are not ignored. Give the count over all devices or
            micro-batches where these are parts of one batch.
        ignore_index: the id of targets that do not count.
        label_smoothing: in [0, 1], mixes the target with the uniform distribution, as in PyTorch.
        z_loss: adds `z_loss * logsumexp ** 2` per token (PaLM, arXiv 2204.02311).
        logit_softcap: `cap * tanh(logits / cap)` (Gemma 2, arXiv 2408.00118), after scale and bias.
        logit_scale: multiplies the logits, bias included. Like the three numbers before it, it is part of the
            compiled program: another value compiles another one, a traced one is refused.
        accumulate_dtype: floating-point type in which the head's gradient grows over tiles of tokens.
        vocab_axis_name: inside `jax.shard_map`, the mesh axis whose devices hold some rows of the head (and of `bias`)
            each, in order; hidden and targets, ids of the whole vocabulary, are the same on all of them, and so is the
            loss. Tiles of the vocabulary only. Devices meet after the loops: one maximum and the sums per token, one
            sum of hidden's gradient. With `check_vma=False` take gradients inside `shard_map`: outside, JAX shares the
            cotangent out among devices that hold the same loss.
        return_stats: also return a dict of means over weighted tokens (arrays `[...]` for "none"), which carry no
            gradient: loss (without the z-loss), z_loss, logsumexp, accuracy, entropy (nats), and tokens, their count.
        explain: called with the reason of an automatic choice while tracing, for example `print`.

    Returns:
        A float32 scalar (0 where no token counts), or `[...]` for "none"; with `return_stats` also the dict.

    Raises ValueError or TypeError for arguments that do not fit, before anything is computed.

    Source: Cut Cross-Entropy (arXiv 2411.09009), Liger-Kernel (arXiv 2410.10989).
    """
    arguments.one_of("axis", axis, ("auto", "tokens", "vocab"))
    arguments.one_of("reduction", reduction, ("mean", "sum", "none"))
    arguments.flag("return_stats", return_stats)
    ignore_index = arguments.whole("ignore_index", ignore_index, "a whole number")
    batch = arguments.batch(hidden, targets, weights)
    if vocab_axis_name is not None:
        axis = arguments.split_axis(vocab_axis_name, axis)
    made = arguments.head(head, bias, batch.hidden, axis)
    divisor = arguments.normalizer(normalizer, reduction)
    if explain is not None and not callable(explain):
        raise TypeError(f"explain must be a function such as print, got {explain!r}.")
    softmax = Softmax(
        label_smoothing=arguments.number(
            "label_smoothing", label_smoothing, "a number between 0 and 1", lambda x: 0 <= x <= 1
        ),
        z_loss=arguments.number("z_loss", z_loss, "a finite number", math.isfinite),
        softcap=None if logit_softcap is None else arguments.number("logit_softcap", logit_softcap, *_POSITIVE),
        scale=arguments.number("logit_scale", logit_scale, "a finite number", math.isfinite),
        with_stats=return_stats,
        callable_head=made.callable_head,
    )
    if num_tiles == "auto":
        choice = choose_tiles(
            batch.targets.size,
            batch.hidden.shape[-1],
            made.vocab,
            dtype=jnp.float32 if made.callable_head else jnp.result_type(*made.leaves),
            reduction=reduction,
            axis="tokens" if made.callable_head else axis,
        )
        axis, num_tiles = choice.axis, choice.num_tiles
        if explain is not None:
            explain(choice.reason)
    tiles = tiles_for_chip(
        axis="vocab" if axis == "vocab" else "tokens",
        num_tiles=check_num_tiles(num_tiles),
        accumulate_dtype=floating_type("accumulate_dtype", accumulate_dtype),
        vocab_axis=vocab_axis_name,
    )
    vocab = made.vocab if vocab_axis_name is None else tiles.vocab(made.leaves)
    compute = partial(_reduced, softmax, tiles, reduction, ignore_index, vocab)
    rows = jax.typeof(batch.targets).sharding.spec if reduction == "none" else PartitionSpec()
    stats_specs = dict.fromkeys(STATISTICS, rows) | {"tokens": PartitionSpec()} if return_stats else None
    loss, stats = partitioned(compute, (rows, stats_specs), batch, made.leaves, divisor)
    return (loss, stats) if return_stats else loss


_POSITIVE = "a positive, finite number or None", lambda x: 0 < x < math.inf


# Jitted, so that eager calls compile once. Not before JAX 0.10: in 0.7 a traced function that holds a custom_vjp cannot
# be differentiated a second time for other arguments.
_jit = partial(jax.jit, static_argnums=(0, 1, 2, 3, 4)) if jax.__version_info__ >= (0, 10) else lambda fn: fn


@_jit
def _reduced(
    softmax: Softmax,
    tiles: Tiles,
    reduction: str,
    ignore_index: int,
    vocab: int,
    batch: arguments.Batch,
    head: list,
    normalizer: Any,
) -> tuple[Array, dict | None]:
    """The loss, reduced, and the statistics where they are asked for."""
    shape = batch.targets.shape
    x_ND = batch.hidden.reshape(-1, batch.hidden.shape[-1])
    counts_N, inside_N = _counting(batch.targets.reshape(-1), ignore_index, vocab)
    targets_N = jnp.where(inside_N, batch.targets.reshape(-1), 0).astype(jnp.int32)
    ones_N = jnp.ones(targets_N.shape, wide(x_ND, *head))
    weights_N = ones_N if batch.weights is None else batch.weights.reshape(-1).astype(ones_N.dtype)
    # Weights carry the mask: 0 for what is ignored; 0 / 0 for an id that does not exist, where NaN checks find it.
    known_N = (inside_N | ~counts_N).astype(weights_N.dtype)
    weights_N = jnp.where(counts_N, weights_N, 0) * known_N / known_N
    total = jnp.sum(weights_N)
    scaled_N = weights_N if reduction != "mean" else _shares(weights_N, total if normalizer is None else normalizer)
    if reduction != "none" and tiles.axis == "tokens":
        loss, rows = summed_loss(softmax, tiles, *vary_together(x_ND, head, targets_N, scaled_N))
    else:
        x_ND, head = vary((x_ND, head), axes_of((x_ND, head, targets_N)))
        rows = loss_rows(softmax, tiles, x_ND, head, targets_N)
        loss_N = scaled_N * quiet(jnp.where(counts_N, rows["loss"], 0), scaled_N)
        loss = loss_N.reshape(shape) if reduction == "none" else jnp.sum(loss_N)
    if not softmax.with_stats:
        return loss, None
    rows = jax.lax.stop_gradient(rows | {"loss": rows["loss"] - rows["z_loss"]})
    tokens = {"tokens": jnp.sum(counts_N)}
    if reduction == "none":
        return loss, {name: row.reshape(shape) for name, row in rows.items()} | tokens
    share_N = jax.lax.stop_gradient(_shares(weights_N, total))
    return loss, {name: jnp.sum(jnp.where(share_N == 0, 0, share_N * row)) for name, row in rows.items()} | tokens


def _counting(targets_N: Array, ignore_index: int, vocab: int) -> tuple[Array, Array]:
    """Which targets are not `ignore_index`, and which are ids of the vocabulary.

    Compared in their own type, whatever it is: a number that it does not hold is none of them, but would wrap around.
    """
    limits = jnp.iinfo(targets_N.dtype)
    counts_N = jnp.ones(targets_N.shape, bool)
    if limits.min <= ignore_index <= limits.max:
        counts_N = targets_N != ignore_index
    inside_N = targets_N >= 0
    if vocab <= limits.max:
        inside_N &= targets_N < vocab
    return counts_N, inside_N


def _shares(weights_N: Array, normalizer: Any) -> Array:
    """Weights over their normalizer. Where no token counts all are 0, whatever the normalizer."""
    nothing_counts = jnp.all(weights_N == 0)
    return weights_N / jnp.where(nothing_counts & (normalizer == 0), 1, normalizer)


def tiled_logprobs(
    hidden: Float[Array, "*batch D"],
    head: Head,
    targets: Integer[Array, "*batch"],
    *,
    num_tiles: int | Literal["auto"] = "auto",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    temperature: Scalar = 1.0,
    ignore_index: int = -100,
    vocab_axis_name: str | None = None,
) -> Float[Array, "*batch"]:
    """Log-probability of each target under `softmax(hidden @ head.T / temperature)`, a tile of logits at a time.

    Differentiable token by token, as losses of reinforcement learning need it: 4 matrix products, 2 with a frozen
    head. Arguments are those of `tiled_cross_entropy`.

    Returns:
        `[...]`, float32, in nats; 0 where the target is `ignore_index`.
    """
    temperature = arguments.number(
        "temperature", temperature, "a positive, finite number (for greedy choices take the argmax)", _POSITIVE[1]
    )
    return -tiled_cross_entropy(
        hidden,
        head,
        targets,
        num_tiles=num_tiles,
        axis=axis,
        reduction="none",
        ignore_index=ignore_index,
        logit_scale=1 / temperature,
        vocab_axis_name=vocab_axis_name,
    )
