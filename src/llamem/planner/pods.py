"""How fast many chips train together, estimated: the roofline of a step on any number of them."""

import dataclasses
from collections.abc import Mapping

from llamem._checks import check_one_of
from llamem.llama import LlamaConfig, MeshShape, Plan
from llamem.memory import CHIPS
from llamem.planner.links import INSIDE, received
from llamem.planner.question import Question, has_cudnn
from llamem.planner.seconds import link_seconds, seconds_of, speeds
from llamem.planner.share import share_of

_ONE = {"a100": "a100-80", "h100": "h100"}  # the chip of a family; of TPUs it is called v5e-1


@dataclasses.dataclass(frozen=True)
class Pace:
    """A training step on many chips, estimated; all seconds are of one step, none of them measured.

    `products` are seconds of matrix products and attention. `received` are the bytes that reach one chip, by the mesh
    axis that needs them, and `links` the seconds that they take. `mfu` is the share of the chips' peak that the model's
    own arithmetic takes, without rematerialisation: PaLM (Chowdhery et al. 2022), appendix B.
    """

    chip: str
    chips: int
    tokens: int
    products: float
    links: Mapping[str, float]
    received: Mapping[str, float]
    mfu: float

    @property
    def seconds(self) -> float:
        """Products and messages one after the other: where a compiler overlaps them, the truth is shorter."""
        return self.products + sum(self.links.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all chips together."""
        return self.tokens / self.seconds


def pace(config: LlamaConfig, chip: str, mesh: Mapping[str, int], *, batch_size: int, seq_len: int) -> Pace:
    """Return the pace of a step of `batch_size` sequences, rematerialised in full, on a mesh of chips of one kind.

    `chip`: v5e, v6e, v5p, a100 or h100. `mesh`: as in `Plan`. The axis `data` lies outside, over the network where the
    chips are more than the fast links join; `fsdp`, `tensor` and `context` lie inside. Raises ValueError for another
    chip, for a mesh whose inner axes are larger than that, and for sequences that do not divide.
    """
    check_one_of("chip", chip, tuple(INSIDE))
    shape = MeshShape.of(mesh)
    one = CHIPS[_ONE.get(chip, f"{chip}-1")]
    # On GPUs whoever pays for many runs attention in a kernel; what splits sequences has none there.
    plan = Plan(mesh=shape, attention="cudnn" if has_cudnn(config, one) and shape.context == 1 else "auto")
    inner = plan.mesh.devices // plan.mesh.data
    if inner > INSIDE[chip]:
        raise ValueError(
            f"mesh {dict(mesh)}: fsdp x tensor x context is {inner}, and the fast links join {INSIDE[chip]} chips of "
            f"{chip}. Put the rest on data=, whose messages are few: mesh={{'data': {-(-inner // INSIDE[chip])}, ...}}."
        )
    chips = dataclasses.replace(one, devices=plan.mesh.devices)
    share = share_of(Question(config, chips, seq_len, batch_size), plan)
    parts, links = seconds_of(share, 0), link_seconds(share)
    products = parts.products + parts.attention
    tokens = batch_size * seq_len
    # Of a position's keys and values half are masked.
    attention = 6 * seq_len * config.n_heads * config.head_dim * config.n_layers
    flops = 3 * (config.flops_per_token(0) + attention / 3) * tokens / plan.mesh.devices
    mfu = flops / speeds(share)[0] / (products + sum(links.values()))
    return Pace(chip, plan.mesh.devices, tokens, products, links, received(share), mfu)
