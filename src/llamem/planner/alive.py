"""What is alive when: the bytes of a training step at each of the moments at which its memory can peak.

A step is a loop forward over the layers, a loop over tiles of the loss, a loop backward over the layers, the
embedding's gradient, the optimizer. Each sum below was read off the compilers' own timelines (`Report.timeline`): who
lies in memory at that moment, for v5e, v6e, v5p, A100 and H100. Fitted are only the margins for gaps in a TPU's memory,
and how much a GPU zeroes early at most.

What is too big for a TPU its compiler squeezes: it computes more again, and packs arrays that it would have padded. Of
that no estimate knows, so that one beyond the chip's memory may be too high: by 18 % for Llama 3.2 1B at 131,072 tokens
with its layers' inputs on a v5e's host.
"""

import dataclasses
import math

from llamem.planner.copies import (
    group_slices,
    head_copy,
    layer_copies,
    second_layouts,
    zeroed_before_the_loss,
    zeroed_table,
)
from llamem.planner.layer import attention, feed_forward
from llamem.planner.lines import Line
from llamem.planner.residuals import kept_for_backward, left_by_forward, turned_over, why_residuals
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
        "a layer's backward pass, feed-forward": [*backward, *feed_forward(share)],
        "a layer's backward pass, attention": [*backward, *attention(share)],
        "the gradients' norm": [*held, *_norm(share)],
        "the optimizer": [*held, *_optimizer(share)],
    }
    if _summed_in_f32(share):
        both = Line("head gradient", (_F32 + share.compute_bytes) * share.head, "as it was summed, and narrowed")
        stream = Line("stream", 3 * share.compute_bytes * share.N * share.D, "what the loss has read and made")
        moments["the head's gradient, narrowed"] = [*at_loss, left, both, stream]
    if share.chip.platform == "tpu":
        if _logits_forward(share):
            moments["a tile of the loss, forward"] = [*at_loss, left, *_loss(share, forward=True)]
        for lines in moments.values():
            lines.append(_gaps(lines))
        if _logits_forward(share):
            _in_one_piece(moments)
    else:
        _zero_early(moments, zeroed_before_the_loss(share, gradients), share)
    return {name: tuple(lines) for name, lines in moments.items()}


def _zero_early(moments: dict[str, list[Line]], zeroed: list[Line], share: Share) -> None:
    """Adds to the moments of the loss what a GPU zeroes before it.

    Of several schedules XLA takes the one whose highest point is lowest, by a count of its own, which no estimate
    knows. Seen, and counted with doubt: with moments on the device nothing is zeroed early that would cost over 11 %
    of weights and moments; with moments and layers' inputs on the host it may cost up to a tenth of the peak.
    """
    at_loss = [name for name in ("a tile of the loss", "the head's gradient, narrowed") if name in moments]
    late = max(map(_total, moments.values()))
    cost = max(_total([*moments[name], *zeroed]) for name in at_loss) - late
    state = sum(line.bytes for line in _held(share))
    if share.plan.moments == "device" and cost > 0.11 * state:
        return
    highest = 1.1 * late if share.offloaded and share.plan.moments == "host" else math.inf
    for name in at_loss:
        for line in zeroed:
            room = max(highest - _total(moments[name]), 0)
            moments[name].append(dataclasses.replace(line, bytes=int(min(line.bytes, room))))


def _total(lines: list[Line]) -> int:
    return sum(line.bytes for line in lines)


def _gaps(lines: list[Line]) -> Line:
    """A margin for the gaps between arrays of a TPU's memory: 0 to 11 % of what is not the state, seen of 20 steps."""
    moving = sum(line.bytes for line in lines if line.name not in ("weights", "moments", "batch"))
    return Line("gaps", int(_GAPS * moving), "a margin: arrays cannot always lie side by side")


def _in_one_piece(moments: dict[str, list[Line]]) -> None:
    """Adds a margin for a tile of logits, one array, where backward as many bytes lie in other pieces: seen once."""
    *others, forward = moments.values()
    if max(map(_total, others)) > 0.9 * _total(forward):
        tile = sum(line.bytes for line in forward if line.name == "loss tiles")
        forward.append(Line("gaps", tile // 8, "a margin: a tile of logits lies in one piece"))


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
    head = Line("layer weights", low and c * share.head, "the head's")
    moments = {
        "the tables' arrival": tables,
        "a tile of the loss": [residuals, head, *_loss(share)],
        "a layer's backward pass, feed-forward": [*backward, *feed_forward(share)],
        "a layer's backward pass, attention": [*backward, *attention(share)],
        "the embedding's update": [both, stream],
    }
    if _logits_forward(share):
        moments["a tile of the loss, forward"] = [residuals, head, *_loss(share, forward=True)]
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


def _logits_forward(share: Share) -> bool:
    """Whether tiles of logits are f32 in the forward pass alone: a TPU's, of some columns."""
    return share.chip.platform == "tpu" and share.loss_axis == "vocab"


def _loss(share: Share, forward: bool = False) -> list[Line]:
    c, N, D = share.compute_bytes, share.N, share.D
    if share.plan.loss_tiles is None and share.mesh.tensor == 1:
        return [
            Line("loss tiles", 2 * _F32 * N * share.V, "all logits and their gradient, f32"),
            Line("stream", 2 * c * N * D, "the last layer's output, and its norm"),
        ]
    logits = share.loss_rows * share.loss_columns
    if share.loss_axis == "vocab":
        if _logits_forward(share):  # backward they become their gradient inside the product
            tile = _F32 * logits if forward else c * (logits + share.loss_columns * D)
        else:
            tile = (_F32 + c) * logits
        return [
            Line("head gradient", 0 if forward else c * share.head, "written row by row"),
            Line("loss tiles", tile, f"{share.loss_columns:,} columns of logits, their gradient"),
            Line("stream", (2 * c + (0 if forward else _F32)) * N * D, "the last output, its norm, its f32 gradient"),
        ]
    if share.chip.platform != "tpu" and logits == N * share.V:  # one tile: the head's gradient is a product, no sum
        return [
            Line("loss tiles", (_F32 + c) * logits, "all logits, f32, and their gradient"),
            Line("stream", 3 * c * N * D, "the last output, its norm, the norm's gradient"),
        ]
    # A TPU narrows the logits' gradient inside the product, of tiles of 752 tokens, say; of 4,096 it does not.
    narrow = 0 if share.chip.platform == "tpu" and share.loss_rows <= 1024 else c
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
    return [
        Line("head gradient", c * share.head, "narrowed, until the optimizer takes it"),
        Line(
            "layer weights", slices, "of one layer, gathered, and its gradients" if gathered else "slices of one layer"
        ),
    ]


def _summed_in_f32(share: Share) -> bool:
    """Whether the head's gradient is a sum over tiles of tokens."""
    one_product = share.chip.platform != "tpu" and share.loss_rows >= share.N
    whole = share.plan.loss_tiles is None or share.mesh.tensor > 1
    return share.loss_axis == "tokens" and not whole and not one_product


def _norm(share: Share) -> list[Line]:
    """To sum the squares of wq's gradient a TPU widens it, of all layers at once; those in groups it copies, too."""
    if share.chip.platform != "tpu":
        return [_all_gradients(share)]
    wide = 0
    if share.param_bytes < _F32:
        nested = share.groups > 1 and share.plan.head_groups == 1
        channels = _F32 * share.h + (share.param_bytes * share.lanes if nested else 0)
        wide = share.L * share.D * share.H * channels // share.split
    both = 2 * share.compute_bytes if share.param_bytes > share.compute_bytes and share.tables == 1 else 0
    weights = second_layouts(share)
    padded = weights + weights * (share.lanes - share.h) // share.lanes  # and of gradients what the padding adds
    return [
        _all_gradients(share),
        Line("gradients", wide, "wq's, in f32"),
        Line("head gradient", both * share.head // share.split, "the table's two, of which the sum is made"),
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
