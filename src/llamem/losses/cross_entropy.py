"""Cross-entropy and log-probabilities of `hidden @ head.T` that never hold the `[tokens, vocab]` array."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from llamem.losses.choice import cache_columns, choose_tiles
from llamem.losses.gradients import loss_rows, summed_loss
from llamem.losses.one_tile import Softmax, wide

__all__ = ["tiled_cross_entropy", "tiled_logprobs"]


def tiled_cross_entropy(
    hidden: Float[Array, "*batch D"],
    head: Float[Array, "V D"] | Callable[[Array], Array],
    targets: Int[Array, "*batch"],
    *,
    weights: Float[Array, "*batch"] | None = None,
    bias: Float[Array, " V"] | None = None,
    num_tiles: int | Literal["auto"] = "auto",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    reduction: Literal["mean", "sum", "none"] = "mean",
    normalizer: Float[Array, ""] | float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulate_dtype: Any = jnp.float32,
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

    Args:
        hidden: `[..., D]`, of the last layer.
        head: `[V, D]`, tied to the embedding or not; or a callable pytree from `[tokens, D]` to `[tokens, V]` that
            carries its own parameters, such as `jax.tree_util.Partial(fn, *params)` (tiles of tokens only).
        targets: `[...]`, ids below V, or `ignore_index`. Any other id makes the loss NaN, which
            `jax.debug_nans` and checkify's `nan_checks` turn into an error.
        weights: `[...]`, of each token, default 1; differentiable.
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
        logit_scale: multiplies the logits, bias included.
        accumulate_dtype: in which the head's gradient grows over tiles of tokens.
        return_stats: also return a dict of means over weighted tokens (arrays `[...]` for "none"), which carry no
            gradient: loss (without the z-loss), z_loss, logsumexp, accuracy, entropy (nats), and tokens, their count.
        explain: called with the reason of an automatic choice while tracing, for example `print`.

    Returns:
        A float32 scalar (0 where no token counts), or `[...]` for "none"; with `return_stats` also the dict.

    Source: Cut Cross-Entropy (arXiv 2411.09009), Liger-Kernel (arXiv 2410.10989).
    """
    is_matrix = hasattr(head, "shape")
    if is_matrix:
        head = jnp.asarray(head)  # of a flax Variable, which is callable too
        leaves, tree, vocab = [head] if bias is None else [head, bias], None, head.shape[0]
    else:
        leaves, tree = jax.tree.flatten(head)
        row = jax.ShapeDtypeStruct((1, hidden.shape[-1]), hidden.dtype)
        vocab = jax.eval_shape(lambda leaves, x: tree.unflatten(leaves)(x), leaves, row).shape[-1]
    _check(hidden, head, targets, weights, bias, vocab, axis, reduction, normalizer, label_smoothing, logit_softcap)
    if num_tiles == "auto":
        choice = choose_tiles(
            targets.size,
            hidden.shape[-1],
            vocab,
            dtype=jnp.result_type(*leaves) if is_matrix else jnp.float32,
            reduction=reduction,
            axis=axis if is_matrix else "tokens",
        )
        axis, num_tiles = choice.axis, choice.num_tiles
        if explain is not None:
            explain(choice.reason)
    cfg = Softmax(
        num_tiles=num_tiles,
        axis="vocab" if axis == "vocab" else "tokens",
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=logit_softcap,
        scale=logit_scale,
        head_tree=tree,
        accumulate_dtype=accumulate_dtype,
        with_stats=return_stats,
        columns=cache_columns(),
    )
    loss, stats = _reduced(cfg, reduction, ignore_index, vocab, hidden, leaves, targets, weights, normalizer)
    return (loss, stats) if return_stats else loss


# Jitted, so that eager calls compile once. Not before JAX 0.10: in 0.7 a traced function that holds a custom_vjp cannot
# be differentiated a second time for other arguments.
_jit = partial(jax.jit, static_argnums=(0, 1, 2, 3)) if jax.__version_info__ >= (0, 10) else lambda fn: fn


@_jit
def _reduced(cfg, reduction, ignore_index, vocab, hidden, head, targets, weights, normalizer):
    x_ND, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    counts_N = targets_N != ignore_index
    inside_N = (targets_N >= 0) & (targets_N < vocab)
    ones_N = jnp.ones(targets_N.shape, wide(x_ND, *head))
    weights_N = ones_N if weights is None else weights.reshape(-1).astype(ones_N.dtype)
    # Weights carry the mask: 0 for what is ignored; 0 / 0 for an id that does not exist, where NaN checks find it.
    known_N = (inside_N | ~counts_N).astype(weights_N.dtype)
    weights_N = jnp.where(counts_N, weights_N, 0) * known_N / known_N
    targets_N = jnp.where(inside_N, targets_N, 0)
    total = jnp.sum(weights_N)
    share_N = weights_N / jnp.where(total == 0, 1, total)
    scaled_N = weights_N
    if reduction == "mean":
        scaled_N = share_N if normalizer is None else weights_N / normalizer
    if reduction != "none" and cfg.axis == "tokens":
        loss, rows = summed_loss(cfg, x_ND, head, targets_N, scaled_N)
    else:
        rows = loss_rows(cfg, x_ND, head, targets_N)
        loss_N = scaled_N * jnp.where(counts_N, rows["loss"], 0)
        loss = loss_N.reshape(targets.shape) if reduction == "none" else jnp.sum(loss_N)
    if not cfg.with_stats:
        return loss, None
    rows = jax.lax.stop_gradient(rows | {"loss": rows["loss"] - rows["z_loss"]})
    if reduction == "none":
        return loss, {name: row.reshape(targets.shape) for name, row in rows.items()} | {"tokens": jnp.sum(counts_N)}
    share_N = jax.lax.stop_gradient(share_N)
    means = {name: jnp.sum(jnp.where(share_N == 0, 0, share_N * row)) for name, row in rows.items()}
    return loss, means | {"tokens": jnp.sum(counts_N)}


def _check(hidden, head, targets, weights, bias, vocab, axis, reduction, normalizer, label_smoothing, logit_softcap):
    def need(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(message)

    batch, d_model = hidden.shape[:-1], hidden.shape[-1]
    if hasattr(head, "shape"):
        shape = tuple(head.shape)
        hint = " Pass its transpose." if len(shape) == 2 and shape[0] == d_model else ""
        need(len(shape) == 2 and shape[1] == d_model, f"head must be [V, D] with D = {d_model}, got {shape}.{hint}")
        need(
            bias is None or bias.shape == (vocab,), f"bias must be [V] = [{vocab}], got {getattr(bias, 'shape', None)}."
        )
    else:
        need(bias is None, "A callable head adds its own bias: leave bias=None.")
        need(axis != "vocab", 'A callable head has no rows to tile: use axis="tokens", or give the matrix itself.')
    need(targets.shape == batch, f"targets must have hidden's batch shape {batch}, got {targets.shape}.")
    need(jnp.issubdtype(targets.dtype, jnp.integer), f"targets must be integer ids, got {targets.dtype}.")
    if weights is not None:
        need(weights.shape == batch, f"weights must have hidden's batch shape {batch}, got {weights.shape}.")
    need(axis in ("auto", "tokens", "vocab"), f'axis must be "auto", "tokens" or "vocab", got {axis!r}.')
    need(reduction in ("mean", "sum", "none"), f'reduction must be "mean", "sum" or "none", got {reduction!r}.')
    need(normalizer is None or reduction == "mean", f'normalizer belongs to reduction="mean", not to {reduction!r}.')
    need(0 <= label_smoothing <= 1, f"label_smoothing must be between 0 and 1, got {label_smoothing}.")
    need(logit_softcap is None or logit_softcap > 0, f"logit_softcap must be positive or None, got {logit_softcap}.")


def tiled_logprobs(
    hidden: Float[Array, "*batch D"],
    head: Float[Array, "V D"] | Callable[[Array], Array],
    targets: Int[Array, "*batch"],
    *,
    num_tiles: int | Literal["auto"] = "auto",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> Float[Array, "*batch"]:
    """Log-probability of each target under `softmax(hidden @ head.T / temperature)`, a tile of logits at a time.

    Differentiable token by token, as losses of reinforcement learning need it: 4 matrix products, 2 with a frozen
    head. Arguments are those of `tiled_cross_entropy`.

    Returns:
        `[...]`, float32, in nats; 0 where the target is `ignore_index`.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}. For greedy choices take the argmax.")
    return -tiled_cross_entropy(
        hidden,
        head,
        targets,
        num_tiles=num_tiles,
        axis=axis,
        reduction="none",
        ignore_index=ignore_index,
        logit_scale=1 / temperature,
    )
