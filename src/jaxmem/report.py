"""What a compiler said of one program on one chip, and several such answers side by side: as text and as HTML.

A report warns where its numbers stop, and of programs that are probably not what was meant.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jaxmem.chips.chip import Chip, Gpu
from jaxmem.common.printing import Shown, Table, size_text
from jaxmem.reading.hlo import Buffer, Collective
from jaxmem.reading.provenance import Provenance
from jaxmem.reading.timeline import Loop, Span, Timeline
from jaxmem.tracing.arguments import Leaf, shard_bytes
from jaxmem.tracing.flops import Products
from jaxmem.tracing.jaxprs import (
    Scan,
    constants_in,
    control_flow,
    donates_itself,
    equations,
    inner_jaxprs,
    inputs_used,
    moved_to_host,
)

GiB = 2**30
Depth = Literal["memory", "code"]
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
            fields["warnings"] = tuple(fields["warnings"])
            if timeline := fields["timeline"]:
                rows = {"buffers": Span, "loops": Loop}
                read: dict[str, Any] = {
                    name: tuple(kind(*row) for row in timeline[name]) for name, kind in rows.items()
                }
                read["passes"] = tuple(map(tuple, timeline["passes"]))
                fields["timeline"] = Timeline(**timeline | read | {"operations": tuple(timeline["operations"])})
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
        return changed_arrays(reports[0], reports[-1])

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
            change = [f"{100 * peak_growth(first, report):+.1f} %" if rows else ""] if one_chip else []
            rows.append((*cells, *change, "fits" if report.fits else "does not fit"))
        head = ("program", "chip", "peak GiB", "arguments", "outputs", "temporaries", "host", "TFLOP", "compiled")
        yield Table((*head, *(["change"] if one_chip else []), ""), rows)


def peak_growth(before: Report, after: Report) -> float:
    """Return by which part the peak grew from one report to another: 0.036 for 3.6 %, negative where it fell."""
    return after.peak_bytes / max(before.peak_bytes, 1) - 1


def changed_arrays(before: Report, after: Report, most: int = 12) -> Table:
    """Return the table of `Comparison.changes`: the `most` largest changes."""
    held: Counter[tuple[str, str]] = Counter()
    origin: dict[tuple[str, str], tuple[str, str]] = {}
    if before.timeline and after.timeline:
        for sign, timeline in ((-1, before.timeline), (1, after.timeline)):
            for span in timeline.at_peak():
                held[span.category, span.shape] += sign * span.bytes
                origin[span.category, span.shape] = span.operation, span.source
    changed = sorted((row for row in held.items() if abs(row[1]) > _SMALL), key=lambda row: -abs(row[1]))[:most]
    cells = [(f"{'+' if size > 0 else '-'}{size_text(abs(size))}", *row, *origin[row]) for row, size in changed]
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


_SMALL = 2**20  # bytes of which nothing is said


def program_notes(
    report: Report,
    traced: jex_core.ClosedJaxpr,
    products: Products,
    leaves: Sequence[Leaf],
    provenance: Provenance,
    answer: Mapping[str, Any],
) -> Iterator[str]:
    """Yield the warnings of a report on a traced program, its products, its arguments, and the compiler's answer."""
    chip = report.chip
    yield from _state_notes(traced, leaves)
    if kept := not_donated(leaves, provenance):
        names = " and ".join(f"`{argument_name(leaf)}`" for leaf in {leaf.argument: leaf for leaf in kept}.values())
        yield (
            f"{names}: {size_text(sum(leaf.bytes for leaf in kept))} are not donated, and their new values lie beside "
            f"them. jax.jit(step, donate_argnums={donated_with(leaves, kept)}), and the same for compile_report."
        )
    yield from _sharding_notes(report, traced, leaves)
    yield from _constant_notes(report, traced)
    yield from _sum_notes(traced, leaves)
    if products.loops:
        yield f"{products.loops} of its loops do not say how often they run: matrix products there count once."
    if answer["collectives"] is None:
        yield "what chips send to each other cannot be counted: a loop does not say how often it runs."
    names = {eqn.primitive.name for eqn, _ in equations(traced.jaxpr)}
    if not chip.has_bf16 and _multiplies_bf16(traced):
        yield (
            f"bf16 is not native on {chip.name}: its matrix products run in f32, on f32 copies of their operands, "
            "which count as temporaries, and at a fraction of the speed. Take float16 with a loss scale."
        )
    if chip.platform == "tpu" and report.peak_bytes < 512 * 2**20:
        yield "so small that much of it lives in on-chip memory (VMEM), which temporaries do not count."
    hosted = any(leaf.on_host for leaf in leaves) or moved_to_host(traced.jaxpr)
    if hosted and not report.host_bytes and not report.refused:
        yield (
            "the program moves arrays to the host's memory, and none arrived: the compiler kept them on the device."
            if chip.platform != "cpu"
            else "arrays in the host's memory count as the device's: on a CPU that is the same, and nothing is gained."
        )
    if not names & {"sharding_constraint", "shard_map"} and any(map(_is_cut_by_the_compiler, leaves)):
        yield (
            "its arguments are cut over a mesh and nothing inside is: how the work is shared, the compiler decides. A "
            "model that says so itself may do it only inside its contexts (jax.set_mesh, flax's axis_rules): the "
            "program is traced by this call, so open them around it."
        )
    if chip.capacity_bytes and 0.85 * chip.capacity_bytes < report.peak_bytes <= chip.capacity_bytes:
        yield "close to the limit, where the compiler rematerialises on its own: judge your remat on a roomier chip."
    if asked := answer.get("asked"):
        yield (
            f"the program asks which device it runs on, {asked[0]}, and hears of this machine's: where it chooses by "
            f"that, this is not its program for {chip.name}. Let it ask jaxmem.compiling_for()."
        )
    if (inside := answer.get("kernel_array_bytes", 0)) > _SMALL:
        yield (
            "this CPU's compiler put products and what follows them into kernels of its own, and what those need while "
            f"they run is not in these numbers: an array of {size_text(inside)} is made or held inside of one."
        )
    if "products_by_library" in answer:
        yield (
            "compiled with all matrix products by cuBLAS: this compiler finds no tiles for one of them where no GPU is "
            "there to try them on. On the GPU itself the compiler chooses for each, so that memory may differ a little."
        )


def argument_name(leaf: Leaf) -> str:
    """Return what the whole argument is called that an array belongs to."""
    return leaf.name.partition("[")[0].partition(".")[0] or f"argument {leaf.argument}"


def not_donated(leaves: Sequence[Leaf], provenance: Provenance) -> list[Leaf]:
    """Return the arrays that a training step returns new values of and does not donate; none where they are small."""
    kept = [leaves[i] for i in sorted(provenance.replaced) if not leaves[i].donated and not leaves[i].on_host]
    return kept if sum(leaf.bytes for leaf in kept) > _SMALL else []


def donated_with(leaves: Sequence[Leaf], more: Sequence[Leaf]) -> tuple[int, ...]:
    """Return `donate_argnums` with the arguments of more arrays."""
    return tuple(sorted({leaf.argument for leaf in leaves if leaf.donated} | {leaf.argument for leaf in more}))


def whole_beside_cut(leaves: Sequence[Leaf]) -> dict[int, jax.sharding.NamedSharding]:
    """Return by number which arrays lie whole on each chip, though others of their shape are cut, and how these are."""
    cut = {leaf.shape.shape: leaf.shape.sharding for leaf in leaves if leaf.bytes < shard_bytes(_unsharded(leaf))}
    return {
        i: cut[leaf.shape.shape]
        for i, leaf in enumerate(leaves)
        if leaf.shape.shape in cut and leaf.bytes == shard_bytes(_unsharded(leaf)) and not leaf.on_host
    }


def _unsharded(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape.shape, leaf.shape.dtype)


def _sharding_notes(report: Report, traced: jex_core.ClosedJaxpr, leaves: Sequence[Leaf]) -> Iterator[str]:
    """Yield arrays that lie whole where their like are cut, and donated ones whose results lie in another way."""
    whole = whole_beside_cut(leaves)
    for argument in dict.fromkeys(leaves[i].argument for i in whole):
        own = [i for i in whole if leaves[i].argument == argument]
        name, size = argument_name(leaves[own[0]]), sum(leaves[i].bytes for i in own)
        if size > _SMALL:
            yield (
                f"`{name}` lies whole on each chip ({size_text(size)} in {len(own)} arrays), and arrays of the same "
                "shapes are cut over the mesh: jax.eval_shape keeps no shardings. Give it theirs, of optax's moments "
                "optax.tree_map_params(optimizer, lambda m, w: jax.ShapeDtypeStruct(m.shape, m.dtype, "
                f"sharding=w.sharding), {name}, weights)."
            )
    results = {(out.shape, out.dtype) for out in traced.out_avals}
    donated = [leaf for leaf in leaves if leaf.donated and (leaf.shape.shape, leaf.shape.dtype) in results]
    lost = sum(leaf.bytes for leaf in donated if not leaf.on_host) - report.alias_bytes
    if report.chip.devices > 1 and lost > _SMALL and not report.refused:
        yield (
            f"{size_text(lost)} of what is donated are not used again: results of the same shapes lie over the chips "
            "in another way than their arguments. Give both one sharding, by jax.lax.with_sharding_constraint."
        )


def _is_cut_by_the_compiler(leaf: Leaf) -> bool:
    """Return whether an argument is cut over devices of a mesh on which the compiler decides how to go on."""
    sharding = leaf.shape.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.is_fully_replicated:
        return False
    return jax.sharding.AxisType.Auto in sharding.mesh.axis_types


def _multiplies_bf16(traced: jex_core.ClosedJaxpr) -> bool:
    products = (eqn for eqn, _ in equations(traced.jaxpr) if eqn.primitive.name == "dot_general")
    return any(str(var.aval.dtype) == "bfloat16" for eqn in products for var in eqn.invars)  # pyrefly: ignore


def _state_notes(traced: jex_core.ClosedJaxpr, leaves: Sequence[Leaf]) -> Iterator[str]:
    """Yield a donation of which the report was not told, a state that is donated and not given back, and arguments
    without which every result is the same.
    """
    results = {(out.shape, out.dtype) for out in traced.out_avals}
    arguments = dict.fromkeys(leaf.argument for leaf in leaves)
    used = inputs_used(traced) if leaves else []
    if donates_itself(traced.jaxpr) and not any(leaf.donated for leaf in leaves):
        yield (
            "the function donates arguments, as jax.jit(donate_argnums=) has it, and inside of another program that "
            "means nothing: they count as kept. Tell the report, compile_report(..., donate_argnums=(0,))."
        )
    for argument in arguments:
        own = [i for i, leaf in enumerate(leaves) if leaf.argument == argument]
        name = argument_name(leaves[own[0]])
        donated = sum(leaves[i].bytes for i in own if leaves[i].donated)
        returned = any((leaves[i].shape.shape, leaves[i].shape.dtype) in results for i in own)
        if donated > _SMALL and not returned:
            yield (
                f"`{name}` is donated ({size_text(donated)}), and nothing of it is given back: no result has the shape "
                "and type of one of its arrays. A step that changes its state has to return it."
            )
        idle = sum(leaves[i].bytes for i in own if not used[i])
        if idle > _SMALL:
            yield (
                f"{size_text(idle)} of `{name}` reach no result: the compiler leaves out what is computed with them. "
                "A step that updates an optimizer's state and weights has to return both."
            )


def _sum_notes(traced: jex_core.ClosedJaxpr, leaves: Sequence[Leaf]) -> Iterator[str]:
    """Yield a loop that adds up arrays like those of an argument, as gradient accumulation does."""
    given = [leaf.shape for leaf in leaves if jnp.issubdtype(leaf.shape.dtype, jnp.floating)]
    shapes = [shape.sharding.shard_shape(shape.shape) if shape.sharding else shape.shape for shape in given]
    for sums in _sums_of_loops(traced.jaxpr):
        alike = [aval for aval in sums if aval.shape in shapes]
        # Not the gradients of a few arrays, such as a tiled loss adds up: of weights beside two moments it is a third.
        if len(alike) > 1 and sum(a.size for a in alike) > sum(map(math.prod, shapes)) / 4:
            size = size_text(sum(map(shard_bytes, alike)))
            yield (
                f"a loop adds up {size} in {alike[0].dtype.name}, as gradient accumulation does. They lie beside the "
                "gradients of a part from the first part to the last, so that 2 parts can need more memory than 1."
            )
            return


def _sums_of_loops(jaxpr: jex_core.Jaxpr) -> Iterator[list[Any]]:
    """Yield for each scan the types of what it carries from zeros on."""
    makers = {id(var): eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def is_zeros(var: Any) -> bool:
        made = makers.get(id(var))
        return made is not None and all(isinstance(x, jex_core.Literal) and np.all(x.val == 0) for x in made.invars)

    for eqn in jaxpr.eqns:
        if isinstance(flow := control_flow(eqn), Scan):
            carried = eqn.invars[flow.n_consts : flow.n_consts + flow.n_carry]
            yield [var.aval for var in carried if is_zeros(var)]
        for inner in inner_jaxprs(eqn):
            yield from _sums_of_loops(inner)


def _constant_notes(report: Report, traced: jex_core.ClosedJaxpr) -> Iterator[str]:
    if report.constant_bytes <= _SMALL:
        return
    closed = sorted(constants_in(traced), key=lambda row: -shard_bytes(row[0]))[:3]
    named = [f"{const.dtype}{list(const.shape)}{f' in {line}' if line else ''}" for const, line in closed]
    yield (
        f"{size_text(report.constant_bytes)} are constants: arrays that are closed over, not passed"
        f"{' (' + ', '.join(named) + ')' if named else ''}. They count as temporaries. Pass them as arguments."
    )
