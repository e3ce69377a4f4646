"""What a compiler said of one program on one chip, and several such answers side by side: as text and as HTML."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from jaxmem.chips import Chip
from jaxmem.printing import Shown, Table, size_text
from jaxmem.timeline import Timeline

GiB = 2**30
Depth = Literal["memory", "code"]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array that the compiled program writes to the device's memory: `bf16[16,8192]`, the operation of JAX's that it
    is the result of, and the line that asked for it, `model.py:12` or "".

    `at_once`: how many of this shape and operation lie in memory at the same time, at most; None where the compiler
    wrote down no schedule, or the array is written where another lies.
    """

    shape: str
    bytes: int
    operation: str
    source: str
    at_once: int | None = None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of messages between chips: "all-gather", how many, and the bytes of all their results on one chip."""

    operation: str
    times: int
    bytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Shown):
    """One program on one chip, in bytes per device.

    `peak_bytes` is what must fit on the device: arguments + outputs - aliases + temporaries + constants, as the
    compiler lays them out; what lies in the host's memory is in `host_bytes` alone. `constant_bytes` are arrays that
    the program closes over, with a warning where they are large. `temp_bytes` alone can mislead: a compiler keeps
    temporaries inside outputs that are not yet written. `matmul_flops` counts the matrix products and convolutions of
    the traced program, loops multiplied out, without those inside of kernels of Pallas or cuDNN, which are called
    `kernels` times; `compiled_matmul_flops` those that the compiler left in its own, per device, or None where that
    cannot be told. `collectives` say what chips send to each other, with a warning where that cannot be counted;
    `buffers` are the largest arrays.

    `compile_seconds` went by until the answer was there; `depth` says how far the compiler went: "memory" until every
    buffer had its place, "code" to the end. `compiler` says whose word it is: "jax 0.10.1, libtpu 0.0.51, own folder",
    or of which day a stored answer is. A program that the compiler refuses as too big has `fits=False` and, in
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
    constant_bytes: int = 0
    kernels: int = 0
    collectives: tuple[Collective, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    warnings: tuple[str, ...] = ()
    depth: Depth = "code"
    compiler: str = ""
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
        """The peak, taken apart: arguments, outputs in memory of their own, and the rest: temporaries and constants."""
        outputs = min(self.output_bytes - self.alias_bytes, self.peak_bytes - self.argument_bytes)
        rest = self.peak_bytes - self.argument_bytes - outputs
        return {"arguments": self.argument_bytes, "outputs": outputs, "temporaries": rest}

    def parts_shown(self) -> Iterable[str | Table]:
        """Return the verdict, the parts of the peak, messages between chips, the largest arrays, and the notes."""
        of = f" of {size_text(self.capacity_bytes)}" if self.capacity_bytes else ""
        yield f"{self.chip.name}: {'fits' if self.fits else 'DOES NOT FIT'}, peak {size_text(self.peak_bytes)}{of}"
        parts = self.parts | {"on the host": self.host_bytes}
        yield Table(("part", "size"), [(name, size_text(size)) for name, size in parts.items()])
        kernels = f", without those in {self.kernels} calls of kernels (Pallas, cuDNN)" if self.kernels else ""
        yield f"matrix products: {self.matmul_flops / 1e12:.2f} TFLOP{kernels}"
        if self.collectives:
            sent = [(row.operation, row.times, size_text(row.bytes)) for row in self.collectives]
            yield Table(("sent between chips", "times", "bytes"), sent)
        if self.buffers:
            arrays = [
                (row.shape, size_text(row.bytes), row.at_once or "", row.operation, row.source)
                for row in self.buffers[:8]
            ]
            yield Table(("largest arrays", "size", "at once", "operation", "line"), arrays)
        yield from (f"note: {warning}" for warning in self.warnings)
        yield f"compiler: {self.compiler}"

    def _repr_html_(self) -> str:
        return _bar(self) + super()._repr_html_()


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Several reports by name, printed as one table: peak and its parts, host memory, products as traced and left."""

    reports: Mapping[str, Report]

    def parts_shown(self) -> Iterable[str | Table]:
        """Return one table with a row for each report."""
        rows = []
        for name, report in self.reports.items():
            sizes = (report.peak_bytes, *report.parts.values(), report.host_bytes)
            left = report.compiled_matmul_flops
            kernels = " + kernels" if report.kernels else ""
            flops = (
                f"{report.matmul_flops / 1e12:.2f}{kernels}",
                "" if left is None else f"{left / 1e12:.2f}{kernels}",
            )
            cells = (name, report.chip.name, *(f"{size / GiB:.2f}" for size in sizes), *flops)
            rows.append((*cells, "fits" if report.fits else "does not fit"))
        head = ("program", "chip", "peak GiB", "arguments", "outputs", "temporaries", "host", "TFLOP", "compiled", "")
        yield Table(head, rows)


def compare(reports: Mapping[str, Report]) -> Comparison:
    """Show reports by name as one table, in text or in a notebook; `plots.report_bars` draws the same.

    Raises ValueError for anything but a dict of reports, and for an empty one.
    """
    named = isinstance(reports, Mapping) and all(isinstance(report, Report) for report in reports.values())
    if not named or not reports:
        raise ValueError(
            f"compare of a {type(reports).__name__}: expected at least one report, each by a name of yours: "
            "{'before': compile_report(...), 'after': compile_report(...)}."
        )
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
