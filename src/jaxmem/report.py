"""What a compiler said of one program on one chip, and several such answers side by side: as text and as HTML."""

import dataclasses
import functools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxmem.chips.chip import Chip, Gpu
from jaxmem.common.checks import few
from jaxmem.common.printing import Shown, Table, size_text
from jaxmem.reading.cost import Cost
from jaxmem.reading.hlo import Buffer, Collective
from jaxmem.reading.timeline import Loop, Span, Timeline

GiB = 2**30
Depth = Literal["memory", "code"]
_SMALL = 2**20  # bytes of which nothing is said
SCHEMA = 1  # of `Report.to_json`; a reader refuses another one
_FROM_FIELDS = ("fits", "parts", "capacity_bytes")  # written for other readers, computed again when read back


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

    `costs` are what operations take by the estimate of a TPU's compiler, which it makes for whoever asks to the end,
    with `depth="code"`; `untimed` is what it has none for (kernels of Pallas, messages between chips), and how often
    each runs. Compilers for GPUs estimate nothing.
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
    costs: tuple[Cost, ...] = ()
    untimed: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def capacity_bytes(self) -> int | None:
        """What the chip offers a program; None where unknown."""
        return self.chip.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether the program runs within the chip's memory."""
        return not self.refused and (self.capacity_bytes is None or self.peak_bytes <= self.capacity_bytes)

    @property
    def seconds(self) -> float | None:
        """The compiler's estimate of all that it has one for, one after the other; None without any. No measurement."""
        return sum(cost.seconds for cost in self.costs) if self.costs else None

    @property
    def slowest(self) -> tuple[Cost, ...]:
        """The operations of which the compiler expects that they take longest, the longest first."""
        return tuple(sorted(self.costs, key=lambda cost: -cost.seconds)[:12])

    @property
    def parts(self) -> dict[str, int]:
        """The peak, taken apart: arguments, outputs in memory of their own, and the rest: temporaries and constants."""
        outputs = min(self.output_bytes - self.alias_bytes, self.peak_bytes - self.argument_bytes)
        rest = self.peak_bytes - self.argument_bytes - outputs
        return {"arguments": self.argument_bytes, "outputs": outputs, "temporaries": rest}

    @functools.cached_property
    def advice(self) -> Any:
        """What to do about the peak: at most five remedies (`jaxmem.advice.Remedy`), the largest saving first.

        Those that need nobody's help are compiled when this is read first, seconds each; others are estimates. Raises
        ValueError for a report that was read from a file, or unpickled: its program is gone.
        """
        if self._advise is None:
            raise ValueError(
                "this report was read from a file, and advice needs its program: ask compile_report again, and keep "
                "what report.advice says beside the report."
            )
        return self._advise()

    _advise = None  # what makes the advice; `compile_report` sets it

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_advise"}

    def to_json(self) -> str:
        """Return the report as JSON: `schema`, every field by its name (bytes, FLOPs, seconds), the timeline with its
        arrays as rows, and what is computed of them: `fits`, `parts`, `capacity_bytes`.
        """
        return json.dumps(self.plain())

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """Return the report that `to_json` wrote, equal in every field. Raises ValueError for any other text."""
        return cls.from_plain(json.loads(text))

    def plain(self) -> dict[str, Any]:
        """Return what `to_json` writes, as a dict."""
        fields = dataclasses.asdict(dataclasses.replace(self, timeline=None))
        if timeline := self.timeline:
            fields["timeline"] = {field.name: getattr(timeline, field.name) for field in dataclasses.fields(timeline)}
            for name in ("buffers", "loops"):
                fields["timeline"][name] = [dataclasses.astuple(row) for row in getattr(timeline, name)]
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in _FROM_FIELDS}, **fields}

    @classmethod
    def from_plain(cls, plain: Any) -> "Report":
        """Return the report of a dict that `plain` made. Raises ValueError for anything else."""
        if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
            found = plain.get("schema") if isinstance(plain, dict) else type(plain).__name__
            raise ValueError(
                f"a report of schema {found!r}: expected {SCHEMA}, which this version of jaxmem writes. Make it again: "
                "`python -m jaxmem report ... --json FILE`."
            )
        fields = {name: value for name, value in plain.items() if name not in ("schema", *_FROM_FIELDS)}
        try:
            chip = dict(fields["chip"])
            if gpu := chip["gpu"]:
                chip["gpu"] = Gpu(**gpu | {"compute_capability": tuple(gpu["compute_capability"])})
            fields["chip"] = Chip(**chip)
            fields["collectives"] = tuple(Collective(**row) for row in fields["collectives"])
            fields["buffers"] = tuple(Buffer(**row) for row in fields["buffers"])
            fields["costs"] = tuple(Cost(**row) for row in fields["costs"])
            fields["warnings"] = tuple(fields["warnings"])
            if timeline := fields["timeline"]:
                rows = {"buffers": Span, "loops": Loop}
                read: dict[str, Any] = {
                    name: tuple(kind(*row) for row in timeline[name]) for name, kind in rows.items()
                }
                read["passes"] = tuple(map(tuple, timeline["passes"]))
                fields["timeline"] = Timeline(
                    **timeline | read | {name: tuple(timeline[name]) for name in ("operations", "seconds")}
                )
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no report of schema {SCHEMA}: {error!r}. Make it again.") from None

    def parts_shown(self) -> Iterable[str | Table]:
        """Return the verdict, the parts of the peak, messages between chips, the largest arrays, and the notes."""
        of = f" of {size_text(self.capacity_bytes)}" if self.capacity_bytes else ""
        yield f"{self.chip.name}: {'fits' if self.fits else 'DOES NOT FIT'}, peak {size_text(self.peak_bytes)}{of}"
        parts = self.parts | {"on the host": self.host_bytes}
        yield Table(("part", "size"), [(name, size_text(size)) for name, size in parts.items()])
        kernels = f", without those in {self.kernels} calls of kernels (Pallas, cuDNN)" if self.kernels else ""
        yield f"matrix products: {self.matmul_flops / 1e12:.2f} TFLOP{kernels}"
        if self.collectives:
            sent = [
                (row.operation, row.times, size_text(row.bytes), size_text(row.arriving) if row.arriving else "")
                for row in self.collectives
            ]
            yield Table(("sent between chips", "times", "results on a chip", "arriving there"), sent)
        if self.buffers:
            arrays = [
                (row.shape, size_text(row.bytes), row.at_once or "", row.operation, row.source)
                for row in self.buffers[:8]
            ]
            yield Table(("largest arrays", "size", "at once", "operation", "line"), arrays)
        if self.seconds is not None:
            without = f", without {few([f'{name} ({times})' for name, times in self.untimed.items()])}"
            yield f"{self.seconds:.4g} s by the compiler's estimate{without if self.untimed else ''}"
            slowest = [(f"{1000 * row.seconds:.2f}", row.times, row.operation, row.source) for row in self.slowest[:8]]
            yield Table(("ms, estimated", "times", "operation", "line"), slowest)
        yield from (f"note: {warning}" for warning in self.warnings)
        yield f"compiler: {self.compiler}"

    def _repr_html_(self) -> str:
        return _bar(self) + super()._repr_html_()


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Several reports by name, printed as one table: peak and its parts, host memory, products as traced and left.

    Where all are of one chip, a column says how each peak differs from the first.
    """

    reports: Mapping[str, Report]

    @property
    def changes(self) -> Table:
        """Which arrays came to the peak and which went, from the first report to the last, largest change first.

        By category and shape, as the timelines have them at their peaks: equal arrays are one row, and an array that
        is made at another line is no change. Empty where one of the two reports has no timeline.
        """
        reports = list(self.reports.values())
        return changed_arrays(arrays_at_peak(reports[0]), arrays_at_peak(reports[-1]))

    def parts_shown(self) -> Iterable[str | Table]:
        """Return one table with a row for each report."""
        rows = []
        first, *others = self.reports.values()
        one_chip = bool(others) and all(other.chip.name == first.chip.name for other in others)
        for name, report in self.reports.items():
            sizes = (report.peak_bytes, *report.parts.values(), report.host_bytes)
            left = report.compiled_matmul_flops
            kernels = " + kernels" if report.kernels else ""
            flops = (
                f"{report.matmul_flops / 1e12:.2f}{kernels}",
                "" if left is None else f"{left / 1e12:.2f}{kernels}",
            )
            cells = (name, report.chip.name, *(f"{size / GiB:.2f}" for size in sizes), *flops)
            change = [f"{100 * growth(first.peak_bytes, report.peak_bytes):+.1f} %" if rows else ""] if one_chip else []
            rows.append((*cells, *change, "fits" if report.fits else "does not fit"))
        head = ("program", "chip", "peak GiB", "arguments", "outputs", "temporaries", "host", "TFLOP", "compiled")
        yield Table((*head, *(["change"] if one_chip else []), ""), rows)


def growth(before: int, after: int) -> float:
    """Return by which part a peak of so many bytes grew: 0.036 for 3.6 %, negative where it fell."""
    return after / max(before, 1) - 1


class Alike(NamedTuple):
    """Arrays of one category and shape at a peak: how many, their bytes, what makes the last of them, and where."""

    category: str
    shape: str
    times: int
    bytes: int
    operation: str
    source: str


def arrays_at_peak(report: Report) -> list[Alike]:
    """Return what lies at a report's peak, by category and shape; nothing where it has no timeline."""
    rows: dict[tuple[str, str], Alike] = {}
    for span in report.timeline.at_peak() if report.timeline else ():
        kind = span.category, span.shape
        had = rows.get(kind, Alike(*kind, 0, 0, "", ""))
        rows[kind] = Alike(*kind, had.times + (span.bytes > 0), had.bytes + span.bytes, span.operation, span.source)
    return list(rows.values())


def changed_arrays(before: Sequence[Alike], after: Sequence[Alike], most: int = 12) -> Table:
    """Return the table of `Comparison.changes`: the `most` largest changes, of a MiB or more."""
    rows: dict[tuple[str, str], list[Alike]] = defaultdict(list)
    size: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for sign, alike in ((-1, before), (1, after)) if before and after else ():
        for row in alike:
            kind = row.category, row.shape
            rows[kind].append(row)
            size[kind] += sign * row.bytes
            times[kind] += sign * row.times
    changed = sorted((kind for kind in size if abs(size[kind]) > 2**20), key=lambda kind: -abs(size[kind]))[:most]
    cells = []
    for kind in changed:
        category, shape = kind
        count, last = abs(times[kind]), rows[kind][-1]
        shown = f"{'+' if size[kind] > 0 else '-'}{size_text(abs(size[kind]))}"
        cells.append((shown, category, f"{count} x {shape}" if count > 1 else shape, last.operation, last.source))
    return Table(("change", "what", "shape", "operation", "line"), cells)


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
