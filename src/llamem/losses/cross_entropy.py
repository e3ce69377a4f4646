"""Cross-entropy and log-probabilities of `hidden @ head.T` that never hold the `[tokens, vocab]` array."""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer

from jaxmem.common.checks import check_one_of, check_whole
from llamem.layers.tile_loops import devices_of_compiler, partitioned
from llamem.losses.loss_arguments import check_batch, check_head, static_number
from llamem.losses.tile_choice import resolve_tiles
from llamem.losses.vocab_tiles import LogitSummary, Softmax, Tiles, zero_uncounted
from llamem.losses.weighted_sum import reduce_losses

__all__ = ["tiled_cross_entropy", "tiled_logprobs"]

Head = Float[Array, "V D"] | tuple[Float[Array, "V _"], ...]
Scalar = Float[Array, ""] | float


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy of some tokens. Hashable: it keys the jit cache."""

    z_loss: float

    def __call__(self, summary: LogitSummary, weights_T: Array, extras: Any) -> Array:
        """Return losses `[T]`."""
        logsumexp_T, target_T, _ = zero_uncounted(summary, weights_T)
        loss_T = logsumexp_T - target_T
        return loss_T + self.z_loss * logsumexp_T**2 if self.z_loss else loss_T


def tiled_cross_entropy(
    hidden: Float[Array, "*batch D"],
    head: Head,
    targets: Integer[Array, "*batch"],
    *,
    weights: Float[Array, "*batch"] | None = None,
    num_tiles: int | Literal["auto"] = "auto",
    axis: Literal["auto", "tokens", "vocab"] = "auto",
    head_trained: bool = True,
    reduction: Literal["mean", "sum", "none"] = "mean",
    normalizer: Scalar | None = None,
    ignore_index: int = -100,
    z_loss: Scalar = 0.0,
    logit_softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    vocab_axis_name: str | None = None,
) -> Float[Array, "*out"]:
    """Compute the softmax cross-entropy of `hidden @ head.T` against `targets`, a tile of logits at a time.

    Tiles of tokens make all gradients in the forward pass (3 matrix products) and sum the head's in float32. Tiles of
    the vocabulary compute the logits a second time (4), but need no float32 `[V, D]` sum. Only what is differentiated
    is computed: 2 products with a frozen head, 1 in evaluation.

    Logits and losses are float32 whatever the inputs; products are in the common type of hidden and head and
    accumulate in float32. Reverse mode, and forward over reverse, differentiate it; for `jax.jvp` alone put a plain
    loss per token into `tiled_map`.

    On a mesh, under `jax.jit` alone, each tile has something of every device, so that all do their share of the work
    whichever axes the mesh divides. The head's columns are gathered once, before the loop.

    A token that is ignored or has a weight of 0 adds nothing to the loss, nor to any gradient but that of its own
    weight, even where its hidden state is not finite. float16 works with a loss scale.

    Args:
        hidden: `[..., D]`, of the last layer.
        head: `[V, D]`, tied to the embedding or not; or a tuple of matrices `[V, D_i]` that side by side are one, of
            which the frozen ones cost no gradient.
        targets: `[...]`, ids below V, or `ignore_index`, in any integer type. Any other id makes the loss NaN,
            which `jax.debug_nans` and checkify's `nan_checks` turn into an error.
        weights: `[...]`, of each token, default 1; differentiable. The mean under weights that cancel out to 0 is
            not defined: NaN or infinite.
        num_tiles: at least 1, need not divide; "auto" asks `choose_tiles` about the chip that compiles,
            and one device's share of the tokens.
        axis: "tokens" or "vocab"; "auto" asks `choose_tiles`, or is "tokens" when `num_tiles` is given.
        head_trained: False tells "auto" that no gradient of the whole head will be wanted: it is frozen, or adapters
            stand beside it. Gradients are right whatever is said.
        reduction: "mean" divides by `normalizer`; "none" returns `[...]`, on tiles of the vocabulary.
        normalizer: for "mean"; default the sum of weights that are not ignored. Give the count over all devices or
            micro-batches where these are parts of one batch.
        ignore_index: the id of targets that do not count.
        z_loss: adds `z_loss * logsumexp ** 2` per token (PaLM, arXiv 2204.02311).
        logit_softcap: `cap * tanh(logits / cap)` (Gemma 2, arXiv 2408.00118), after the scale.
        logit_scale: multiplies the logits. Like the two numbers before it, it is part of the compiled program: another
            value compiles another one, a traced one is refused.
        vocab_axis_name: inside `jax.shard_map`, the mesh axis whose devices hold some rows of the head each, in order;
            hidden and targets, ids of the whole vocabulary, are the same on all of them, and so is the loss. Tiles of
            the vocabulary only. Devices meet after the loops: one maximum and the sums per token, one sum of hidden's
            gradient. With `check_vma=False` take gradients inside `shard_map`: outside, JAX shares the cotangent out
            among devices that hold the same loss.

    Returns:
        A float32 scalar (0 where no token counts), or `[...]` for "none".

    Raises ValueError or TypeError for arguments that do not fit, before anything is computed.

    Source: Cut Cross-Entropy (arXiv 2411.09009), Liger-Kernel (arXiv 2410.10989).
    """
    check_one_of("axis", axis, ("auto", "tokens", "vocab"))
    check_one_of("reduction", reduction, ("mean", "sum", "none"))
    batch = check_batch(hidden, targets, weights)
    matrices = check_head(head, batch.hidden)
    if normalizer is not None and reduction != "mean":
        raise ValueError(f'normalizer belongs to reduction="mean", not to {reduction!r}.')
    if axis == "tokens" and (reduction == "none" or vocab_axis_name is not None):
        raise ValueError(
            'reduction="none" and vocab_axis_name go with axis="vocab" or "auto": tiles of tokens make gradients '
            "before the cotangents of their losses are known, and in each tile devices would have to meet."
        )
    softmax = Softmax(
        jnp.result_type(batch.hidden, *matrices),
        scale=static_number("logit_scale", logit_scale),
        softcap=None if logit_softcap is None else static_number("logit_softcap", logit_softcap, above=0),
    )
    if reduction == "none" or vocab_axis_name is not None:
        axis = "vocab"
    devices = devices_of_compiler((batch, matrices))
    axis, num_tiles = resolve_tiles(
        num_tiles,
        axis,
        (-(-batch.targets.size // devices), batch.hidden.shape[-1], matrices[0].shape[0]),
        dtype=softmax.dtype,
        head_trained=check_one_of("head_trained", head_trained, (True, False)),
        head_parts=len(matrices),
    )
    tiles = Tiles(axis, num_tiles, vocab_axis_name, devices)
    ignore_index = check_whole("ignore_index", ignore_index, at_least=-(2**31))
    loss_of = CrossEntropy(static_number("z_loss", z_loss))
    compute = partial(reduce_compiled, loss_of, softmax, (tiles, tiles), reduction, ignore_index)
    out_spec = jax.typeof(batch.targets).sharding.spec if reduction == "none" else PartitionSpec()
    return partitioned(compute, out_spec, batch, matrices, (), normalizer)


reduce_compiled = jax.jit(reduce_losses, static_argnums=range(5))  # so that eager calls compile once


def tiled_logprobs(
    hidden: Float[Array, "*batch D"],
    head: Head,
    targets: Integer[Array, "*batch"],
    *,
    num_tiles: int | Literal["auto"] = "auto",
    temperature: Scalar = 1.0,
    ignore_index: int = -100,
    vocab_axis_name: str | None = None,
) -> Float[Array, "*batch"]:
    """Return each target's log-probability under `softmax(hidden @ head.T / temperature)`, without the logits.

    Differentiable token by token, as losses of reinforcement learning need it: 4 matrix products, 2 with a frozen
    head. Arguments are those of `tiled_cross_entropy`; a greedy choice, temperature 0, is an argmax and has none.

    Returns:
        `[...]`, float32, in nats; 0 where the target is `ignore_index`.
    """
    return -tiled_cross_entropy(
        hidden,
        head,
        targets,
        num_tiles=num_tiles,
        axis="vocab",
        reduction="none",
        ignore_index=ignore_index,
        logit_scale=1 / static_number("temperature", temperature, above=0),
        vocab_axis_name=vocab_axis_name,
    )
