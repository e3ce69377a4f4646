"""How fast many chips train together, estimated: products, and the messages of a step over the links they travel on.

A plain roofline, from one chip to thousands, for which no list of chips and no compiler is needed. Nothing overlaps in
it, and nothing here has been measured on a pod. What a chip receives agrees with what the compiler plans for it.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from llamem.llama import LlamaConfig, MeshShape
from llamem.memory import CHIPS
from llamem.planner.seconds import ATTENTION, CHIP_LINK, PRODUCTS

# Chips that the fast links join: TPU slices and machines of eight GPUs. Google Cloud's TPU pages: a pod of v5e or v6e
# has 256 chips, a v5p job up to 6,144. NVIDIA's data sheets of DGX A100 and DGX H100.
INSIDE = {"v5e": 256, "v6e": 256, "v5p": 6144, "a100": 8, "h100": 8}
# Bytes/s from a chip to those of other slices or machines. TPUs: the data-centre network (DCN) on Google Cloud's TPU
# pages, 6.4 and 25.6 Tbit/s for a pod of 256 v5e and v6e, 50 Gbit/s for a v5p. GPUs: a network card for each, of 200
# Gbit/s in a DGX A100, of 400 in a DGX H100.
NETWORK = {"v5e": 3.125e9, "v6e": 12.5e9, "v5p": 6.25e9, "a100": 25e9, "h100": 50e9}

_SUMS = 5  # all-reduces of the residual stream for each layer: two forward, one of them again, two backward


@dataclasses.dataclass(frozen=True)
class Pace:
    """A training step on many chips, estimated; all seconds are of one step, none of them measured.

    `received` are the bytes that reach one chip, by the mesh axis that needs them, and `links` the seconds that they
    take. `model_flops` is the arithmetic of one chip that the model asks for, without rematerialisation.
    """

    chip: str
    chips: int
    tokens: int
    products: float
    links: Mapping[str, float]
    received: Mapping[str, float]
    model_flops: float

    @property
    def seconds(self) -> float:
        """Products and messages one after the other: where a compiler overlaps them, the truth is shorter."""
        return self.products + sum(self.links.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all chips together."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """The share of the chips' peak that the model's own arithmetic takes: PaLM (Chowdhery et al. 2022), B."""
        peak = CHIPS[_one(self.chip)].peak_flops
        assert peak
        return self.model_flops / peak / self.seconds


def pace(config: LlamaConfig, chip: str, mesh: Mapping[str, int], *, batch_size: int, seq_len: int) -> Pace:
    """A step of `batch_size` sequences of `seq_len` tokens, rematerialised in full, on a mesh of chips of one kind.

    `chip`: v5e, v6e, v5p, a100 or h100. `mesh`: as in `Plan`. The axis `data` lies outside, over the network where the
    chips are more than the fast links join; `fsdp`, `tensor` and `context` lie inside. Raises ValueError for another
    chip, for a mesh whose inner axes are larger than that, and for sequences that do not divide.
    """
    shape = MeshShape.of(mesh)
    if chip not in INSIDE:
        raise ValueError(f"chip={chip!r}: links are known of {', '.join(INSIDE)}.")
    inner = shape.devices // shape.data
    if inner > INSIDE[chip]:
        raise ValueError(
            f"mesh {dict(mesh)}: fsdp x tensor x context is {inner}, and the fast links join {INSIDE[chip]} chips of "
            f"{chip}. Put the rest on data=, whose messages are few: mesh={{'data': {-(-inner // INSIDE[chip])}, ...}}."
        )
    if batch_size < 1 or batch_size % (shape.data * shape.fsdp):
        raise ValueError(
            f"batch_size={batch_size} does not divide among {shape.data * shape.fsdp} (data x fsdp): choose a multiple."
        )
    peak = CHIPS[_one(chip)].peak_flops
    assert peak
    tokens = batch_size * seq_len
    mine = tokens / shape.devices
    dense = 2 * config.n_params * mine
    # Two products of a position with its keys and values, and half of them masked.
    attention = 2 * seq_len * config.n_heads * config.head_dim * config.n_layers * mine
    received = _received(config, shape, batch_size, seq_len)
    outside = NETWORK[chip] if shape.devices > INSIDE[chip] else CHIP_LINK[chip]
    return Pace(
        chip=chip,
        chips=shape.devices,
        tokens=tokens,
        products=4 * (dense / PRODUCTS + attention / ATTENTION) / peak,
        links={axis: size / (outside if axis == "data" else CHIP_LINK[chip]) for axis, size in received.items()},
        received=received,
        model_flops=3 * (dense + attention),
    )


def _received(config: LlamaConfig, mesh: MeshShape, batch_size: int, seq_len: int) -> dict[str, float]:
    """Bytes that one chip receives in a step, by mesh axis; its own part of an array need not travel."""
    number = np.dtype(config.compute_dtype).itemsize
    head = config.vocab_size * config.d_model
    tables = head * (1 if config.tied_head else 2)
    layers = config.n_params - tables
    # A layer's weights come twice, the second time to compute it again, and its gradients are summed once; the head
    # comes once. Rows of the embedding are looked up where they lie.
    split = mesh.fsdp * mesh.context
    weights = (3 * layers + 2 * head) / mesh.tensor * number
    stream = batch_size // (mesh.data * mesh.fsdp) * seq_len // mesh.context * config.d_model * number
    keys_values = 2 * batch_size // (mesh.data * mesh.fsdp) * seq_len * config.n_kv_heads * config.head_dim * number

    def others(parts: int) -> float:
        return (parts - 1) / parts

    found = {
        "fsdp": others(split) * weights,
        # In a ring a sum travels twice: parts on their way to be added, then the sums.
        "tensor": 2 * others(mesh.tensor) * _SUMS * config.n_layers * stream,
        # Keys and values of the whole sequence: forward, again, and their gradients.
        "context": others(mesh.context) * 3 * config.n_layers * keys_values / mesh.tensor,
        "data": 2 * others(mesh.data) * config.n_params / split / mesh.tensor * number,
    }
    return {axis: size for axis, size in found.items() if size}


def _one(chip: str) -> str:
    return {"a100": "a100-80", "h100": "h100"}.get(chip, f"{chip}-1")
