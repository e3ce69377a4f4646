"""An estimate beside the compiler's answer, line by line: which buffer at the compiler's peak belongs to which line."""

import dataclasses
import re
from collections.abc import Sequence

from llamem.memory import GiB, Report
from llamem.memory.show import Table
from llamem.memory.timeline import Span
from llamem.planner.lines import LINES, Line
from llamem.planner.share import Share

_GAPS = "gaps"  # set aside by the compiler, and filled by nothing at the peak
_HELD = {"weights": "weights", "optimizer": "moments"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the ledger, in bytes: the estimate's, the compiler's, and the largest buffer behind the latter."""

    name: str
    estimated: int
    compiled: int
    largest: str


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The estimate's lines beside the compiler's buffers at its own peak. `rows` add up to both peaks.

    The two peaks may be different moments; `estimated_at` and `compiled_at` say when.
    """

    rows: tuple[Row, ...]
    estimated_at: str
    compiled_at: str

    @property
    def estimated_bytes(self) -> int:
        """The estimate's peak."""
        return sum(row.estimated for row in self.rows)

    @property
    def compiled_bytes(self) -> int:
        """The compiler's peak."""
        return sum(row.compiled for row in self.rows)

    @property
    def error(self) -> float:
        """By what share of the compiler's peak the estimate is too high; below 0 where it is too low."""
        return self.estimated_bytes / self.compiled_bytes - 1

    _HEAD = ("line", "estimated GiB", "compiled GiB", "largest buffer there")

    def _cells(self) -> list[tuple[str, str, str, str]]:
        rows = [(r.name, f"{r.estimated / GiB:.2f}", f"{r.compiled / GiB:.2f}", r.largest) for r in self.rows]
        total = f"{self.estimated_bytes / GiB:.2f}", f"{self.compiled_bytes / GiB:.2f}"
        return [*rows, ("peak", *total, f"{100 * self.error:+.1f} %")]

    def __str__(self) -> str:
        cells = [self._HEAD, *self._cells()]
        lines = [f"{a:<15} {b:>13}  {c:>12}  {d}".rstrip() for a, b, c, d in cells]
        return "\n".join([*lines, f"estimated peak: {self.estimated_at}; the compiler's: {self.compiled_at}"])

    def _repr_html_(self) -> str:
        return Table(self._HEAD, self._cells())._repr_html_()


def beside(share: Share, lines: Sequence[Line], peak_at: str, report: Report) -> Ledger:
    """The ledger of an estimate's lines at its peak and of a report. Raises ValueError for one without a timeline."""
    timeline = report.timeline
    if timeline is None:
        raise ValueError(f"the report has no timeline to take apart: {report.no_timeline}")
    estimated = {name: sum(line.bytes for line in lines if line.name == name) for name in LINES}
    spans: dict[str, list[Span]] = {}
    for span in timeline.at_peak():
        spans.setdefault(line_of(span, share), []).append(span)
    rows = []
    for name in LINES:
        found = spans.get(name, [])
        arrays = [span for span in found if not span.shape.startswith("(") and span.name != "argument"]
        largest = max(arrays, key=lambda span: span.bytes, default=None)
        compiled = sum(span.bytes for span in found)
        if name == _GAPS:
            compiled = report.peak_bytes - timeline.peak_bytes
        if compiled or estimated[name]:
            what = "" if largest is None else f"{largest.shape} {largest.source}".strip()
            rows.append(Row(name, estimated[name], compiled, what))
    return Ledger(tuple(rows), peak_at, timeline.pass_at(timeline.peak_step) or "the only pass")


def line_of(span: Span, share: Share) -> str:
    """The line that a buffer belongs to, told from its category and its sizes."""
    if span.name == "argument":
        return _HELD.get(span.category, "batch")
    sizes = [int(size) for size in re.findall(r"\d+", span.shape.partition("[")[2])]
    heads = {share.h, share.lanes}
    of_tables = share.V in sizes and (share.D in sizes or share.D // share.split in sizes)
    if of_tables and share.loss_rows not in sizes:
        return "head gradient"
    if span.category == "logits" or share.V in sizes or {share.loss_rows, share.loss_columns} <= set(sizes):
        return "loss tiles"
    stacked = len(sizes) > 2 and sizes[0] in (share.L, share.groups, share.L // share.groups)
    if stacked and span.category == "gradients":
        return "gradients"
    without_tokens = share.N not in sizes and share.T not in sizes
    if stacked and span.category == "residuals" and span.operation.startswith("args"):
        return "layer weights"  # the weights in the type of the products
    if span.category == "residuals" and stacked:
        return "residuals"
    if stacked and without_tokens:
        return "gradients"
    if without_tokens and share.D in sizes and (share.F in sizes or heads & set(sizes)):
        return "layer weights"
    if share.F in sizes:
        return "feed-forward"
    if heads & set(sizes) or "attention" in span.source:
        return "attention"
    return "stream"
