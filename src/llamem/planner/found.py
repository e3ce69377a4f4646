"""What a search for a plan comes back with."""

import dataclasses
from collections.abc import Sequence

from llamem.llama import Plan
from llamem.memory import GiB, Report
from llamem.memory.show import Table
from llamem.planner.candidates import frontier, words
from llamem.planner.estimates import Estimate

ALIKE = 1.02  # times within 2 %: of plans as fast as that the plainest is taken


class NothingFits(ValueError):
    """No plan that was tried fits; `closest` is the estimate of the one that needs least."""

    def __init__(self, message: str, closest: Estimate | None):
        super().__init__(message)
        self.closest = closest


@dataclasses.dataclass(frozen=True)
class Found:
    """A plan that the chip's compiler accepts, what it costs, and why it was taken.

    `report` is the compiler's answer, None where it was not asked; `estimate` what had been expected of it.
    `alternatives` are other plans, none of which is beaten in both memory and time, fastest first: by estimate, not
    compiled. `asked` is how many plans the compiler was asked about.
    """

    plan: Plan
    estimate: Estimate
    report: Report | None
    why: str
    alternatives: tuple[Estimate, ...]
    asked: int

    @property
    def seq_len(self) -> int:
        """Tokens of one sequence."""
        return self.estimate.seq_len

    @property
    def batch_size(self) -> int:
        """Sequences of one step, over all chips."""
        return self.estimate.batch_size

    def _rows(self) -> list[tuple[str, str, str, str]]:
        shown = [self.estimate, *(e for e in self.alternatives if e.plan != self.plan)]
        return [
            (
                words(e.plan),
                f"{e.peak_bytes / GiB:.2f}",
                f"{e.host_bytes / GiB:.2f}",
                f"{e.seconds.total:.2f}",
            )
            for e in shown
        ]

    _HEAD = ("plan", "GiB, estimated", "host GiB", "s a step, estimated")

    def __str__(self) -> str:
        rows = [self._HEAD, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            f"  {row[0]:<{widths[0]}}  " + "  ".join(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))
            for row in rows
        ]
        return "\n".join([self.why, "Found first, then what else there is:", *table])

    def _repr_html_(self) -> str:
        return f"<p>{'<br>'.join(self.why.splitlines())}</p>{Table(self._HEAD, self._rows())._repr_html_()}"


def explained(one: Estimate, report: Report | None, tried: Sequence[Estimate], asked: int) -> Found:
    """What was found, in words, and the plans beside it."""
    capacity = one.capacity_bytes or 0
    peak, who = (report.peak_bytes, "compiled") if report else (one.peak_bytes, "estimated, not compiled")
    lines = [
        f"{words(one.plan)}: {peak / GiB:.2f} of {capacity / GiB:.2f} GiB on {one.chip.name} ({who}), "
        f"{one.host_bytes / GiB:.2f} GiB on the host, {one.seconds.total:.2f} s a step (estimated) for "
        f"{one.batch_size} x {one.seq_len:,} tokens."
    ]
    faster = [e for e in tried if e.seconds.total < one.seconds.total / ALIKE]
    if faster:
        least = min(faster, key=lambda e: e.peak_bytes)
        lines.append(
            f"Of {len(tried):,} plans {len(faster)} would be faster by more than 2 %; the smallest of them, "
            f"{words(least.plan)}, needs {least.peak_bytes / GiB:.2f} GiB by estimate."
        )
    else:
        lines.append(f"No plan of {len(tried)} is faster by more than 2 %: memory is no constraint here.")
    if one.link_bytes and one.seconds.host_link > one.seconds.products + one.seconds.attention:
        lines.append(
            f"The link to the host takes {one.seconds.host_link:.2f} of these seconds, more than the arithmetic: more "
            "tokens in a step would share it."
        )
    best = [e for e in frontier(tried) if e.peak_bytes <= capacity * 1.5]
    return Found(one.plan, one, report, "\n".join(lines), tuple(best), asked)
