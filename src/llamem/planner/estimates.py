"""What a step will need and how long it will take, in closed form: bytes line by line, seconds part by part.

Bytes follow from what is alive at the few moments at which a step's memory can peak (`llamem.planner.alive`). Seconds
are a roofline with assumed efficiencies (`llamem.planner.seconds`): they rank plans and are no measurement.
"""

import dataclasses
import html
from collections.abc import Mapping

from llamem.llama import LlamaConfig
from llamem.llama.plan import Plan
from llamem.memory import CHIPS, Chip, GiB, Report
from llamem.memory.chips import known_chip
from llamem.memory.show import Table
from llamem.planner.alive import moments_of
from llamem.planner.host import host_bytes, link_bytes
from llamem.planner.ledger import Ledger, beside
from llamem.planner.lines import Line
from llamem.planner.seconds import Seconds, describe, seconds_of
from llamem.planner.share import share_of
from llamem.train.settings import Clip

__all__ = ["Estimate", "Seconds", "estimate"]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimate of one training step on one chip, or on each of several, in bytes and seconds.

    `moments` are the times at which memory can be fullest, each with its lines; `peak_bytes` is the largest of their
    sums and `lines` those of that moment, named `peak_at`. `host_bytes` lie in the host's memory, `link_bytes` cross
    the link to it in a step, both ways together. `seconds` are a roofline's, by part: an estimate with assumed
    efficiencies, never a measurement.
    """

    config: LlamaConfig
    plan: Plan
    chip: Chip
    seq_len: int
    batch_size: int
    moments: Mapping[str, tuple[Line, ...]]
    host_bytes: int
    link_bytes: int
    seconds: Seconds

    @property
    def peak_at(self) -> str:
        """The moment at which memory is fullest."""
        return max(self.moments, key=lambda name: sum(line.bytes for line in self.moments[name]))

    @property
    def lines(self) -> tuple[Line, ...]:
        """What is alive at the peak."""
        return self.moments[self.peak_at]

    @property
    def peak_bytes(self) -> int:
        """Bytes on the device where memory is fullest."""
        return max(sum(line.bytes for line in lines) for lines in self.moments.values())

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
        return self.batch_size * self.seq_len / self.seconds.total

    def beside(self, report: Report) -> Ledger:
        """The lines beside what the compiler had alive at its own peak, each with the difference.

        Raises ValueError where the report has no timeline, or is of another chip.
        """
        if report.chip.name != self.chip.name:
            raise ValueError(f"an estimate for {self.chip.name} beside a report for {report.chip.name}.")
        share = share_of(self.config, self.plan, self.chip, self.seq_len, self.batch_size)
        return beside(share, self.lines, self.peak_at, report)

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "DOES NOT FIT"
        of = f" of {self.capacity_bytes / GiB:.2f}" if self.capacity_bytes else ""
        lines = [
            f"{self.chip.name}, {self.batch_size} x {self.seq_len:,} tokens, estimated: {verdict}, "
            f"peak {self.peak_bytes / GiB:.2f}{of} GiB ({self.peak_at}), host {self.host_bytes / GiB:.2f} GiB"
        ]
        lines += [f"  {line.bytes / GiB:7.2f} GiB  {line.name:<15}{line.why}" for line in self.lines if line.bytes]
        parts = ", ".join(f"{name} {value:.2f}" for name, value in describe(self.seconds).items() if value >= 0.005)
        return "\n".join([*lines, f"  {self.seconds.total:.2f} s a step by a roofline, not measured: {parts}"])

    def _repr_html_(self) -> str:
        rows = [(line.name, f"{line.bytes / GiB:.2f}", line.why) for line in self.lines if line.bytes]
        rows += [("peak", f"{self.peak_bytes / GiB:.2f}", self.peak_at)]
        rows += [("on the host", f"{self.host_bytes / GiB:.2f}", "")]
        parts = [(name, f"{value:.2f}") for name, value in describe(self.seconds).items()]
        parts.append(("step", f"{self.seconds.total:.2f}"))
        title = html.escape(f"{self.chip.name}, {self.batch_size} x {self.seq_len:,} tokens")
        verdict = "fits" if self.fits else "does not fit"
        return (
            f"<p><b>{title}: {verdict}</b>, by estimate</p>{Table(('line', 'GiB', 'why'), rows)._repr_html_()}"
            f"{Table(('part (roofline, not measured)', 'seconds'), parts)._repr_html_()}"
        )


def chip_called(name: str) -> Chip:
    """A chip of `llamem.CHIPS`, or TPUs by how they are connected, `"v5p:4x4x4"`; no compiler need be installed."""
    chip = known_chip(name)
    if chip is None:
        raise ValueError(f"no chip is called {name!r}. Known: {', '.join(CHIPS)}; and slices, such as 'v5p:4x4x4'.")
    return chip


def estimate(
    config: LlamaConfig,
    plan: Plan = Plan(),
    chip: str = "v5e-1",
    *,
    seq_len: int,
    batch_size: int = 1,
    clip: Clip = "global",
) -> Estimate:
    """What one AdamW step will need on a chip of `llamem.CHIPS` or on a slice, in microseconds, without a compiler.

    The step is that of `llamem.abstract_step`, its state donated, gradients clipped as `llamem.TrainSettings(clip=)`
    says. With several chips the plan's mesh says who holds
    what, and bytes are those of one. Raises ValueError for an unknown chip, for a mixture of experts, of which there is
    no estimate, and for sizes that do not divide; TypeError for what is no config or plan.
    """
    if not isinstance(config, LlamaConfig) or not isinstance(plan, Plan):
        raise TypeError(
            f"estimate({config!r}, {plan!r}): expected a llamem.LlamaConfig, such as "
            "LlamaConfig.from_name('llama3.2-1b'), and a llamem.Plan."
        )
    on = chip_called(chip)
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number of at least 1.")
    share = share_of(config, plan, on, seq_len, batch_size, clip)
    host, moved = host_bytes(share), link_bytes(share)
    return Estimate(config, plan, on, seq_len, batch_size, moments_of(share), host, moved, seconds_of(share, moved))
