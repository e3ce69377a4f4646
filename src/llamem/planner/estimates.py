"""What a step will need and how long it will take, in closed form: bytes line by line, seconds part by part.

A step runs forward over the layers, through the loss, back over the layers, and updates the weights. At each of these
moments its memory can peak, and each is what a person would write down for it: the state that is always there, what
the forward pass has left, what is at work. Compilers know better by some per cent, in both directions; `MARGIN` is what
they need more than these sums, seen over the programs of benchmarks/estimates.md.

Seconds are a roofline with assumed efficiencies (`llamem.planner.roofline`): they rank plans and are no measurement.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from jaxmem.chips.chip import Chip
from jaxmem.chips.names import chip_called
from jaxmem.common.printing import Shown, Table
from jaxmem.report import Depth, GiB, Report
from llamem.adapters.lora import LoraConfig
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import Plan
from llamem.planner.roofline import Seconds, seconds_of
from llamem.planner.sizes import Question, Sizes
from llamem.quantized.blocks import BlockKind
from llamem.runs.step_of_plan import check_update
from llamem.train.settings import Clip, TrainSettings

_F32 = 4
# Of what is not the state. TPUs leave gaps between arrays, and GPUs zero some gradients before they need them.
MARGIN = {"tpu": 0.07, "cuda": 0.06, "cpu": 0.06}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of an estimate: bytes on one device, and why so many."""

    name: str
    bytes: int
    why: str


def three_sums(s: Sizes) -> dict[str, tuple[Line, ...]]:
    """Return the moments at which a step's memory can peak, by name, each with its lines."""
    moments = {
        "the loss": [copies(s), residuals(s, at_loss=True), *loss(s)],
        "a layer's backward pass": [copies(s), residuals(s), *gradients(s), *layer(s)],
        "the optimizer": optimizer(s),
    }
    share, why = MARGIN[s.chip.platform], "what compilers were seen to need more than these sums"
    return {
        name: (*state(s), *lines, Line("margin", int(share * sum(line.bytes for line in lines)), why))
        for name, lines in moments.items()
    }


def state(s: Sizes) -> list[Line]:
    """Return what is there from the first moment to the last: weights, moments, adapters, the batch."""
    p, plan = s.param_bytes, s.plan
    weights = p * s.vectors + (s.matrix_bytes if plan.weights == "device" else 0)
    moments = (s.params if plan.moments == "device" else s.vectors) if s.trained else 0
    kind = s.question.quantize
    return [
        Line("weights", weights, f"layers in {kind}" if kind else f"of {p} bytes each"),
        Line("moments", 2 * p * moments, "two of AdamW's for each weight that is not on the host"),
        Line("adapters", 3 * _F32 * s.adapters, f"{s.adapters:,} numbers and two moments of each, f32"),
        Line("batch", 2 * _F32 * s.N * s.mesh.context, "tokens and targets, int32"),
    ]


def copies(s: Sizes) -> Line:
    """Return weights in the type of the products, where they are stored in a wider one."""
    size = 0
    if s.param_bytes > s.compute_bytes:
        one_by_one = s.question.quantize or not (s.tpu or s.kept)  # a GPU narrows a layer when it needs it
        size = (s.layer_weights if one_by_one else s.stack) + s.head // s.split
        if s.plan.layer_by_layer:
            size = s.layer_weights
    return Line("layer weights", s.compute_bytes * size, "in the type of the products")


def residuals(s: Sizes, at_loss: bool = False) -> Line:
    """Return what the forward pass leaves on the device for the backward one.

    Of groups of layers these are their inputs, and in the backward pass what the layers of one group leave.
    """
    names = sorted(s.saved - {"mlp_out"} | ({"block_in"} - s.offloaded))  # nothing reads what "mlp_out" adds
    layer, what = sum(map(s.activation_bytes, names)), ", ".join(names) or "nothing"
    layers = s.L if s.groups == 1 else 0 if at_loss else s.L // s.groups
    if s.kept:
        layer, what, layers = s.N * _kept_per_token(s), "everything", s.L
    inputs = s.groups * s.activation_bytes("block_in") if s.groups > 1 and not s.offloaded else 0
    in_groups = f" in {s.groups} groups" if s.groups > 1 else ""
    return Line("residuals", layers * layer + inputs, f"{what} of {s.L} layers{in_groups}")


def _kept_per_token(s: Sizes) -> int:
    """Return the bytes of one token in one layer without rematerialisation: what each operation's derivative reads."""
    c = s.compute_bytes
    norm = 3 * _F32 * s.D  # its f32 factors
    inner = norm + 6 * c * s.F  # gate, up, and the parts of silu
    heads = c * s.lanes * (3 * s.H + 2 * s.K) + _F32 * s.H
    if s.attention == "xla":  # its scores, f32, and their softmax
        heads += (_F32 + c) * s.H * s.T * s.mesh.context
    # What is made inside of a tile, or of a group of heads, is not kept.
    in_full = (inner if s.plan.mlp_tiles == 1 else 0) + (heads if s.plan.head_groups == 1 else 0)
    return 2 * c * s.D + norm + in_full


def loss(s: Sizes) -> list[Line]:
    """Return a tile of logits with its gradient, the head's gradient, and the stream around them."""
    c = s.compute_bytes
    # A TPU narrows the gradient of the logits as it multiplies it, but not for tiles of many rows.
    narrowed = 0 if s.tpu and (s.loss_axis == "vocab" or s.loss_rows <= 1024) else c
    logit, of_head, stream = _F32 + narrowed, _F32, 3 * c  # tiles of tokens: sums of the head's gradient in f32
    if s.plan.loss_tiles is None and s.mesh.tensor == 1:
        # A TPU multiplies the gradient as it makes it, where it is read once.
        logit, of_head, stream = _F32 if s.tpu and not s.trained else 2 * _F32, c, 2 * c
    elif s.loss_axis == "vocab":  # a tile's rows of the head's gradient are finished; that of the stream is a sum
        of_head, stream = c, 2 * c + _F32
    tile = f"logits of {s.loss_rows:,} x {s.loss_columns:,}, f32, and their gradient"
    return [
        Line("head gradient", of_head * s.head if s.trained else 0, f"{of_head} bytes each"),
        Line("loss tiles", logit * s.loss_rows * s.loss_columns, tile),
        Line("stream", stream * s.N * s.D, "the last output, its norm, gradients"),
    ]


def gradients(s: Sizes) -> list[Line]:
    """Return the gradients that exist while the backward pass goes over the layers, and weights of the one at work."""
    c, p, weights = s.compute_bytes, s.param_bytes, s.layer_weights
    head = Line("head gradient", c * s.head, "as the loss left it, until the optimizer takes it")
    if s.plan.layer_by_layer and s.trained:  # updated at once: its weights and moments come and go
        homes = (s.plan.weights == "host") + 2 * (s.plan.moments == "host")
        used = s.tables > 1 or s.plan.weights == "host"  # updated already, or on the host till the embedding's comes
        return [
            Line("gradients", p * weights, "of one layer"),
            Line("layer weights", homes * p * weights, "and moments, of the layer at work, on their way"),
            *([] if used else [head]),
        ]
    if not s.trained:  # of layers that are kept whole also what their blocks stand for
        size = c * weights + (c * s.stack if s.kept and s.question.quantize else 0)
        adapters = Line("gradients", _F32 * s.adapters, "of the adapters, f32")
        return [adapters, Line("layer weights", size, "of the layer at work")]
    at_work = (c + p) * weights if s.split > 1 else c * weights
    if s.groups > 1:  # a group's weights, sliced out for its loop, and their gradients
        at_work += 2 * p * (s.L // s.groups) * weights // s.split
    return [
        Line("gradients", p * s.stack, "of all layers, from the backward loop's start"),
        Line("layer weights", at_work, "of the layer at work"),
        head,
    ]


def layer(s: Sizes) -> list[Line]:
    """Return what one layer's backward pass works on: its feed-forward, then its attention, and the stream.

    What attention's forward pass, run again, has left waits for the feed-forward, unless it is in groups of heads.
    """
    c, groups, (left, more) = s.compute_bytes, s.plan.head_groups, attention(s)
    stream = (4 * c + (_F32 if groups > 1 else c)) * s.N * s.D + 2 * _F32 * s.T * s.h  # of several groups the sum, f32
    why = "queries, keys, values, output"
    first = [Line("attention", 0 if s.kept or groups > 1 else left, why), feed_forward(s)]
    then = [Line("attention", (left + more) // groups, f"{why}, their gradients")]
    at_work = max((first, then), key=lambda lines: sum(line.bytes for line in lines))
    return [*at_work, Line("stream", stream, "residual stream, its gradient, norms; rope's tables")]


def feed_forward(s: Sizes) -> Line:
    """Return gate, up and a gradient for the rows of one tile, and where there are several the sums over them."""
    c, tiles = s.compute_bytes, s.plan.mlp_tiles
    rows = -(-s.N // tiles)
    size = (3 if s.trained else 5) * c * rows * s.F  # what adapters add is made by itself
    if s.trained and tiles > 1:
        size += _F32 * s.mlp_weights
    return Line("feed-forward", size, f"gate, up, a gradient of {rows:,} rows")


def attention(s: Sizes) -> tuple[int, int]:
    """Return the bytes that attention's forward pass leaves for its backward one, and those that this adds."""
    c, queries, keys = s.compute_bytes, s.N * s.lanes * s.H, s.N * s.lanes * s.K
    both = 2 * c * (queries + keys)
    if s.attention == "xla":  # with scores and their softmax, and with their gradient
        return both - c * queries + (_F32 + c) * s.scores, both + 5 * s.scores
    if s.attention == "splash":  # 128 copies of each query's logsumexp, f32
        gradients = max(both, _F32 * 128 * s.N * s.H)
    else:  # three sums, f32
        gradients = c * queries + _F32 * (queries + 2 * keys)
    return both + _F32 * s.N * s.H, gradients


def optimizer(s: Sizes) -> list[Line]:
    """Return all gradients, whose norm comes first, and of moments on the host one layer's, there and back.

    Where layers are updated one by one, the embedding is left: the pieces of its gradient, and their sum.
    """
    p, c = s.param_bytes, s.compute_bytes
    if not s.trained:
        return [Line("gradients", _F32 * s.adapters, "of the adapters, f32")]
    if s.plan.layer_by_layer:
        stream = Line("stream", 2 * c * s.N * s.D, "what the embedding's gradient is made of")
        return [Line("head gradient", (2 * p + c) * s.head, "the embedding's, its pieces, its table"), stream]
    moments = 4 * p * s.stack // max(s.L, 1) if s.plan.moments == "host" else 0
    return [
        Line("gradients", p * (s.stack + s.tables * s.head // s.split), "of everything"),
        Line("moments", moments, "of one layer, there and back"),
    ]


def on_host(s: Sizes) -> tuple[int, int]:
    """Return the bytes in the host's memory, and those that cross the link to it in a step, both ways."""
    plan, p, matrices, tables = s.plan, s.param_bytes, s.matrix_bytes, s.param_bytes * s.tables * s.head
    away = sum(map(s.activation_bytes, s.offloaded))
    inputs = s.groups * s.activation_bytes("block_in") if s.offloaded and s.groups > 1 else 0
    held, moved = s.L // s.groups * away + inputs, 2 * (s.L * away + inputs)
    if plan.moments == "host":  # there and back
        held, moved = held + 2 * matrices, moved + 4 * matrices
    if plan.weights == "host":  # read forward and backward, in groups twice; written once; tables are read once more
        reads = 3 if s.groups > 1 else 2
        held, moved = held + matrices, moved + (reads + s.trained) * (matrices - tables) + 2 * p * s.head
    if plan.weights == "host" and s.trained:  # a tied head's gradient waits there for the embedding's
        waits = s.compute_bytes * s.head if s.tables == 1 else 0
        held, moved = held + waits, moved + 2 * tables + 2 * waits
    return held, moved


@dataclasses.dataclass(frozen=True, repr=False)
class Estimate(Shown):
    """The estimate of one training step under a plan, on one chip, or on each of several, in bytes and seconds.

    `moments` are the times at which memory can be fullest, each with its lines; `peak_bytes` is the largest of their
    sums and `lines` those of that moment, named `peak_at`. `host_bytes` lie in the host's memory, `link_bytes` cross
    the link to it in a step, both ways together. `seconds` are a roofline's, by part: an estimate with assumed
    efficiencies, never a measurement. `tokens_per_second` counts those of the whole batch, on all chips.
    """

    question: Question
    plan: Plan
    moments: Mapping[str, tuple[Line, ...]]
    host_bytes: int
    link_bytes: int
    seconds: Seconds
    peak_at: str
    lines: tuple[Line, ...]
    peak_bytes: int

    @property
    def chip(self) -> Chip:
        """The chip, or the chips."""
        return self.question.chip

    @property
    def capacity_bytes(self) -> int | None:
        """What the chip offers a program."""
        return self.chip.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether the estimate is within what the chip offers; the compiler may find otherwise."""
        return self.capacity_bytes is None or self.peak_bytes <= self.capacity_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the whole batch, on all chips, over the estimated seconds."""
        return self.question.batch_size * self.question.seq_len / self.seconds.total

    def compile(self, depth: Depth = "memory") -> Report:
        """Return what the chip's own compiler says of this step; a TPU's with `depth="code"` also its own `seconds`.

        See `jaxmem.compile_report`.
        """
        return self.question.compile(self.plan, depth)

    def parts_shown(self) -> Iterable[str | Table]:
        """Return the verdict, the lines at the peak, and the parts of the seconds."""
        of = f" of {self.capacity_bytes / GiB:.2f}" if self.capacity_bytes else ""
        yield (
            f"{self.chip.name}, {self.question.batch_size} x {self.question.seq_len:,} tokens, estimated: "
            f"{'fits' if self.fits else 'DOES NOT FIT'}, peak {self.peak_bytes / GiB:.2f}{of} GiB ({self.peak_at}), "
            f"host {self.host_bytes / GiB:.2f} GiB"
        )
        yield Table(("line", "GiB", "why"), [(x.name, f"{x.bytes / GiB:.2f}", x.why) for x in self.lines if x.bytes])
        names = ("matrix products", "attention", "memory traffic", "host link", "between chips")
        seconds = zip(names, dataclasses.astuple(self.seconds), strict=True)
        parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds if value >= 0.005)
        yield f"{self.seconds.total:.2f} s a step by a roofline, not measured: {parts}"


def estimate(
    config: LlamaConfig,
    plan: Plan = Plan(),
    chip: str = "v5e-1",
    *,
    seq_len: int,
    batch_size: int = 1,
    clip: Clip = "global",
    lora: LoraConfig | None = None,
    quantize: BlockKind | None = None,
) -> Estimate:
    """Return what one AdamW step will need on a chip or a slice, in microseconds, without a compiler.

    The step is that of `llamem.abstract_step`, its state donated; with `lora` that of `llamem.abstract_lora_step`, over
    matrices in blocks with `quantize`. With several chips the plan's mesh says who holds what, and bytes are those of
    one. Raises ValueError for an unknown chip, for sizes that do not divide, and for what that step would refuse, such
    as weights on the host under `clip="global"`; TypeError for what is no config, plan or `LoraConfig`.
    """
    question = Question(config, chip_called(chip), seq_len, batch_size, None, clip, None, lora, quantize)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan={plan!r}: expected a llamem.Plan.")
    result = estimate_plan(question, plan)
    if lora is None:
        check_update(plan, TrainSettings(clip=clip), config.param_dtype)
    return result


def estimate_plan(question: Question, plan: Plan) -> Estimate:
    """Return the estimate of a plan for a question. Raises ValueError for a plan that the step would refuse."""
    sizes = Sizes(question, plan)
    moments, (held, moved) = three_sums(sizes), on_host(sizes)
    peak, at = max((sum(line.bytes for line in lines), name) for name, lines in moments.items())
    return Estimate(question, plan, moments, held, moved, seconds_of(sizes, moved), at, moments[at], peak)
