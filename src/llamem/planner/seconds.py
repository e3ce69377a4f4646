"""How long a step takes, estimated: a roofline for each part of it. Nothing here has been measured on a chip."""

import dataclasses
import re

from llamem.memory import CHIPS
from llamem.planner.links import INSIDE, NETWORK, received
from llamem.planner.share import Share
from llamem.planner.sums import scores

# Assumptions, each a share of the chip's peak, and where it comes from. They make no plan fit; they rank plans.
PRODUCTS = 0.60  # well-fed matrix products: MaxText reports 55 to 65 % of peak for Llama models on v5e and v5p
ATTENTION = 0.50  # flash attention with a head dimension of 128: FlashAttention-2's paper (50 to 73 % on an A100)
TRAFFIC = 0.80  # of the memory's bandwidth, for what streams through it: common results of STREAM-like tests
_HOST_LINK = 16e9  # bytes/s to the host, where the chip does not say

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
        return self.products + self.attention + self.traffic + self.host_link + self.chip_link

    @property
    def parts(self) -> dict[str, float]:
        """The parts by their names in a table."""
        names = ("matrix products", "attention", "memory traffic", "host link", "between chips")
        return dict(zip(names, dataclasses.astuple(self), strict=True))


def seconds_of(share: Share, link_bytes: int) -> Seconds:
    """Return the parts of one step on one device, of which `link_bytes` cross the link to the host."""
    peak, bandwidth = speeds(share)
    return Seconds(
        products=product_flops(share) / (peak * PRODUCTS),
        attention=_attention(share, peak, bandwidth),
        traffic=_traffic(share) / (bandwidth * TRAFFIC),
        host_link=link_bytes / (share.chip.host_link or _HOST_LINK),
        chip_link=sum(link_seconds(share).values()),
    )


def speeds(share: Share) -> tuple[float, float]:
    """Return FLOP/s of products in the type of the products, and bytes/s of memory; those of an H100 where unknown."""
    chip, known = share.chip, CHIPS["h100"]
    narrow = chip.bf16_flops if share.config.compute_dtype.name == "bfloat16" else chip.peak_flops
    peak, bandwidth = narrow or known.peak_flops, chip.bandwidth or known.bandwidth
    assert peak and bandwidth
    return peak, bandwidth


def link_seconds(share: Share) -> dict[str, float]:
    """Return the seconds of messages between chips by mesh axis: `data` goes over the network beyond the fast links."""
    family = re.split("[-:]", share.chip.name)[0]
    inside = share.chip.chip_link or share.chip.host_link or _HOST_LINK
    outside = inside if share.mesh.devices <= INSIDE.get(family, 1) else NETWORK.get(family, inside)
    return {axis: size / (outside if axis == "data" else inside) for axis, size in received(share).items()}


def runs(share: Share) -> dict[str, float]:
    """Return how often a step runs each product, in units of its forward pass, gradients and recomputation included.

    The gradients of a product are two more of its size, and one where its weight is frozen. What is not known in the
    backward pass is computed again: in a rematerialised layer what is not saved, in a tile or a group of heads what is
    made there, in nested scans everything once more. Nothing reads the product `down` but the stream, so that a layer
    need not repeat it.
    """
    groups, tiles = share.plan.head_groups > 1, share.plan.mlp_tiles > 1
    known = share.saved | share.offloaded
    out = 0 if share.kept or "attn_out" in known else 1
    attention = 0 if share.kept or "attn" in known else 1
    qkv = 0 if share.kept or known >= {"q", "k", "v"} else 1
    gate_up = 0 if (share.kept or known >= {"gate", "up"}) and not tiles else 1
    if groups:  # each group is computed again in its own backward pass
        qkv = attention = 1 if share.kept else 1 + out
    own = 3 if share.trained else 2
    nested = 1 if share.groups > 1 and not share.kept else 0
    # Splash makes the scores twice in its backward pass (3 and 4 products for 2), others once.
    backward = {"splash": 3.5, "xla": 2.0}.get(share.attention, 2.5)
    return {
        "qkv": own + qkv + nested,
        "out": own + out + nested,
        "gate_up": own + gate_up + nested,
        "down": own + nested,
        "attention": 1 + backward + attention + nested,
        "head": own + (share.trained and share.loss_axis == "vocab"),
    }


def product_flops(share: Share) -> float:
    """Return FLOPs of the layers' and the head's matrix products on one device, rematerialisation included."""
    times, heads = runs(share), share.H * share.h
    attention = times["qkv"] * (heads + 2 * share.K * share.h) + times["out"] * heads
    inner = (2 * times["gate_up"] + times["down"]) * share.F * share.mlp_rows(share.N)
    layer = share.D * (share.N * attention + inner)
    adapters = share.N * (times["qkv"] + 1) * share.adapters
    return 2 * (share.L * layer + times["head"] * share.N * share.head + adapters)


def attention_flops(share: Share) -> float:
    """Return FLOPs of attention on one device."""
    return share.L * 4 * _scores_made(share) * share.lanes * runs(share)["attention"]


def _scores_made(share: Share) -> float:
    """Return how many scores a forward pass makes in a layer: half are masked, and only "xla" makes those."""
    return scores(share) * (1.0 if share.attention == "xla" else 0.5)


def _attention(share: Share, peak: float, bandwidth: float) -> float:
    """Return seconds of attention. In a kernel scores stay inside; in plain JAX they pass through memory, tile by tile,
    and on a GPU each pair of tiles is launched by itself.
    """
    kernel = attention_flops(share) / (peak * ATTENTION)
    if share.attention in ("splash", "cudnn"):
        return kernel
    times = share.L * runs(share)["attention"]
    pairs = times * _scores_made(share) / (256 * 512 * share.B * share.H) if share.attention == "tiled" else 0
    launches = 0 if share.tpu else _LOOP * pairs * share.plan.head_groups
    return kernel + times * _SCORES * 4 * _scores_made(share) / (bandwidth * TRAFFIC) + launches


def _traffic(share: Share) -> float:
    """Return bytes that stream through the device's memory beside the products' own operands and attention's."""
    c, N, D, times = share.compute_bytes, share.N, share.D, runs(share)
    passes = (times["qkv"] + times["out"] + times["gate_up"]) / 3
    layer = c * passes * (_STREAM_PASSES * N * D + _INNER_PASSES * share.mlp_rows(N) * share.F)
    layer += share.layer_weights * c * passes * max(1, share.plan.mlp_tiles / 2)
    if share.question.quantize:  # each pass writes the numbers that the blocks stand for, and reads them
        layer += share.layer_weights * c * 2 * passes
    update = _UPDATE * (share.param_bytes * share.params if share.trained else 4 * share.adapters)
    return share.L * layer + update + _loss_traffic(share)


def _loss_traffic(share: Share) -> float:
    """Return bytes of the loss: operands that each tile reads, sums that it updates, and the logits themselves, f32."""
    c, N, V, D = share.compute_bytes, share.N, share.V, share.D
    logits = 20 * N * V
    if share.loss_axis == "vocab":
        tiles = -(-V // share.loss_columns)
        return tiles * N * D * (3 * c + 8) + logits + 3 * V * D * c
    tiles = -(-N // share.loss_rows)
    return tiles * V * D * (2 * c + (8 if tiles > 1 and share.trained else 0)) + logits
