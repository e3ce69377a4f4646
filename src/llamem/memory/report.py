"""What a compiler said of one program on one chip, and several such answers side by side: as text and as HTML."""

import dataclasses
import html
from collections.abc import Mapping
from typing import Literal

from llamem.memory.chips import Chip
from llamem.memory.show import html_table
from llamem.memory.timeline import Timeline

GiB = 2**30
Depth = Literal["memory", "code"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array that the compiled program writes to the device's memory: `bf16[16,8192]`, the operation of JAX's that it
    is the result of, and the line that asked for it, `model.py:12` or "".
    """

    shape: str
    bytes: int
    operation: str
    source: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of messages between chips: "all-gather", how many, and the bytes of all their results on one chip."""

    operation: str
    times: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """One program on one chip, in bytes per device.

    `peak_bytes` is what must fit on the device: arguments + outputs - aliases + temporaries, as the compiler lays them
    out; what lies in the host's memory is in `host_bytes` alone. `temp_bytes` alone can mislead: a compiler keeps
    temporaries inside outputs that are not yet written. `matmul_flops` counts the matrix products of the traced
    program, loops multiplied out (Pallas kernels are not seen); `compiled_matmul_flops` those that the compiler left in
    its own, per device, or None where that cannot be told. `collectives` say what chips send to each other, with a
    warning where that cannot be counted; `buffers` are the largest arrays.

    `xla_peak_bytes` is XLA's own `peak_memory_in_bytes`, where its compiler went to the end: what is in use at once, as
    it counts that, and not what must fit.

    `compile_seconds` went by until the answer was there; `depth` says how far the compiler went: "memory" until every
    buffer had its place, "code" to the end. A program that the compiler refuses as too big has `fits=False` and, in
    `peak_bytes`, what it said it needed. `timeline` is memory against the steps of the program; None where what the
    compiler wrote down cannot be read, and `no_timeline` says why.
    """

    chip: Chip
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    host_bytes: int
    matmul_flops: int
    compile_seconds: float
    compiled_matmul_flops: int | None = None
    xla_peak_bytes: int | None = None
    collectives: tuple[Collective, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    warnings: tuple[str, ...] = ()
    depth: Depth = "code"
    refused: bool = False
    timeline: Timeline | None = dataclasses.field(default=None, repr=False)
    no_timeline: str = ""

    @property
    def capacity_bytes(self) -> int | None:
        """What the chip offers a program; None where unknown."""
        return self.chip.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether the program runs within the chip's memory."""
        return not self.refused and (self.capacity_bytes is None or self.peak_bytes <= self.capacity_bytes)

    @property
    def parts(self) -> dict[str, int]:
        """The peak, taken apart: arguments, outputs in memory of their own, and what is left, the temporaries."""
        outputs = min(self.output_bytes - self.alias_bytes, self.peak_bytes - self.argument_bytes)
        rest = self.peak_bytes - self.argument_bytes - outputs
        return {"arguments": self.argument_bytes, "outputs": outputs, "temporaries": rest}

    def __str__(self) -> str:
        of = f" of {self.capacity_bytes / GiB:.2f}" if self.capacity_bytes else ""
        lines = [
            f"{self.chip.name}: {'fits' if self.fits else 'DOES NOT FIT'}, peak {self.peak_bytes / GiB:.2f}{of} GiB"
        ]
        for name in ("argument", "output", "alias", "temp", "host"):
            lines.append(f"  {name:<9}{getattr(self, f'{name}_bytes') / GiB:8.2f} GiB")
        lines.append(f"  matrix products {self.matmul_flops / 1e12:.2f} TFLOP")
        lines += [f"  {row.operation:<18} {row.times:>5} times  {row.bytes / GiB:6.2f} GiB" for row in self.collectives]
        lines += [f"  {row.bytes / GiB:6.2f} GiB  {row.shape}  {row.source}" for row in self.buffers[:5]]
        return "\n".join([*lines, *(f"  note: {warning}" for warning in self.warnings)])

    def _repr_html_(self) -> str:
        capacity = f" of {self.capacity_bytes / GiB:.2f}" if self.capacity_bytes else ""
        verdict = "fits" if self.fits else "does not fit"
        title = f"<b>{html.escape(self.chip.name)}: {verdict}</b>, peak {self.peak_bytes / GiB:.2f}{capacity} GiB"
        parts = [(name, f"{size / GiB:.2f}") for name, size in (self.parts | {"on the host": self.host_bytes}).items()]
        tables = [html_table(("part", "GiB"), parts)]
        if self.collectives:
            rows = [(row.operation, row.times, f"{row.bytes / GiB:.2f}") for row in self.collectives]
            tables.append(html_table(("sent between chips", "times", "GiB"), rows))
        rows = [(f"{row.bytes / GiB:.2f}", row.shape, row.operation, row.source) for row in self.buffers[:8]]
        tables.append(html_table(("GiB", "largest arrays", "operation", "line"), rows))
        notes = "".join(f"<p>Note: {html.escape(warning)}</p>" for warning in self.warnings)
        return f"<p>{title}</p>{_bar(self)}{''.join(tables)}{notes}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Several reports by name, printed as one table: peak and its parts, host memory, products as traced and left."""

    reports: Mapping[str, Report]

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for name, report in self.reports.items():
            sizes = (report.peak_bytes, *report.parts.values(), report.host_bytes)
            left = report.compiled_matmul_flops
            flops = (f"{report.matmul_flops / 1e12:.2f}", "" if left is None else f"{left / 1e12:.2f}")
            cells = (name, report.chip.name, *(f"{size / GiB:.2f}" for size in sizes), *flops)
            rows.append((*cells, "fits" if report.fits else "does not fit"))
        return rows

    _HEAD = ("program", "chip", "peak GiB", "arguments", "outputs", "temporaries", "host", "TFLOP", "compiled", "")

    def __str__(self) -> str:
        rows = [self._HEAD, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            words = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True))
            numbers = "  ".join(cell.rjust(width) for cell, width in zip(row[2:-1], widths[2:-1], strict=True))
            lines.append(f"{words}  {numbers}  {row[-1]}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_table(self._HEAD, self._rows())


def compare(reports: Mapping[str, Report]) -> Comparison:
    """Reports by name as one table, for print and for a notebook's last line; `plots.report_bars` draws the same."""
    if not reports:
        raise ValueError("compare({}): give at least one report, as {'name': compile_report(...)}.")
    return Comparison(dict(reports))


def _bar(report: Report) -> str:
    whole = max(report.peak_bytes, report.capacity_bytes or 0) or 1
    shades = dict(zip(report.parts, ("#3f90da", "#ffa90e", "#bd1f01"), strict=True))  # of petroff10
    spans = "".join(
        f'<div title="{name}" style="width:{100 * size / whole:.2f}%;background:{shades[name]}"></div>'
        for name, size in report.parts.items()
    )
    frame = "display:flex;height:1em;width:32em;max-width:100%;border:1px solid gray"
    return f'<div role="img" aria-label="the parts of the peak" style="{frame}">{spans}</div>'
