"""How long a step takes, estimated: a roofline for each part of it. Nothing here has been measured on a chip."""

import dataclasses
import re
from typing import Any

from llamem.memory import CHIPS
from llamem.planner.share import Share

# Assumptions, each a share of the chip's peak, and where it comes from. They make no plan fit; they rank plans.
PRODUCTS = 0.60  # well-fed matrix products: MaxText reports 55 to 65 % of peak for Llama models on v5e and v5p
ATTENTION = 0.50  # flash attention with a head dimension of 128: FlashAttention-2's paper (50 to 73 % on an A100)
TRAFFIC = 0.80  # of the memory's bandwidth, for what streams through it: common results of STREAM-like tests

_FAMILIES = {re.split("[-:]", name)[0]: chip for name, chip in CHIPS.items()}
# Bytes/s between a chip and its host, and from one chip to its neighbours, by family: facts of `llamem.memory.Chip`.
HOST_LINK = {family: chip.host_link for family, chip in _FAMILIES.items() if chip.host_link}
CHIP_LINK = {family: chip.chip_link for family, chip in _FAMILIES.items() if chip.chip_link}

# Reads and writes of an activation of N x D, or of N x F, in one layer's forward pass after fusion; twice in the
# backward pass. Counted in the optimised programs of the 1B model.
_STREAM_PASSES, _INNER_PASSES = 12, 5
# Bytes moved for each number of the weights by AdamW, in units of the weight: read weight, gradient twice (the norm
# comes first) and both moments; write weight and both moments.
_UPDATE = 8


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


def seconds_of(share: Share, host_bytes_moved: int) -> Seconds:
    """The parts of one step on one device."""
    chip = share.chip
    peak, bandwidth, host_link = chip.bf16_flops, chip.bandwidth, chip.host_link
    assert peak and bandwidth and host_link  # every chip of the table has them
    return Seconds(
        products=product_flops(share) / (peak * PRODUCTS),
        attention=attention_flops(share) / (peak * ATTENTION),
        traffic=_traffic(share) / (bandwidth * TRAFFIC),
        host_link=host_bytes_moved / host_link,
        chip_link=_between_chips(share) / (chip.chip_link or host_link),
    )


def _again(share: Share) -> tuple[float, float, float]:
    """How often a layer's q, k and v; its output projection; its gate and up are computed once more than needed.

    The last product of a layer, down, is never needed again; with nested scans everything is, once.
    """
    plan, known = share.plan, share.saved | share.offloaded
    if share.kept:  # but for what is inside a tile
        return float(plan.head_groups > 1), 0.0, float(plan.mlp_tiles > 1)
    nested = 1.0 if share.groups > 1 else 0.0
    qkv = 0.0 if known >= {"q", "k", "v"} else 1.0
    out = 0.0 if "attn_out" in known else 1.0
    if plan.head_groups > 1:  # each group is computed again in its own backward pass
        qkv = 1.0 + out
    gate_up = 0.0 if known >= {"gate", "up"} and plan.mlp_tiles == 1 else 1.0
    return qkv + nested, out + nested, gate_up + nested


def attention_passes(share: Share) -> float:
    """How many forward passes of attention the step's work on it equals, the backward pass's own products included."""
    # Products of a backward pass over the two of a forward one: Splash makes the scores twice (3 and 4), others once.
    backward = 3.5 if share.attention == "splash" else 2.0 if share.attention == "xla" else 2.5
    if share.kept:
        return 1 + backward + float(share.plan.head_groups > 1)
    passes = share.backward_passes
    nested = 1.0 if share.groups > 1 else 0.0
    known = share.saved | share.offloaded
    again = 0.0 if "attn" in known else 1.0
    if share.plan.head_groups > 1:
        again = 1.0 if "attn_out" in known else 2.0
    return 1 + passes * (backward + again + nested)


def product_flops(share: Share) -> float:
    """FLOPs of the layers' and the head's matrix products on one device, rematerialisation included."""
    qkv, out, gate_up = _again(share)
    D, N, heads = share.D, share.N, share.H * share.h
    nested = 1.0 if share.groups > 1 and not share.kept else 0.0
    passes = share.backward_passes  # in each of them everything but the first forward pass
    layer = (1 + passes * (2 + qkv)) * D * (heads + 2 * share.K * share.h) + (1 + passes * (2 + out)) * heads * D
    layer += (1 + passes * (2 + gate_up)) * 2 * D * share.F + (1 + passes * (2 + nested)) * share.F * D
    head = (4 if share.loss_axis == "vocab" else 3) * share.V * D
    return 2 * N * (share.L * layer + head)


def attention_flops(share: Share) -> float:
    """FLOPs of attention on one device. Half the scores are masked, and kernels that work in blocks skip them."""
    seen = 1.0 if share.attention in ("xla",) else 0.5
    length = share.T * share.mesh.context  # keys
    forward = 4 * seen * share.B * share.T * length * share.H * share.lanes
    return share.L * forward * attention_passes(share)


def _traffic(share: Share) -> float:
    """Bytes that stream through the device's memory beside the products' own operands."""
    c, N, D = share.compute_bytes, share.N, share.D
    again = sum(_again(share)) / 3
    passes = 1 + share.backward_passes * (2 + again)
    layer = N * c * (_STREAM_PASSES * D + _INNER_PASSES * share.F) * passes
    layer += share.layer_weights * c * passes * max(1, share.plan.mlp_tiles / 2)
    if share.attention == "xla":
        layer += 6 * 4 * share.B * share.H * share.T * share.T * (2 + (0 if share.kept else 1))
    update = _UPDATE * share.param_bytes * share.params
    return share.L * layer + update + _loss_traffic(share)


def _loss_traffic(share: Share) -> float:
    """Bytes of the loss: operands that each tile reads and sums that it updates, and the logits themselves, f32."""
    c, N, V, D = share.compute_bytes, share.N, share.V, share.D
    logits = 20 * N * V
    if share.loss_axis == "vocab":
        tiles = -(-V // share.loss_columns)
        return tiles * N * D * (3 * c + 8) + logits + 3 * V * D * c
    tiles = -(-N // share.loss_rows)
    return tiles * V * D * (2 * c + (8 if tiles > 1 else 0)) + logits


def _between_chips(share: Share) -> float:
    """Bytes that a device receives: weights gathered and gradients scattered, sums of activations, keys and values."""
    mesh, c = share.mesh, share.compute_bytes

    def ring(parts: int) -> float:
        return (parts - 1) / parts

    passes = 2 if share.kept else 3 if share.groups == 1 else 4
    weights = share.L * share.layer_weights + 3 * share.head
    total = ring(share.split) * weights * c * passes
    total += 2 * ring(mesh.data) * share.params * share.param_bytes
    stream = share.N * share.D * c
    total += share.L * stream * 2 * ring(mesh.tensor) * (2 + passes)
    keys_values = 2 * share.B * share.T * mesh.context * share.K * share.h * c
    return total + share.L * ring(mesh.context) * keys_values * (passes + 1)


def describe(seconds: Seconds) -> dict[str, Any]:
    """The parts by their names in a table."""
    return {
        "matrix products": seconds.products,
        "attention": seconds.attention,
        "memory traffic": seconds.traffic,
        "host link": seconds.host_link,
        "between chips": seconds.chip_link,
    }
