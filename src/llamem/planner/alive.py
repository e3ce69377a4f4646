"""What is alive when: the bytes of a training step at each of the moments at which its memory can peak.

A step is a loop forward over the layers, a loop over tiles of the loss, a loop backward over the layers, the
embedding's gradient, the optimizer. Each sum below was read off the compilers' own timelines (`Report.timeline`): who
lies in memory at that moment, for v5e, v6e, v5p and A100. No number is fitted, but for the margin for a TPU's gaps.

What is too big for a TPU its compiler squeezes: it computes more again, and packs arrays that it would have padded. Of
that no estimate knows, so that one beyond the chip's memory may be too high: by 18 % for Llama 3.2 1B at 131,072 tokens
with its layers' inputs on a v5e's host.
"""

import dataclasses

from llamem.planner.copies import (
    group_slices,
    head_copy,
    layer_copies,
    second_layouts,
    zeroed_before_the_loss,
    zeroed_table,
)
from llamem.planner.lines import Line
from llamem.planner.residuals import kept_for_backward, left_by_forward, scores, turned_over, why_residuals
from llamem.planner.share import Share

_F32 = 4
_GAPS = 0.04


def moments_of(share: Share) -> dict[str, tuple[Line, ...]]:
    """The moments at which a step's memory can peak, by name, each with its lines."""
    if share.plan.layer_by_layer:
        return _one_by_one(share)
    held = _held(share)
    at_loss = [*held, *layer_copies(share), *head_copy(share)]
    left = Line("residuals", left_by_forward(share), why_residuals(share))
    residuals = Line("residuals", kept_for_backward(share), why_residuals(share))
    gradients = Line("gradients", share.stack * share.param_bytes, "of all layers, from the backward loop's start")
    backward = [*held, *layer_copies(share), *zeroed_table(share), residuals, *group_slices(share), gradients]
    backward += _backward(share)
    moments = {
        "a tile of the loss": [*at_loss, left, *_loss(share), *turned_over(share)],
        "a layer's backward pass, feed-forward": [*backward, *_feed_forward(share)],
        "a layer's backward pass, attention": [*backward, *_attention(share), *_waiting(share)],
        "the gradients' norm": [*held, *_norm(share)],
        "the optimizer": [*held, *_optimizer(share)],
    }
    if _summed_in_f32(share):
        both = Line("head gradient", (_F32 + share.compute_bytes) * share.head, "as it was summed, and narrowed")
        stream = Line("stream", 3 * share.compute_bytes * share.N * share.D, "what the loss has read and made")
        moments["the head's gradient, narrowed"] = [*at_loss, left, both, stream]
    if share.target.platform == "tpu":
        for lines in moments.values():
            lines.append(_gaps(lines))
    else:
        _zero_early(moments, zeroed_before_the_loss(share, gradients))
    return {name: tuple(lines) for name, lines in moments.items()}


def _zero_early(moments: dict[str, list[Line]], zeroed: list[Line]) -> None:
    """Adds to the moments of the loss what a GPU zeroes before it: up to a tenth of the peak, in 70 programs.

    Of several schedules XLA takes the one whose highest point is lowest, by a count of its own. Which one that is no
    estimate knows; where zeroing early would cost more than a tenth, none of these programs did all of it.
    """
    highest = 1.1 * max(map(_total, moments.values()))
    for name in ("a tile of the loss", "the head's gradient, narrowed"):
        for line in zeroed if name in moments else []:
            room = max(int(highest) - _total(moments[name]), 0)
            moments[name].append(dataclasses.replace(line, bytes=min(line.bytes, room)))


def _total(lines: list[Line]) -> int:
    return sum(line.bytes for line in lines)


def _gaps(lines: list[Line]) -> Line:
    """A margin for the gaps between arrays of a TPU's memory: 0 to 11 % of what is not the state, seen of 20 steps."""
    moving = sum(line.bytes for line in lines if line.name not in ("weights", "moments", "batch"))
    return Line("gaps", int(_GAPS * moving), "a margin: arrays cannot always lie side by side")


def _one_by_one(share: Share) -> dict[str, tuple[Line, ...]]:
    """The moments of a step that fetches or updates each layer by itself: no line is of all layers' gradients."""
    c, p, layer = share.compute_bytes, share.param_bytes, share.layer_weights
    residuals = Line("residuals", kept_for_backward(share), why_residuals(share))
    low = c * layer if p > c else 0
    updated = share.plan.update == "in_backward"
    on_the_way = 2 * p * layer if share.plan.moments == "host" and updated else 0
    fetched = p * layer if share.plan.weights == "host" else 0
    waits = 0 if share.tables == 1 and fetched else c * share.head
    backward = [
        residuals,
        Line("layer weights", fetched + low, "of one layer, and in the type of the products"),
        Line("gradients", p * layer, "of one layer"),
        Line("moments", on_the_way, "of one layer, on their way"),
        Line("head gradient", waits, "until its table is updated"),
    ]
    tables = [Line("layer weights", (2 * p + c) * share.head, "embedding and head, fetched")] if fetched else []
    both = Line("head gradient", (c + p) * share.head, "of a table, and its pieces or its sum")
    stream = Line("stream", 2 * c * share.N * share.D, "what the embedding's gradient is made of")
    moments = {
        "the tables' arrival": tables,
        "a tile of the loss": [residuals, Line("layer weights", low and c * share.head, "the head's"), *_loss(share)],
        "a layer's backward pass, feed-forward": [*backward, *_feed_forward(share)],
        "a layer's backward pass, attention": [*backward, *_attention(share)],
        "the embedding's update": [both, stream],
    }
    held = _held(share)
    return {name: tuple([*held, *lines]) for name, lines in moments.items()}


def _held(share: Share) -> list[Line]:
    p = share.param_bytes
    at_home = share.plan.moments == "device"
    weights = share.params if share.plan.weights == "device" else share.vectors
    moments = 2 * p * (share.params if at_home else share.vectors)
    return [
        Line("weights", p * weights, f"{weights:,} of {p} bytes"),
        Line("moments", moments, "two for each weight" if at_home else "the norms'; the others wait on the host"),
        Line("batch", 2 * _F32 * share.B * share.T * share.mesh.context, "tokens and targets, int32"),
    ]


def _loss(share: Share) -> list[Line]:
    c, N, D = share.compute_bytes, share.N, share.D
    if share.plan.loss_tiles is None and share.mesh.tensor == 1:
        return [
            Line("loss tiles", 2 * _F32 * N * share.V, "all logits and their gradient, f32"),
            Line("stream", 2 * c * N * D, "the last layer's output, and its norm"),
        ]
    logits = share.loss_rows * share.loss_columns
    if share.loss_axis == "vocab":
        return [
            Line("head gradient", share.compute_bytes * share.head, "written row by row"),
            Line("loss tiles", (_F32 + c) * logits, f"{share.loss_columns:,} columns of logits, and their gradient"),
            Line("stream", (2 * c + _F32) * N * D, "the last output, its norm, the norm's gradient in f32"),
        ]
    if share.target.platform != "tpu" and logits == N * share.V:  # one tile: the head's gradient is a product, no sum
        return [
            Line("loss tiles", (_F32 + c) * logits, "all logits, f32, and their gradient"),
            Line("stream", 3 * c * N * D, "the last output, its norm, the norm's gradient"),
        ]
    # A TPU narrows the logits' gradient inside the product, of tiles of 752 tokens, say; of 4,096 it does not.
    narrow = 0 if share.target.platform == "tpu" and share.loss_rows <= 1024 else c
    return [
        Line("head gradient", _F32 * share.head, "summed over tiles in f32"),
        Line("loss tiles", (_F32 + narrow) * logits, f"logits of {share.loss_rows:,} tokens, f32"),
        Line("stream", 3 * c * N * D, "the last output, its norm, the norm's gradient"),
    ]


def _backward(share: Share) -> list[Line]:
    """What a layer's backward pass holds whatever it works on."""
    c, p = share.compute_bytes, share.param_bytes
    gathered = (c + p) * share.layer_weights if share.split > 1 else 0
    slices = gathered or c * (share.D * share.F + share.attention_weights)
    if share.groups > 1:  # a group's weights, sliced out for the inner loop, and their gradients
        slices += 2 * p * (share.L // share.groups) * share.layer_weights // share.split
    size = _F32 if _summed_in_f32(share) and not share.plan.saves_memory and _narrowed_late(share) else c
    return [
        Line("head gradient", size * share.head, "as the loss left it, until the optimizer takes it"),
        Line(
            "layer weights", slices, "of one layer, gathered, and its gradients" if gathered else "slices of one layer"
        ),
    ]


def _summed_in_f32(share: Share) -> bool:
    """Whether the head's gradient is a sum over tiles of tokens."""
    one_product = share.target.platform != "tpu" and share.loss_rows >= share.N
    whole = share.plan.loss_tiles is None or share.mesh.tensor > 1
    return share.loss_axis == "tokens" and not whole and not one_product


def _narrowed_late(share: Share) -> bool:
    """Whether such a sum stays f32 until the embedding's gradient joins it: on GPUs, and on TPUs whose scatters of more
    than 2,048 rows are programs of their own (`scatter_custom_fusion`): v5p and v6e have units for them, v5e none.
    """
    if share.target.platform != "tpu":
        return True
    return share.tables == 1 and share.N > 2048 and not share.target.name.startswith("v5e")


def _kept_for_attention(share: Share) -> int:
    """Bytes that attention's forward pass leaves for its backward one, of all heads."""
    c, N = share.compute_bytes, share.N
    if share.attention == "xla":
        return N * share.lanes * c * (share.H + 2 * share.K) + (_F32 + c) * scores(share)
    both = c * N * share.lanes * (2 * share.H + 2 * share.K)  # queries and output, keys and values
    if share.config.qk_norm:  # queries and keys before their norms
        both += c * N * share.lanes * (share.H + share.K)
    if share.attention == "tiled":  # the sums of its gradients, f32, are zeroed early
        return both + _F32 * N * share.h * (share.H + 2 * share.K)
    return both + _F32 * N * share.H


def _logsumexp(share: Share) -> int:
    """Bytes of what Splash writes beside its result: of each query's logsumexp, f32, 128 copies."""
    return _F32 * 128 * share.N * share.H if share.attention == "splash" else 0


def _feed_forward(share: Share) -> list[Line]:
    c, N, tiles = share.compute_bytes, share.N, share.plan.mlp_tiles
    rows = -(-N // tiles)
    kept = 0 if share.kept or share.plan.attention_tiles > 1 else _kept_for_attention(share)
    if (
        kept and share.attention == "tiled" and "attn_out" in share.saved
    ):  # nothing asks for the output yet: its f32 sum
        kept += c * N * share.h * share.H
    v5e = share.target.name.startswith("v5e")
    inner = (3 if v5e else 4) * c * rows * share.F  # other compilers hold silu's result, too
    if tiles > 1 or v5e:
        kept += _logsumexp(share) if kept else 0
    else:  # the logsumexp is gone by then
        if share.target.platform == "tpu" and share.groups == 1 and "attn" in share.saved and "q" not in share.saved:
            kept = _turned_back(share)
    if share.kept and tiles == 1:
        inner = 2 * c * rows * share.F
    if tiles > 1 and share.plan.attention_tiles > 1 and share.target.platform != "tpu":
        inner += c * (N + 2 * rows) * share.D  # a GPU has zeroed the sum over heads by now; the tile's input, its norm
    return [
        Line("attention", kept, "what its forward pass, run again, leaves for its backward one"),
        Line("feed-forward", inner + _row_sums(share), f"gate, up and gradients for {rows:,} tokens"),
        Line("stream", _stream(share), "residual stream, its gradient, norms; rope's tables"),
    ]


def _turned_back(share: Share) -> int:
    """Bytes of attention where the queries' gradient is turned back by rope, while the feed-forward's products wait.

    That gradient in f32, and its two halves, each padded to 128 channels; the output, the gradients of keys and values.
    """
    c, heads = share.compute_bytes, share.N * share.lanes
    return heads * ((_F32 + 2 * c) * share.H + c * (share.H + 2 * share.K))


def _attention(share: Share) -> list[Line]:
    c, N, tiles = share.compute_bytes, share.N, share.plan.attention_tiles
    heads = c * N * share.lanes
    kept = 0 if share.kept and tiles == 1 and share.attention != "tiled" else _kept_for_attention(share)
    gradients = heads * (2 * share.H + 2 * share.K)
    if share.attention == "xla":  # their gradients, and which of them are seen
        gradients += (_F32 + 1) * scores(share)
    if share.attention == "tiled":  # the output's alone, while the others' f32 sums grow
        gradients = 0 if share.saved >= {"q", "k", "v"} and not share.kept else heads * share.H
    if share.attention == "splash":  # the logsumexp's copies are gone when gradients come
        gradients = max(gradients, _logsumexp(share))
    if share.config.qk_norm and tiles > 1:  # the f32 factors of a group's norms
        gradients += (2 if share.target.platform == "tpu" else 3) * _F32 * N * share.lanes * (share.H + share.K)
    return [
        Line("attention", (kept + gradients) // tiles, "queries, keys, values, output, their gradients"),
        Line("feed-forward", _row_sums(share), "sums of its weights' gradients, f32"),
        Line("stream", _stream(share) - _done(share), "residual stream, its gradient, norms; rope's tables"),
    ]


def _done(share: Share) -> int:
    """Bytes of the stream that a feed-forward in tiles has let go when a GPU's attention in tiles begins."""
    done = share.attention == "tiled" and share.plan.mlp_tiles > 1 and share.plan.attention_tiles == 1
    return 2 * share.compute_bytes * share.N * share.D if done else 0


def _waiting(share: Share) -> list[Line]:
    """What waits for the products that make the feed-forward's gradients: they come after all groups of heads.

    Silu's parts and what the feed-forward read wait only on GPUs, and only where moments are on the device.
    """
    if share.plan.attention_tiles == 1 or share.plan.mlp_tiles > 1:
        return []
    c, all_of_it = share.compute_bytes, share.target.platform != "tpu" and share.plan.moments == "device"
    inner = (2 if share.kept or not all_of_it else 4) * share.F
    return [
        Line("feed-forward", c * share.N * inner, "gate, up and gradients, for their weights' gradients"),
        Line("stream", 3 * c * share.N * share.D if all_of_it else 0, "what the feed-forward read, and its gradient"),
    ]


def _row_sums(share: Share) -> int:
    """Bytes of the f32 sums of the feed-forward's gradients over tiles of rows."""
    return _F32 * share.mlp_weights if share.plan.mlp_tiles > 1 else 0


def _stream(share: Share) -> int:
    """Bytes of activations as wide as the residual stream, and of rope's two tables."""
    c, wide = share.compute_bytes, share.N * share.D
    tables = 2 * _F32 * share.T * (share.lanes if share.target.platform == "tpu" else share.h // 2)
    if share.plan.attention_tiles > 1:  # the sum over groups of heads of its input's gradient, in f32
        return (_F32 + 4 * c) * wide + tables
    return 5 * c * wide + tables


def _norm(share: Share) -> list[Line]:
    """To sum the squares of wq's gradient a TPU widens it, of all layers at once; those in groups it copies, too."""
    if share.target.platform != "tpu":
        return [_all_gradients(share)]
    wide = 0
    if share.param_bytes < _F32:
        nested = share.groups > 1 and share.plan.attention_tiles == 1
        channels = _F32 * share.h + (share.param_bytes * share.lanes if nested else 0)
        wide = share.L * share.D * share.H * channels // share.split
    padded = 3 * second_layouts(share)  # of the weights with all their padding, and of gradients what that adds
    return [
        _all_gradients(share),
        Line("gradients", wide, "wq's, in f32"),
        Line("layer weights", padded, "wq, wk, wv and their gradients as their moments lie, padded"),
    ]


def _all_gradients(share: Share) -> Line:
    numbers = share.stack + share.head * share.tables // share.split
    return Line("gradients", share.param_bytes * numbers, "of everything")


def _optimizer(share: Share) -> list[Line]:
    lines = [_all_gradients(share)]
    if share.plan.moments == "host":
        on_the_way = 4 * share.param_bytes * share.stack // max(share.L, 1)
        lines.append(Line("moments", on_the_way, "of one layer, on their way"))
    return lines
