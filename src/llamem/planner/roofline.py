"""How long a step takes, on one chip or on thousands, estimated: a roofline of products, memory and links.

Nothing here has been measured on a chip. What a chip receives agrees with what the compiler plans for it.
"""

import dataclasses
import re
from collections.abc import Mapping

from jaxmem.chips.chip import CHIPS
from jaxmem.common.checks import check_one_of
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import MeshShape, Plan
from llamem.planner.sizes import Question, Sizes, has_cudnn

# Assumptions, each a share of the chip's peak, and where it comes from. They make no plan fit; they rank plans.
PRODUCTS = 0.60  # well-fed matrix products: MaxText reports 55 to 65 % of peak for Llama models on v5e and v5p
ATTENTION = 0.50  # flash attention with a head dimension of 128: FlashAttention-2's paper (50 to 73 % on an A100)
TRAFFIC = 0.80  # of the memory's bandwidth, for what streams through it: common results of STREAM-like tests

# By family, "v5e" or "a100": facts of `jaxmem.Chip`.
_FAMILIES = {re.split("[-:]", name)[0]: chip for name, chip in CHIPS.items()}
HOST_LINK = {family: chip.host_link for family, chip in _FAMILIES.items() if chip.host_link}
CHIP_LINK = {family: chip.chip_link for family, chip in _FAMILIES.items() if chip.chip_link}
_LINK = 16e9  # bytes/s, where the chip does not say
# Chips that the fast links join: TPU slices and machines of eight GPUs. Google Cloud's TPU pages: a pod of v5e or v6e
# has 256 chips, a v5p job up to 6,144. NVIDIA's data sheets of DGX A100, H100, H200 and B200.
INSIDE = {"v5e": 256, "v6e": 256, "v5p": 6144, "a100": 8, "h100": 8, "h200": 8, "b200": 8}
# Bytes/s from a chip to those of other slices or machines. TPUs: the data-centre network (DCN) on Google Cloud's TPU
# pages, 6.4 and 25.6 Tbit/s for a pod of 256 v5e and v6e, 50 Gbit/s for a v5p. GPUs: a network card for each, of 200
# Gbit/s in a DGX A100, of 400 in the later ones.
NETWORK = {"v5e": 3.125e9, "v6e": 12.5e9, "v5p": 6.25e9, "a100": 25e9, "h100": 50e9, "h200": 50e9, "b200": 50e9}

# Reads and writes of an activation of N x D, or of N x F, in one layer's forward pass after fusion; twice in the
# backward pass. Counted in the optimised programs of the 1B model.
_STREAM_PASSES, _INNER_PASSES = 12, 5
# Bytes moved for each number of the weights by AdamW, in units of the weight: read weight, gradient twice (the norm
# comes first) and both moments; write weight and both moments.
_UPDATE = 8
_SCORES = 4  # reads and writes of a score, f32, in a forward pass of attention that is no one kernel
_LOOP = 10e-6  # seconds of a GPU's launches for one pair of tiles, in a loop over 256 queries and 512 keys


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Parts of a step in seconds, one after the other; what runs side by side on a chip makes the truth shorter."""

    products: float
    attention: float
    traffic: float
    host_link: float
    chip_link: float

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Pace:
    """A training step on many chips, estimated; all seconds are of one step, none of them measured.

    `products` are seconds of matrix products and attention. `received` are the bytes that reach one chip, by the mesh
    axis that needs them, and `links` the seconds that they take. `mfu` is the share of the chips' peak that the model's
    own arithmetic takes, without rematerialisation (PaLM, Chowdhery et al. 2022, appendix B), where products and
    messages come one after the other: where a compiler overlaps them, it is larger.
    """

    chip: str
    chips: int
    tokens: int
    products: float
    links: Mapping[str, float]
    received: Mapping[str, float]
    mfu: float


def pace(config: LlamaConfig, chip: str, mesh: Mapping[str, int], *, batch_size: int, seq_len: int) -> Pace:
    """Return the pace of a step of `batch_size` sequences, rematerialised in full, on a mesh of chips of one kind.

    `chip`: v5e, v6e, v5p, a100 or h100. `mesh`: as in `Plan`. The axis `data` lies outside, over the network where the
    chips are more than the fast links join; `fsdp`, `tensor` and `context` lie inside. Raises ValueError for another
    chip, for a mesh whose inner axes are larger than that, and for sequences that do not divide.
    """
    check_one_of("chip", chip, tuple(INSIDE))
    shape, single_chip = MeshShape.of(mesh), _FAMILIES[chip]
    inner = shape.devices // shape.data
    if inner > INSIDE[chip]:
        raise ValueError(
            f"mesh {dict(mesh)}: fsdp x tensor x context is {inner}, and the fast links join {INSIDE[chip]} chips of "
            f"{chip}. Put the rest on data=, whose messages are few: mesh={{'data': {-(-inner // INSIDE[chip])}, ...}}."
        )
    # On GPUs whoever pays for many runs attention in a kernel; what splits sequences has none there.
    plan = Plan(mesh=shape, attention="cudnn" if has_cudnn(config, single_chip) and shape.context == 1 else "auto")
    s = Sizes(Question(config, dataclasses.replace(single_chip, devices=shape.devices), seq_len, batch_size), plan)
    seconds, links, tokens = seconds_of(s), link_seconds(s), batch_size * seq_len
    # Of a position's keys and values half are masked.
    attention = 6 * seq_len * config.n_heads * config.head_dim * config.n_layers
    flops = 3 * (config.flops_per_token(0) + attention / 3) * tokens / shape.devices
    products = seconds.products + seconds.attention
    mfu = flops / speeds(s)[0] / (products + seconds.chip_link)
    return Pace(chip, shape.devices, tokens, products, links, received(s), mfu)


def seconds_of(s: Sizes, link_bytes: int = 0) -> Seconds:
    """Return the parts of one step on one device, of which `link_bytes` cross the link to its host."""
    peak, bandwidth = speeds(s)
    return Seconds(
        products=product_flops(s) / (peak * PRODUCTS),
        attention=_attention(s, peak, bandwidth),
        traffic=_traffic(s) / (bandwidth * TRAFFIC),
        host_link=link_bytes / (s.chip.host_link or _LINK),
        chip_link=sum(link_seconds(s).values()),
    )


def speeds(s: Sizes) -> tuple[float, float]:
    """Return FLOP/s of products in the type of the products, and bytes/s of memory; those of an H100 where unknown."""
    chip, known = s.chip, CHIPS["h100"]
    narrow = chip.bf16_flops if s.config.compute_dtype.name == "bfloat16" else chip.peak_flops
    peak, bandwidth = narrow or known.peak_flops, chip.bandwidth or known.bandwidth
    assert peak and bandwidth
    return peak, bandwidth


def runs(s: Sizes) -> dict[str, float]:
    """Return how often a step runs each product, in units of its forward pass, gradients and recomputation included.

    The gradients of a product are two more of its size, and one where its weight is frozen. What is not known in the
    backward pass is computed again: in a rematerialised layer what is not saved, in a tile or a group of heads what is
    made there, in nested scans everything once more. Nothing reads the product `down` but the stream, so that a layer
    need not repeat it.
    """
    known = s.saved | s.offloaded
    out, attention, qkv, gate_up = (
        0 if s.kept or known >= names else 1 for names in ({"attn_out"}, {"attn"}, {"q", "k", "v"}, {"gate", "up"})
    )
    if s.attention == "cudnn" and not s.kept:  # its logsumexp has no name to be kept by
        attention = 1
    if s.plan.mlp_tiles > 1:
        gate_up = 1
    if s.plan.head_groups > 1:  # each group is computed again in its own backward pass
        qkv = attention = 1 + out
    own = 3 if s.trained else 2
    nested = 1 if s.groups > 1 and not s.kept else 0
    # Splash makes the scores twice in its backward pass (3 and 4 products for 2), others once.
    backward = {"splash": 3.5, "xla": 2.0}.get(s.attention, 2.5)
    return {
        "qkv": own + qkv + nested,
        "out": own + out + nested,
        "gate_up": own + gate_up + nested,
        "down": own + nested,
        "attention": 1 + backward + attention + nested,
        "head": own + (s.trained and s.loss_axis == "vocab"),
    }


def product_flops(s: Sizes) -> float:
    """Return FLOPs of the layers' and the head's matrix products on one device, rematerialisation included."""
    times, heads = runs(s), s.H * s.h
    attention = times["qkv"] * (heads + 2 * s.K * s.h) + times["out"] * heads
    inner = (2 * times["gate_up"] + times["down"]) * s.F * s.N
    layer = s.D * (s.N * attention + inner)
    adapters = s.N * (times["qkv"] + 1) * s.adapters
    return 2 * (s.L * layer + times["head"] * s.N * s.head + adapters)


def _attention(s: Sizes, peak: float, bandwidth: float) -> float:
    """Return seconds of attention. In a kernel scores stay inside; in plain JAX they pass through memory, tile by tile,
    and on a GPU each pair of tiles is launched by itself.
    """
    times = s.L * runs(s)["attention"]
    made = times * s.scores * (1.0 if s.attention == "xla" else 0.5)  # half are masked, and only "xla" makes those
    seconds = 4 * made * s.lanes / (peak * ATTENTION)
    if s.attention in ("splash", "cudnn"):
        return seconds
    pairs = made / (256 * 512 * s.B * s.H) if s.attention == "tiled" and not s.tpu else 0
    return seconds + _SCORES * 4 * made / (bandwidth * TRAFFIC) + _LOOP * pairs * s.plan.head_groups


def _traffic(s: Sizes) -> float:
    """Return bytes that stream through the device's memory beside the products' own operands and attention's."""
    c, N, V, D, times = s.compute_bytes, s.N, s.V, s.D, runs(s)
    passes = (times["qkv"] + times["out"] + times["gate_up"]) / 3
    weights = max(1, s.plan.mlp_tiles / 2) + (2 if s.question.quantize else 0)  # blocks are written out, and read
    layer = c * passes * (_STREAM_PASSES * N * D + _INNER_PASSES * N * s.F + weights * s.layer_weights)
    update = _UPDATE * (s.param_bytes * s.params if s.trained else 4 * s.adapters)
    # The loss: operands that each tile reads, sums that it updates, and the logits themselves, f32.
    rows, columns = -(-N // s.loss_rows), -(-V // s.loss_columns)
    if s.loss_axis == "vocab":
        loss = columns * N * D * (3 * c + 8) + 3 * V * D * c
    else:
        loss = rows * V * D * (2 * c + (8 if rows > 1 and s.trained else 0))
    return s.L * layer + update + loss + 20 * N * V


def link_seconds(s: Sizes) -> dict[str, float]:
    """Return the seconds of messages between chips by mesh axis: `data` goes over the network beyond the fast links."""
    family = re.split("[-:]", s.chip.name)[0]
    inside = s.chip.chip_link or s.chip.host_link or _LINK
    outside = inside if s.mesh.devices <= INSIDE.get(family, 1) else NETWORK.get(family, inside)
    return {axis: size / (outside if axis == "data" else inside) for axis, size in received(s).items()}


def received(s: Sizes) -> dict[str, float]:
    """Return the bytes that one chip receives in a step, by mesh axis; its own part of an array need not travel.

    A layer's weights are gathered for each forward pass, the first, the one again and a nested scan's third, and their
    gradients are summed once. The head is gathered and summed once; rows of the embedding are looked up where they lie.
    Of a frozen model there are no gradients; those of adapters are summed over all devices with other tokens.
    """
    mesh, c = s.mesh, s.compute_bytes
    again = 0 if s.kept else 1 if s.groups == 1 else 2
    forward, sums = 1 + again, 1 if s.trained else 0
    weights = (forward + sums) * s.L * s.layer_weights + (1 + sums) * s.head
    keys_values = 2 * s.B * s.T * mesh.context * s.K * s.h * c

    def others(parts: int) -> float:
        return (parts - 1) / parts

    bytes_by_axis = {
        "fsdp": others(s.split) * weights * c,
        # Sums of the stream: two forward, one of them again, two backward. In a ring a sum travels twice.
        "tensor": 2 * others(mesh.tensor) * (4 + again) * s.L * s.activation_bytes("block_in"),
        # Keys and values of the whole sequence for each forward pass, and their gradients.
        "context": others(mesh.context) * (forward + 1) * s.L * keys_values,
        "data": 2 * others(mesh.data) * s.params * c
        if s.trained
        else 2 * others(mesh.devices // mesh.tensor) * 4 * s.adapters,
    }
    return {axis: size for axis, size in bytes_by_axis.items() if size}
