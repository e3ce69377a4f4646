"""Three sums and a margin: the bytes of a training step at the three moments at which its memory can peak.

A step runs forward over the layers, through the loss, back over the layers, and updates the weights. Each moment is
what a person would write down for it: the state that is always there, what the forward pass has left, what is at work.
Compilers know better by some per cent, in both directions; `MARGIN` is what they need more than these sums, seen over
the programs of benchmarks/estimates.md.
"""

import dataclasses

from llamem.planner.share import Share

_F32 = 4
# Of what is not the state. TPUs leave gaps between arrays, and GPUs zero some gradients before they need them.
MARGIN = {"tpu": 0.07, "cuda": 0.06, "cpu": 0.06}
LINES = (
    "weights",
    "moments",
    "adapters",
    "batch",
    "layer weights",
    "residuals",
    "gradients",
    "head gradient",
    "loss tiles",
    "attention",
    "feed-forward",
    "stream",
    "margin",
)


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of an estimate: bytes on one device, and why so many."""

    name: str
    bytes: int
    why: str


def sums_of(share: Share) -> dict[str, tuple[Line, ...]]:
    """Return the moments at which a step's memory can peak, by name, each with its lines."""
    state = held(share)
    moments = {
        "the loss": [*copies(share), left_by_forward(share), *loss(share)],
        "a layer's backward pass": [*copies(share), residuals(share), *gradients(share), *layer(share)],
        "the optimizer": optimizer(share),
    }
    return {name: (*state, *lines, _margin(share, lines)) for name, lines in moments.items()}


def _margin(share: Share, lines: list[Line]) -> Line:
    size = int(MARGIN[share.chip.platform] * sum(line.bytes for line in lines))
    return Line("margin", size, "what compilers were seen to need more than these sums")


def held(share: Share) -> list[Line]:
    """Return what is there from the first moment to the last: weights, moments, the batch."""
    p, plan = share.param_bytes, share.plan
    batch = Line("batch", 2 * _F32 * share.B * share.T * share.mesh.context, "tokens and targets, int32")
    weights = p * share.vectors + (share.matrix_bytes if plan.weights == "device" else 0)
    if not share.trained:
        return [
            Line("weights", weights, f"frozen, layers in {share.question.quantize or share.config.param_dtype.name}"),
            Line("adapters", 3 * _F32 * share.adapters, f"{share.adapters:,} numbers and two moments of each, f32"),
            batch,
        ]
    moments = share.params if plan.moments == "device" else share.vectors
    return [
        Line("weights", weights, f"of {p} bytes each"),
        Line("moments", 2 * p * moments, "two of AdamW's for each weight that is not on the host"),
        batch,
    ]


def copies(share: Share) -> list[Line]:
    """Return weights in the type of the products, where they are stored in a wider one."""
    if share.param_bytes <= share.compute_bytes:
        return []
    if share.plan.layer_by_layer:
        return [Line("layer weights", share.compute_bytes * share.layer_weights, "of a layer, to be multiplied")]
    one_by_one = share.question.quantize or not (share.tpu or share.kept)  # a GPU narrows a layer when it needs it
    layers = share.layer_weights if one_by_one else share.stack
    size = share.compute_bytes * (layers + share.head // share.split)
    return [Line("layer weights", size, "in the type of the products")]


def residuals(share: Share) -> Line:
    """Return what the forward pass leaves on the device for the backward one, with those of one group at work."""
    inputs = group_inputs(share)
    if share.kept:
        size = share.layers_at_work * share.N * _kept_per_token(share)
        size *= share.groups if share.groups > 1 else 1
        return Line("residuals", size + inputs, f"everything of {share.L} layers")
    names = sorted(share.saved - {"mlp_out"} | ({"block_in"} - share.offloaded))  # nothing reads what "mlp_out" adds
    size = share.layers_at_work * sum(map(share.activation_bytes, names))
    layers = f"{share.L} layers" if share.groups == 1 else f"{share.groups} groups and {share.layers_at_work} layers"
    return Line("residuals", size + inputs, f"{', '.join(names) or 'nothing'} of {layers}")


def left_by_forward(share: Share) -> Line:
    """Return the same at the loss: of groups of layers their inputs alone, the rest is computed again later."""
    if share.groups == 1 or share.kept:
        return residuals(share)
    return Line("residuals", group_inputs(share), f"inputs of {share.groups} groups of layers")


def group_inputs(share: Share) -> int:
    """Return the bytes of what enters the groups of a nested stack; 0 where they wait on the host."""
    return share.groups * share.activation_bytes("block_in") if share.groups > 1 and not share.offloaded else 0


def _kept_per_token(share: Share) -> int:
    """Return the bytes of one token in one layer without rematerialisation: what each operation's derivative reads."""
    c = share.compute_bytes
    in_tiles = share.plan.mlp_tiles > 1, share.plan.head_groups > 1  # what is made inside of a tile is not kept
    norms = 1 if in_tiles[0] else 2
    stream = (3 * _F32 * norms + 2 * c) * share.D  # the norms' f32 factors, and what they read and made
    inner = 6 * c * share.F * share.mlp_rows(share.N) // share.N  # gate, up, and the parts of silu
    heads = c * share.lanes * (3 * share.H + 2 * share.K) + _F32 * share.H
    if share.config.qk_norm:
        heads += 3 * _F32 * share.lanes * (share.H + share.K)
    if share.attention == "xla":  # its scores, f32, and their softmax
        heads += (_F32 + c) * share.H * share.T * share.mesh.context
    return stream + (0 if in_tiles[0] else inner) + (0 if in_tiles[1] else heads)


def loss(share: Share) -> list[Line]:
    """Return a tile of logits with its gradient, the head's gradient, and the stream around them."""
    c, stream, head = share.compute_bytes, share.N * share.D, share.head if share.trained else 0
    logits = share.loss_rows * share.loss_columns
    if share.plan.loss_tiles is None and share.mesh.tensor == 1:
        both = 1 if share.tpu and not share.trained else 2  # a TPU multiplies the gradient as it makes it
        return [
            Line("loss tiles", both * _F32 * logits, "all logits and their gradient, f32"),
            Line("head gradient", c * head, "in the type of the products"),
            Line("stream", 2 * c * stream, "the last layer's output, and its norm"),
        ]
    narrowed = 0 if share.tpu and (share.loss_axis == "vocab" or share.loss_rows <= 1024) else c
    tile = Line(
        "loss tiles", (_F32 + narrowed) * logits, f"logits of {share.loss_rows:,} x {share.loss_columns:,}, f32"
    )
    if share.loss_axis == "vocab":
        return [
            Line("head gradient", c * head, "written tile by tile"),
            tile,
            Line("stream", (2 * c + _F32) * stream, "the last output, its norm, its f32 gradient"),
        ]
    return [
        Line("head gradient", _F32 * head, "summed over tiles in f32"),
        tile,
        Line("stream", 3 * c * stream, "the last output, its norm, the norm's gradient"),
    ]


def gradients(share: Share) -> list[Line]:
    """Return the gradients that exist while the backward pass goes over the layers, and weights of the one at work."""
    c, p, layer = share.compute_bytes, share.param_bytes, share.layer_weights
    if not share.trained:
        blocks, in_loops = share.question.quantize, share.plan.mlp_tiles > 1 or share.plan.head_groups > 1
        at_work = 2 * share.mlp_weights // 3  # two matrices of the feed-forward
        if in_loops or share.plan.weights == "host":  # loops over tiles and groups copy what they read
            at_work = layer if share.tpu or blocks else 2 * layer
        size = c * at_work
        if share.groups > 1:  # a group's weights, sliced out for its loop
            size += share.layers_at_work * (share.matrix_bytes - p * share.tables * share.head) // share.L
        if share.kept and blocks:  # what they stand for is kept for the backward pass
            size += c * share.stack
        return [
            Line("gradients", _F32 * share.adapters, "of the adapters, f32"),
            Line("layer weights", size, "of the layer at work"),
        ]
    head = Line("head gradient", c * share.head, "as the loss left it, until the optimizer takes it")
    if share.plan.layer_by_layer:  # updated at once: its weights and moments come and go
        homes = (share.plan.weights == "host") + 2 * (share.plan.moments == "host")
        if (
            share.tables > 1 or share.plan.weights == "host"
        ):  # updated before, or on the host until the embedding's comes
            head = dataclasses.replace(head, bytes=0)
        return [
            Line("gradients", p * layer, "of one layer"),
            Line("layer weights", homes * p * layer, "and moments, of the layer at work, on their way"),
            head,
        ]
    at_work = (c + p) * layer if share.split > 1 else c * layer
    if share.groups > 1:  # a group's weights, sliced out for its loop, and their gradients
        at_work += 2 * p * share.layers_at_work * layer // share.split
    return [
        Line("gradients", p * share.stack, "of all layers, from the backward loop's start"),
        Line("layer weights", at_work, "of the layer at work"),
        head,
    ]


def layer(share: Share) -> list[Line]:
    """Return what one layer's backward pass works on: its feed-forward, then its attention, and the stream.

    What attention's forward pass, run again, has left waits for the feed-forward, unless it is in groups of heads.
    """
    groups, wide = share.plan.head_groups, share.N * share.D
    c = share.compute_bytes
    size = 4 * c + (_F32 if groups > 1 else c)  # of several groups the sum, f32
    tables = 2 * _F32 * share.T * share.h
    stream = Line("stream", size * wide + tables, "residual stream, its gradient, norms; rope's tables")
    why = "queries, keys, values, output"
    left = 0 if share.kept or groups > 1 else attention_left(share)
    first = [Line("attention", left, why), feed_forward(share)]
    both = (attention_left(share) + attention_gradients(share)) // groups
    then = [Line("attention", both, f"{why}, their gradients")]
    return [*max((first, then), key=lambda lines: sum(line.bytes for line in lines)), stream]


def feed_forward(share: Share) -> Line:
    """Return gate, up and a gradient for the rows of one tile, and where there are several the sums over them."""
    c, tiles = share.compute_bytes, share.plan.mlp_tiles
    rows = share.mlp_rows(-(-share.N // tiles))
    wide = 3 if share.trained else 4 if share.tpu else 5  # what adapters add is made by itself
    size = wide * c * rows * share.F
    if share.config.compute_dtype == "bfloat16" and not share.question.chip.has_bf16:  # as on a T4
        size += _F32 * (2 * rows * share.F + share.mlp_weights // 3)  # f32 copies of a product's operands
    if share.config.n_experts:
        size += 3 * c * rows * share.D
    if share.trained and (tiles > 1 or share.config.n_experts):
        size += _F32 * share.mlp_weights
    return Line("feed-forward", size, f"gate, up, a gradient of {rows:,} rows")


def attention_left(share: Share) -> int:
    """Return the bytes that attention's forward pass leaves for its backward one, of all heads."""
    c, N = share.compute_bytes, share.N
    if share.attention == "xla":
        return c * N * share.lanes * (share.H + 2 * share.K) + (_F32 + c) * scores(share)
    return c * N * share.lanes * (2 * share.H + 2 * share.K) + _F32 * N * share.H


def attention_gradients(share: Share) -> int:
    """Return the bytes that attention's backward pass adds, of all heads."""
    c, N = share.compute_bytes, share.N
    size = c * N * share.lanes * (2 * share.H + 2 * share.K)
    if share.attention == "xla":
        return size + (_F32 + 1) * scores(share)
    if share.attention == "splash":  # 128 copies of each query's logsumexp, f32
        return max(size, _F32 * 128 * N * share.H)
    return c * N * share.h * share.H + _F32 * N * share.h * (share.H + 2 * share.K)  # three sums, f32


def scores(share: Share) -> int:
    """Return how many scores a layer's attention has where it writes them down."""
    return share.B * share.H * share.T * share.T * share.mesh.context


def optimizer(share: Share) -> list[Line]:
    """Return all gradients, whose norm comes first, and of moments on the host one layer's, there and back.

    Where layers are updated one by one, the embedding is left: the pieces of its gradient, and their sum.
    """
    p, c = share.param_bytes, share.compute_bytes
    if not share.trained:
        return [Line("gradients", _F32 * share.adapters, "of the adapters, f32")]
    if share.plan.layer_by_layer:
        stream = Line("stream", 2 * c * share.N * share.D, "what the embedding's gradient is made of")
        return [Line("head gradient", (2 * p + c) * share.head, "the embedding's, its pieces, its table"), stream]
    numbers = share.stack + share.tables * share.head // share.split
    lines = [Line("gradients", p * numbers, "of everything")]
    if share.plan.moments == "host":
        lines.append(Line("moments", 4 * p * share.stack // max(share.L, 1), "of one layer, there and back"))
    return lines
