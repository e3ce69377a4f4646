"""Any function of a token's log-probability and entropy as a loss."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from llamem._checks import check_one_of, check_whole
from llamem.layers.trees import flags_of, mark, with_zeros
from llamem.layers.varying import partitioned, vary_together
from llamem.losses import arguments
from llamem.losses.choice import choose_tiles
from llamem.losses.cross_entropy import Head, Scalar
from llamem.losses.masks import known_targets, masked_weights, normalized_weights
from llamem.losses.rows import Rows, Softmax
from llamem.losses.vocab_tiles import VocabTiles
from llamem.losses.weighted_sum import sum_over_tokens, sum_over_vocab

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
            belongs in extras: on tiles of tokens JAX refuses a gradient for what `fn` closes over.
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
    if not callable(fn):
        raise TypeError(f"fn must be a function of (logprob, entropy, extras), got {fn!r}.")
    check_one_of("axis", axis, ("auto", "tokens", "vocab"))
    batch = arguments.check_batch(hidden, targets, weights)
    leaves = arguments.check_head(head, None, batch.hidden)
    divisor = arguments.check_normalizer(normalizer, "mean")
    extras = jax.tree.map(partial(_check_extra, batch.targets.shape), extras)
    softmax = Softmax(
        jnp.result_type(batch.hidden, *leaves),
        scale=1 / arguments.static_number("temperature", temperature, above=0),
        softcap=None if logit_softcap is None else arguments.static_number("logit_softcap", logit_softcap, above=0),
        with_entropy=True,
    )
    _check_token_loss(fn, extras, batch.targets.ndim, softmax.wide)
    sums = _sums(partial(_losses, fn), softmax, axis, num_tiles, batch, leaves[0].shape[0])
    # A program of its own for each call: kept by its function, each lambda would stay compiled for ever.
    compute = jax.jit(partial(_mean, sums, softmax, arguments.check_ignore_index(ignore_index)))
    return partitioned(compute, PartitionSpec(), batch, leaves, extras, divisor)


def _sums(
    loss_of: Callable, softmax: Softmax, axis: Any, num_tiles: Any, batch: arguments.Operands, vocab: int
) -> tuple[Callable, Callable]:
    """Return the weighted sum to take where the head is differentiated, and the one where it is frozen."""
    N, D = batch.targets.size, batch.hidden.shape[-1]

    def over(axis: str, num_tiles: int) -> Callable:
        if axis == "vocab":
            return partial(sum_over_vocab, loss_of, softmax, VocabTiles(num_tiles))
        return partial(sum_over_tokens, loss_of, softmax, num_tiles)

    if num_tiles != "auto":
        given = over(axis, check_whole("num_tiles", num_tiles))
        return given, given
    trained = choose_tiles(N, D, vocab, dtype=softmax.dtype, axis=axis)
    # Without a gradient of the head the tile is all that is large: a quarter of the head's own bytes is enough for it.
    small = max(1, D * vocab * softmax.dtype.itemsize // 4)
    axis = "tokens" if axis == "auto" else axis
    frozen = choose_tiles(N, D, vocab, dtype=softmax.dtype, axis=axis, head="frozen", memory_budget=small)
    return over(trained.axis, trained.num_tiles), over(frozen.axis, frozen.num_tiles)


def _losses(fn: TokenLoss, rows: Rows, extras: tuple) -> Array:
    """Return losses `[T]`; tokens that do not count reach `fn` as zeros, and what it makes of them reaches nothing."""
    counts_T, extras = extras
    assert rows.entropy is not None  # `tiled_token_loss` asks for it

    def masked(leaf: Array) -> Array:
        return jnp.where(counts_T.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.zeros((), leaf.dtype))

    return masked(jax.vmap(fn)(masked(rows.logprob), masked(rows.entropy), jax.tree.map(masked, extras)))


def _mean(
    sums: tuple[Callable, Callable],
    softmax: Softmax,
    ignore_index: int,
    batch: arguments.Operands,
    head: list,
    extras: Any,
    normalizer: Any,
) -> Array:
    dims = batch.targets.ndim
    x_ND = batch.hidden.reshape(-1, batch.hidden.shape[-1])
    extras = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[dims:]), extras)
    targets_N, counts_N, unknown_N = known_targets(batch.targets.reshape(-1), ignore_index, len(head[0]))
    weights_N = masked_weights(batch.weights, counts_N, unknown_N, softmax.wide)
    # Divided before, not after: hidden's gradient is rounded once to its type, while it waits for the cotangent.
    shares_N = normalized_weights(weights_N, normalizer)
    head, others = vary_together(head, (x_ND, targets_N, shares_N, (weights_N != 0, extras)))
    return by_head(*sums, head, others)


def by_head(trained: Callable, frozen: Callable, head: list, others: tuple) -> Array:
    """Return `trained(x, head, *rest)` where the head is differentiated, else `frozen(x, head, *rest)`."""

    def call(fn: Callable, head: list, others: tuple) -> Array:
        x_ND, *rest = others
        return fn(x_ND, head, *rest)

    # What is kept depends on what is differentiated: its tree by that, its arrays in as many places as may be needed.
    # See `llamem.layers.trees.by_gradient`.
    trees: dict[tuple[bool, ...], Any] = {}
    given, types = jax.tree.structure((head, others)), jax.tree.map(jax.typeof, (head, others))
    places = 32 + 4 * given.num_leaves

    @jax.custom_vjp
    def total(head: list, others: tuple) -> Array:
        return call(frozen, head, others)

    def forward(head: Any, others: Any) -> tuple[Array, Any]:
        fn = trained if any(leaf.perturbed for leaf in head) else frozen
        args, tree = jax.tree.flatten((head, others), is_leaf=lambda leaf: hasattr(leaf, "perturbed"))

        def of_wanted(wanted: list) -> Array:
            leaves = [arg.value if leaf is None else leaf for arg, leaf in zip(args, wanted, strict=True)]
            return call(fn, *tree.unflatten(leaves))

        result, pull = jax.vjp(of_wanted, [arg.value if arg.perturbed else None for arg in args])
        wanted = tuple(arg.perturbed for arg in args)
        kept, trees[wanted] = jax.tree.flatten(pull)
        return result, (kept + [jnp.zeros(0)] * (places - len(kept)), mark(wanted))

    def backward(residuals: Any, cotangent: Any) -> Any:
        kept, asked = residuals
        own = trees[tuple(flags_of(asked, given.num_leaves))]
        return with_zeros(given.unflatten(own.unflatten(kept[: own.num_leaves])(cotangent)[0]), types)

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(head, others)


def _check_extra(rows: tuple[int, ...], leaf: Any) -> Array:
    leaf = arguments.as_array("extras", leaf, "[...], a row for each target")
    if leaf.shape[: len(rows)] != rows:
        raise ValueError(
            f"Each array of extras must begin with hidden's batch shape {rows}, got {leaf.shape}. Broadcast what all "
            "tokens of a sequence share, such as its advantage."
        )
    return leaf


def _check_token_loss(fn: TokenLoss, extras: Any, dims: int, dtype: Any) -> None:
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[dims:], leaf.dtype), extras)
    number = jax.ShapeDtypeStruct((), dtype)
    made = jax.eval_shape(fn, number, number, one)
    if getattr(made, "shape", None) != () or not jnp.issubdtype(made.dtype, jnp.floating):
        raise ValueError(
            f"fn must return one real number for one token, got {made}. It is given scalars: a token's log-probability "
            "and entropy, and its row of each array of extras."
        )
