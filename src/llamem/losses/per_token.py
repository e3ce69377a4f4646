"""Any function of a token's log-probability and entropy as a loss: the entrance to `token_policy.py`."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from llamem.layers.tiling import check_num_tiles, floating_type
from llamem.layers.varying import partitioned, vary_together
from llamem.losses import arguments
from llamem.losses.choice import tiles_in_columns
from llamem.losses.one_tile import Softmax, Tiles, wide
from llamem.losses.token_policy import TokenLoss, summed_policy

__all__ = ["tiled_token_loss"]

Head = Float[Array, "V D"] | tuple[Float[Array, "V _"], ...]
Mask = Float[Array, "*batch"] | Bool[Array, "*batch"] | Integer[Array, "*batch"]
Scalar = Float[Array, ""] | float
_POSITIVE = "a positive, finite number", lambda x: 0 < x < math.inf


def tiled_token_loss(
    fn: Callable[[Array, Array, Any], Array],
    hidden: Float[Array, "*batch D"],
    head: Head,
    targets: Integer[Array, "*batch"],
    extras: Any = (),
    *,
    weights: Mask | None = None,
    normalizer: Scalar | None = None,
    num_tiles: int | Literal["auto"] = "auto",
    temperature: Scalar = 1.0,
    logit_softcap: Scalar | None = None,
    ignore_index: int = -100,
    accumulate_dtype: Any = "auto",
    return_rows: bool = False,
) -> Any:
    """The mean over tokens of any function of a token's own log-probability and entropy, with all gradients at once.

    `fn(logprob, entropy, extras)` is differentiated token by token while the token's logits are there. 3 matrix
    products, 2 with a frozen head, 1 without gradients; no array has `tokens * vocab` numbers. A loss that needs a
    whole sequence before any token's gradient is known, as DPO does, is none of these: take `tiled_logprobs` (4).

    Gradients are those of hidden and head. There are none for extras, weights and normalizer, and asking for one is a
    TypeError, nor for what `fn` closes over: pass what differs from step to step in extras. Where hidden and head
    are bfloat16 or float16, a tile keeps its logits to 1/4096 of a nat, and the head's gradient grows in steps of
    1/30,000 of the largest number of each of its rows, or less: both take two bytes, with more digits than bfloat16.

    Args:
        fn: takes two float32 scalars, nats, and one token's extras; returns a scalar. Give the same function each
            time: another one is another program.
        hidden: `[..., D]`, of the last layer.
        head: `[V, D]`, or a tuple of matrices that side by side are one, of which the frozen ones cost no gradient.
        targets: `[...]`, ids below V, or `ignore_index`. Any other id makes the loss NaN.
        extras: tree of arrays `[..., *any]`: each token's advantage, old log-probability and so on.
        weights: `[...]`, of each token, default 1; a mask. Tokens of weight 0 add nothing, whatever their extras.
        normalizer: what the sum is divided by, default the sum of weights. Give the count over all devices or
            micro-batches where these are parts of one batch.
        num_tiles: of tokens, at least 1, need not divide; "auto" looks at the chip that compiles.
        temperature: the logits are divided by it, as they were when the targets were drawn.
        logit_softcap: `cap * tanh(logits / cap)`.
        ignore_index: the id of targets that do not count.
        accumulate_dtype: of the head's gradient while it grows over tiles; "auto" is float32 where the head is, and
            16-bit steps where it has two bytes, which no float32 copy of it then joins.
        return_rows: also return a dict of `[...]` arrays, which carry no gradient: loss, logprob, entropy.

    Returns:
        A float32 scalar (0 where no token counts); with `return_rows` also the dict. Reverse mode only.

    Source: gradients in the forward pass are Liger-Kernel's (arXiv 2410.10989), there for fixed losses and by autodiff.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function of (logprob, entropy, extras), got {fn!r}.")
    arguments.flag("return_rows", return_rows)
    ignore_index = arguments.whole("ignore_index", ignore_index, "a whole number")
    batch = arguments.batch(hidden, targets, weights)
    if not hasattr(head, "shape") and not isinstance(head, tuple):
        raise TypeError(
            f"head must be a matrix [V, D] or a tuple of them, got {head!r}. A callable head goes through "
            "tiled_logprobs, whose result any loss may be made of, with 4 matrix products in place of 3."
        )
    made = arguments.head(head, None, batch.hidden, "tokens")
    divisor = arguments.normalizer(normalizer, "mean")
    extras = jax.tree.map(partial(_extra, batch.targets.shape), extras)
    _check_token_loss(fn, extras, batch)
    kind = jnp.result_type(batch.hidden, *made.leaves)
    accumulate = accumulate_dtype
    if not isinstance(accumulate_dtype, str) or accumulate_dtype != "auto":
        accumulate = floating_type("accumulate_dtype", accumulate_dtype)
    tiles = tiles_in_columns(
        num_tiles if num_tiles == "auto" else check_num_tiles(num_tiles),
        batch.targets.size,
        batch.hidden.shape[-1],
        made.vocab,
        kind.itemsize,
        accumulate,
    )
    softmax = Softmax(
        softcap=None if logit_softcap is None else arguments.number("logit_softcap", logit_softcap, *_POSITIVE),
        scale=1 / arguments.number("temperature", temperature, *_POSITIVE),
    )
    rows_spec = jax.typeof(batch.targets).sharding.spec
    specs = PartitionSpec(), dict.fromkeys(("loss", "logprob", "entropy"), rows_spec)
    compute = partial(_mean, fn, softmax, tiles, ignore_index)
    loss, rows = partitioned(compute, specs, batch, made.leaves, extras, divisor)
    return (loss, jax.lax.stop_gradient(rows)) if return_rows else loss


def _extra(rows: tuple[int, ...], leaf: Any) -> Array:
    leaf = arguments.array("extras", leaf, "[...], a row for each target")
    if leaf.shape[: len(rows)] != rows:
        raise ValueError(
            f"Each array of extras must begin with hidden's batch shape {rows}, got {leaf.shape}. Broadcast what all "
            "tokens of a sequence share, such as its advantage."
        )
    return leaf


def _check_token_loss(fn: Callable, extras: Any, batch: arguments.Batch) -> None:
    dims = batch.targets.ndim
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[dims:], leaf.dtype), extras)
    number = jax.ShapeDtypeStruct((), wide(batch.hidden))
    made = jax.eval_shape(fn, number, number, one)
    if getattr(made, "shape", None) != () or not jnp.issubdtype(made.dtype, jnp.floating):
        raise ValueError(
            f"fn must return one real number for one token, got {made}. It is given scalars: a token's log-probability "
            "and entropy, and its row of each array of extras."
        )


@(partial(jax.jit, static_argnums=(0, 1, 2, 3)) if jax.__version_info__ >= (0, 10) else lambda fn: fn)
def _mean(
    fn: TokenLoss,
    softmax: Softmax,
    tiles: Tiles,
    ignore_index: int,
    batch: arguments.Batch,
    head: list,
    extras: Any,
    normalizer: Any,
) -> tuple[Array, dict]:
    shape = batch.targets.shape
    x_ND = batch.hidden.reshape(-1, batch.hidden.shape[-1])
    counts_N, inside_N = arguments.counting(batch.targets.reshape(-1), ignore_index, len(head[0]))
    targets_N = jnp.where(inside_N, batch.targets.reshape(-1), 0).astype(jnp.int32)
    weights_N = jnp.ones(targets_N.shape, wide(x_ND, *head))
    if batch.weights is not None:
        weights_N = batch.weights.reshape(-1).astype(weights_N.dtype)
    weights_N = arguments.masked_weights(weights_N, counts_N, inside_N)
    extras = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(shape) :]), extras)
    # Divided before, not after: hidden's gradient is rounded once to its type, while it waits for the cotangent.
    weights_N = arguments.shares(weights_N, jnp.sum(weights_N) if normalizer is None else normalizer)
    loss, rows = summed_policy(fn, softmax, tiles, *vary_together(x_ND, head, targets_N, weights_N, extras))
    return loss, {name: row.reshape(shape) for name, row in rows.items()}
