"""What a step will need and how long it will take, in closed form: bytes line by line, seconds part by part.

Bytes are three sums and a margin (`llamem.planner.memory_sums`). Seconds are a roofline with assumed efficiencies
(`llamem.planner.roofline`): they rank plans and are no measurement.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from jaxmem.chip_names import chip_called
from jaxmem.chips import Chip
from jaxmem.printing import Shown, Table
from jaxmem.report import GiB, Report
from llamem.adapters.lora import LoraConfig
from llamem.llama.config import LlamaConfig
from llamem.llama.plan import Plan
from llamem.planner.memory_sums import Line, on_host, three_sums
from llamem.planner.roofline import Seconds, seconds_of
from llamem.planner.sizes import Question, Sizes
from llamem.quantized.blocks import BlockKind
from llamem.runs.steps import check_update
from llamem.train.settings import Clip, TrainSettings


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

    def compile(self) -> Report:
        """Return what the chip's own compiler says of this step. See `jaxmem.compile_report`."""
        return self.question.compile(self.plan)

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
    found = estimate_plan(question, plan)
    if lora is None:
        check_update(plan, TrainSettings(clip=clip), config.param_dtype)
    return found


def estimate_plan(question: Question, plan: Plan) -> Estimate:
    """Return the estimate of a plan for a question. Raises ValueError for a plan that the step would refuse."""
    sizes = Sizes(question, plan)
    moments, (held, moved) = three_sums(sizes), on_host(sizes)
    peak, at = max((sum(line.bytes for line in lines), name) for name, lines in moments.items())
    return Estimate(question, plan, moments, held, moved, seconds_of(sizes, moved), at, moments[at], peak)
