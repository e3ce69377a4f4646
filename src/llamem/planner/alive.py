"""What is alive when: the bytes of a training step at each of the moments at which its memory can peak.

A step is a loop forward over the layers, a loop over tiles of the loss, a loop backward over the layers, the
embedding's gradient, the optimizer. Each sum below was read off the compilers' own timelines (`Report.timeline`): who
lies in memory at that moment, for v5e, v6e, v5p and A100. No number is fitted.
"""

import dataclasses

from llamem.planner.share import Share, activation_bytes

LINES = (
    "weights",
    "moments",
    "batch",
    "gradients",
    "residuals",
    "head gradient",
    "loss tiles",
    "attention",
    "feed-forward",
    "layer weights",
    "stream",
)
_F32 = 4


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of an estimate: bytes on one device, and why so many."""

    name: str
    bytes: int
    why: str


def moments_of(share: Share) -> dict[str, tuple[Line, ...]]:
    """The moments at which a step's memory can peak, by name, each with its lines."""
    if share.plan.layer_by_layer:
        return _one_by_one(share)
    held = _held(share)
    copied = [*held, *_copies(share)]
    residuals = Line("residuals", _residuals(share), _why_residuals(share))
    gradients = Line("gradients", share.stack * share.param_bytes, "of all layers, from the backward loop's start")
    moments = {
        "a tile of the loss": [residuals, *_loss(share)],
        "a layer's backward pass, feed-forward": [residuals, gradients, *_backward(share), *_feed_forward(share)],
        "a layer's backward pass, attention": [residuals, gradients, *_backward(share), *_attention(share)],
        "the optimizer": _optimizer(share),
    }
    if _summed_in_f32(share):
        both = Line("head gradient", (_F32 + share.compute_bytes) * share.head, "as it was summed, and narrowed")
        stream = Line("stream", 3 * share.compute_bytes * share.N * share.D, "what the loss has read and made")
        moments["the head's gradient, narrowed"] = [residuals, both, stream]
    # XLA's GPU scheduler zeroes the gradients' buffers before the loss, where that leaves nothing else waiting.
    narrow = share.param_bytes == share.compute_bytes or share.plan.moments == "host"
    if share.target.platform != "tpu" and narrow:
        for name in ("a tile of the loss", "the head's gradient, narrowed"):
            moments.get(name, []).append(gradients)
    return {name: tuple([*(held if name == "the optimizer" else copied), *lines]) for name, lines in moments.items()}


def _one_by_one(share: Share) -> dict[str, tuple[Line, ...]]:
    """The moments of a step that fetches or updates each layer by itself: no line is of all layers' gradients."""
    c, p, layer = share.compute_bytes, share.param_bytes, share.layer_weights
    residuals = Line("residuals", _residuals(share), _why_residuals(share))
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


def _copies(share: Share) -> list[Line]:
    """Weights in the type of the products, where that is narrower than their own: a TPU makes all copies at once."""
    if share.param_bytes <= share.compute_bytes:
        return []
    # A GPU copies them layer by layer, unless the backward pass reads the forward pass's copies.
    layers = share.stack if share.target.platform == "tpu" or share.kept else 0
    copies = share.compute_bytes * (layers + share.head // share.split)
    return [Line("layer weights", copies, "of all layers and the head, in the type of the products")]


def _residuals(share: Share) -> int:
    """Bytes that the forward pass leaves on the device for the backward one."""
    if share.kept:
        return share.L * share.N * _kept_per_token(share)
    # Nothing reads what the feed-forward adds.
    saved = sum(activation_bytes(share, name) for name in share.saved - {"block_in", "mlp_out"})
    inputs = 0 if "block_in" in share.offloaded else activation_bytes(share, "block_in")
    if share.groups > 1:  # the inputs of all groups, and all that one group's layers keep
        of_groups = 0 if share.offloaded else share.groups * inputs
        return of_groups + (share.L // share.groups) * (inputs + saved)
    return share.L * (inputs + saved)


def _kept_per_token(share: Share) -> int:
    """Bytes of one token in one layer where everything stays: what the derivative of each operation reads."""
    c = share.compute_bytes
    inner = 6 * c * share.F  # gate, up, and silu's parts
    stream = (6 * _F32 + 2 * c) * share.D  # the norms' f32 factors, and both norms' results
    queries = 3 if share.target.platform == "tpu" else 2  # Splash reads scaled ones
    heads = c * share.lanes * (queries * share.H + 2 * share.K) + _F32 * share.H
    if share.config.qk_norm:  # the f32 factors of its two norms
        heads += 2 * _F32 * share.lanes * (share.H + share.K)
    scores = (_F32 + c) * share.H * share.T if share.attention == "xla" else 0
    in_tiles = (share.plan.mlp_tiles > 1, share.plan.attention_tiles > 1)  # what is made inside of a tile is not kept
    return stream + (0 if in_tiles[0] else inner) + (0 if in_tiles[1] else heads + scores)


def _why_residuals(share: Share) -> str:
    if share.kept:
        return f"everything of {share.L} layers"
    kept = sorted(share.saved | ({"block_in"} - share.offloaded))
    layers = f"{share.L} layers" if share.groups == 1 else f"{share.groups} groups and {share.L // share.groups} layers"
    return f"{', '.join(kept) or 'nothing'} of {layers}"


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
    narrow = 0 if share.target.platform == "tpu" else c  # a TPU narrows the logits' gradient inside the product
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
    size = _F32 if _summed_in_f32(share) and not share.plan.saves_memory else c
    return [
        Line("head gradient", size * share.head, "as the loss left it, until the optimizer takes it"),
        Line(
            "layer weights", slices, "of one layer, gathered, and its gradients" if gathered else "slices of one layer"
        ),
    ]


def _summed_in_f32(share: Share) -> bool:
    """Whether the head's gradient is a sum over tiles of tokens."""
    return share.plan.loss_tiles is not None and share.loss_axis == "tokens" and share.mesh.tensor == 1


def _kept_for_attention(share: Share) -> int:
    """Bytes that attention's forward pass leaves for its backward one, of all heads."""
    c, N = share.compute_bytes, share.N
    if share.attention == "xla":
        return N * share.lanes * c * (share.H + 2 * share.K) + (_F32 + c) * _scores(share)
    both = c * N * share.lanes * (2 * share.H + 2 * share.K)  # queries and output, keys and values
    if share.attention == "tiled":  # the sums of its gradients, f32, are zeroed early
        return both + _F32 * N * share.h * (share.H + 2 * share.K)
    return both + _F32 * N * share.H


def _scores(share: Share) -> int:
    """How many scores a layer's attention has where it writes them down."""
    return share.B * share.H * share.T * share.T * share.mesh.context


def _logsumexp(share: Share) -> int:
    """Bytes of what Splash writes beside its result: of each query's logsumexp, f32, 128 copies."""
    return _F32 * 128 * share.N * share.H if share.attention == "splash" else 0


def _feed_forward(share: Share) -> list[Line]:
    c, N, tiles = share.compute_bytes, share.N, share.plan.mlp_tiles
    rows = -(-N // tiles)
    kept = 0 if share.kept or share.plan.attention_tiles > 1 else _kept_for_attention(share)
    if tiles > 1 or share.target.name.startswith("v5e"):
        inner = 3 * c * rows * share.F
        kept += _logsumexp(share) if kept else 0
    else:  # other compilers hold silu's result, too, and have dropped the logsumexp by then
        inner = 4 * c * rows * share.F
    if share.kept and tiles == 1:
        inner = 2 * c * rows * share.F
    return [
        Line("attention", kept, "what its forward pass, run again, leaves for its backward one"),
        Line("feed-forward", inner + _row_sums(share), f"gate, up and gradients for {rows:,} tokens"),
        Line("stream", _stream(share), "residual stream, its gradient, norms; rope's tables"),
    ]


def _attention(share: Share) -> list[Line]:
    c, N, tiles = share.compute_bytes, share.N, share.plan.attention_tiles
    kept = 0 if share.kept and tiles == 1 else _kept_for_attention(share) + _logsumexp(share)
    gradients = c * N * share.lanes * (2 * share.H + 2 * share.K)
    if share.attention == "xla":  # their gradients, and which of them are seen
        gradients += (_F32 + 1) * _scores(share)
    return [
        Line("attention", (kept + gradients) // tiles, "queries, keys, values, output, their gradients"),
        Line("feed-forward", _row_sums(share), "sums of its weights' gradients, f32"),
        Line("stream", _stream(share), "residual stream, its gradient, norms; rope's tables"),
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


def _optimizer(share: Share) -> list[Line]:
    p = share.param_bytes
    gradients = p * (share.stack + share.head * share.tables // share.split)
    lines = [Line("gradients", gradients, "of everything")]
    if share.plan.moments == "host":
        lines.append(Line("moments", 4 * p * share.stack // max(share.L, 1), "of one layer, on their way"))
    return lines
