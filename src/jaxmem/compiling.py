"""The truth about memory: what a program needs on a chip, as that chip's own compiler says."""

import contextlib
import dataclasses
import tempfile
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import jaxlib
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import core as jex_core

from jaxmem import answers
from jaxmem.advice import Study, scans_checkpointed, with_advice
from jaxmem.chips.chip import GLOBALS, Chip, questions_heard
from jaxmem.chips.compiler_process import analysed_bytes
from jaxmem.chips.compilers import find_compilers, no_compilers
from jaxmem.chips.names import find_chip
from jaxmem.common.checks import few, show
from jaxmem.cross_compile import Request, compile_absent, export_for, traced_for
from jaxmem.notes import program_notes
from jaxmem.reading.cost import Cost
from jaxmem.reading.dump import needed_bytes, read_dump, remedy
from jaxmem.reading.hlo import Buffer, Collective, describe, of_layers_once, optimised_text, parse
from jaxmem.reading.provenance import Provenance, find_provenance
from jaxmem.reading.stablehlo import read_lowered
from jaxmem.reading.timeline import Timeline
from jaxmem.report import Depth, Report
from jaxmem.tracing.arguments import Leaf, is_key, mesh_of, on_host, read_leaves, shard_bytes, with_arrays_alone
from jaxmem.tracing.flops import count_products, matmul_flops
from jaxmem.tracing.jaxprs import callbacks_in, kernel_texts, moved_to_host

__all__ = ["compile_report", "matmul_flops", "moved_to_host"]


def compile_report(
    fn: Callable[..., Any],
    *args: Any,
    chip: str = "local",
    donate_argnums: tuple[int, ...] = (),
    depth: Depth = "memory",
    cache: bool = True,
) -> Report:
    """Compile `fn(*args)` for a chip, here or absent, and report its memory. Nothing is computed.

    `args`: pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and types matter, and for several chips shardings
    over `jaxmem.find_chip(name).mesh(...)`; what has none lies on every chip whole. A flax nnx module or optimizer
    among them is its state, which is given back as by `nnx.jit` where `fn` changes it in place; of an equinox module
    the arrays are arguments, as in `equinox.filter_jit`. For one chip, arguments whose sharding has the
    `memory_kind="pinned_host"` lie in the host's memory, and so do results that `fn` puts there. `donate_argnums`:
    which of them the program may overwrite, as in `jax.jit(donate_argnums=)`. `chip`: see `jaxmem.find_chip`.

    An absent chip's compiler runs in a child process: the one that `jaxmem.fetch_compilers` fetched, the same for every
    Python and JAX, or else this environment's own, where jaxlib 0.10 or newer and libtpu or the CUDA plugin are
    installed. `report.compiler` says which. Its answers are cached on disk by program, compiler and chip, under
    `$JAXMEM_CACHE` or `~/.cache/llamem`.

    `depth`: how far an absent chip's compiler goes. With "memory" it is ended when it has assigned every buffer, in
    seconds; the report is the same, but a compiler that would fail later, while it makes code, is not found out, and of
    TPU programs of a few MiB it counts up to 3 % more, temporaries that move to on-chip memory in the end. With "code"
    it goes to the end. The local compiler always does.

    Raises what tracing `fn` raises, ValueError and ImportError as `jaxmem.find_chip` does, RuntimeError where a
    compiler dies.
    """
    chosen = find_chip(chip)
    compilers = find_compilers(chosen.platform) if chosen.absent else None
    if depth not in typing.get_args(Depth):
        raise ValueError(f"depth={depth!r}: expected 'memory', as soon as memory is assigned, or 'code', to the end.")
    if not callable(fn):
        raise TypeError(f"compile_report({show(fn)}, ...): expected a function first, then its arguments.")
    fn, args = with_arrays_alone(fn, args)
    leaves = read_leaves(fn, args, donate_argnums, chosen)
    mesh = mesh_of(leaves, chosen)
    donated = tuple(i for i, leaf in enumerate(leaves) if leaf.donated)
    shapes = [leaf.shape for leaf in leaves]
    tree = jax.tree.structure(args)

    def flat(*arrays: Any) -> list[Any]:
        # Compilers know no keys, only the numbers they are made of.
        given = zip(arrays, leaves, strict=True)
        wrapped = [jax.random.wrap_key_data(a, impl=leaf.key) if leaf.key else a for a, leaf in given]
        # The shapes of an absent chip's arguments have no memory, as arrays have: here their types get it.
        hosted = [leaf.on_host and chosen.absent for leaf in leaves]
        wrapped = [jax.device_put(a, jax.memory.Space.Host) if h else a for a, h in zip(wrapped, hosted, strict=True)]
        outputs = jax.tree.leaves(fn(*jax.tree.unflatten(tree, wrapped)))
        return [jax.random.key_data(out) if is_key(getattr(out, "dtype", None)) else out for out in outputs]

    # The one trace serves the compiler, too. What is donated is for the child process to say, where there is one.
    jitted = jax.jit(flat, donate_argnums=() if chosen.absent else donated, keep_unused=True)
    with traced_for(chosen, mesh), questions_heard() as asked:
        jaxpr = _traced(jitted, shapes, leaves)
    question = None
    if chosen.absent:
        _refuse_callbacks(jaxpr.jaxpr, chosen)
        program = export_for(chosen, jitted, shapes, mesh)
        facts: dict[str, Any] = {
            "depth": depth,
            "donated": donated,
            "axes": dict(mesh.shape) if mesh else None,
            "hosted_arguments": tuple(i for i, leaf in enumerate(leaves) if leaf.on_host),
            "hosted_results": tuple(i for i, out in enumerate(jaxpr.out_avals) if on_host(out)),
        }
        lowered = read_lowered(program.mlir_module(), kernel_texts(jaxpr.jaxpr))
        question = answers.question(chosen, lowered, facts, jaxpr, leaves)
        if compilers is None:
            source = answers.source()
            answer = None if source is None else source.answer(question)
            if answer is None:
                raise ImportError(f"{no_compilers(chip, chosen.platform)} No answer to exactly this program is stored.")
        else:
            request = Request(chip=chosen, compilers=compilers, program=bytes(program.serialize()), **facts)
            compiled = partial(compile_absent, request)
            answer = answers.cached(question, compilers, compiled) if cache else compiled()
            answer |= {"compiler": compilers.name}
    else:
        answer, depth = _compiled_here(jitted.lower(*shapes), chosen), "code"
    provenance = find_provenance(jaxpr, leaves)
    report = _report(chosen, depth, answer | {"asked": asked if chosen.absent else []}, jaxpr, leaves, provenance)
    report = _with_timeline(report, answer, leaves, provenance)
    if question and compilers and (source := answers.source()) is not None:
        source.heard(question, answer, report.timeline)
    # Shapes alone: a report keeps no arrays alive.
    ask = partial(_ask_again, fn, jax.tree.map(_as_shape, args), donate_argnums, chip=chip, depth=depth, cache=cache)
    return with_advice(report, partial(Study, leaves=leaves, provenance=provenance, traced=jaxpr, ask=ask))


def _with_timeline(report: Report, answer: dict[str, Any], leaves: Sequence[Leaf], provenance: Provenance) -> Report:
    if "schedule" not in answer:
        return dataclasses.replace(report, no_timeline=answer["no_schedule"])
    chip, names = report.chip, [leaf.name for leaf in leaves]
    timeline = Timeline.from_schedule(
        answer["schedule"], chip.name, chip.capacity_bytes, names, provenance, chip.clock_ghz
    )
    rows = of_layers_once(report.buffers)
    counted = (dataclasses.replace(b, at_once=timeline.at_once(b.shape, b.operation) or None) for b in rows)
    return dataclasses.replace(report, timeline=timeline, buffers=tuple(counted))


def _as_shape(leaf: Any) -> Any:
    """Return the shape of an array in its place; of a Python number, itself."""
    if not hasattr(leaf, "dtype"):
        return leaf
    places = {"sharding": getattr(leaf, "sharding", None), "weak_type": getattr(leaf, "weak_type", False)}
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, **places)


def _ask_again(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    donated: tuple[int, ...],
    *,
    donate_argnums: tuple[int, ...] | None = None,
    shardings: Mapping[int, Any] | None = None,
    checkpointed: bool = False,
    **options: Any,
) -> Report:
    """Report on a program once more: with other donations, arrays placed otherwise, or its scans checkpointed."""
    leaves, tree = jax.tree.flatten(args)
    for i, sharding in (shardings or {}).items():
        leaves[i] = jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype, sharding=sharding)
    with scans_checkpointed() if checkpointed else contextlib.nullcontext():
        again = donated if donate_argnums is None else donate_argnums
        return compile_report(fn, *jax.tree.unflatten(tree, leaves), donate_argnums=again, **options)


def _traced(
    jitted: jax.stages.Wrapped, shapes: Sequence[jax.ShapeDtypeStruct], leaves: Sequence[Leaf]
) -> jex_core.ClosedJaxpr:
    try:
        return jitted.trace(*shapes).jaxpr
    except (RuntimeError, ValueError) as error:
        if words := _of_two_memories(str(error), leaves) or remedy(str(error)):
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"{error}{words}") from error
        raise


def _of_two_memories(error: str, leaves: Sequence[Leaf]) -> str:
    """Return what to do where an operation has operands in both memories, by JAX's message; "" for any other."""
    if "memory_space of all inputs" not in error:
        return ""
    hosted = [f"`{leaf.name}`" for leaf in leaves if leaf.on_host]
    where = f"In the host's memory: {few(hosted)}" if hosted else "The function puts arrays into the host's memory"
    return (
        f" {where}. An operation reads one memory: bring them to the device first, inside of the function, "
        "x = jax.device_put(x, jax.memory.Space.Device)."
    )


def _compiled_here(lowered: jax.stages.Lowered, chip: Chip) -> dict[str, Any]:
    """Return what the local compiler says, as `compile_absent` tells it."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="llamem-") as dump, _no_compilation_cache():
        compiled = lowered.compile(compiler_options={"xla_dump_to": dump, "xla_dump_hlo_as_text": True})
        seconds = {"compile_seconds": time.perf_counter() - start}
        return read_dump(Path(dump), chip.platform) | analysed_bytes(compiled.memory_analysis()) | seconds


def report_compiled(compiled: jax.stages.Compiled, traced: jex_core.ClosedJaxpr) -> Report:
    """Report on a program that was compiled for the devices at hand, `traced` being what was traced of it."""
    answer = analysed_bytes(compiled.memory_analysis()) | describe(parse(optimised_text(compiled)))
    return _report(find_chip("local"), "code", answer | {"compile_seconds": 0.0}, traced, (), Provenance(()))


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Turn JAX's persistent cache off: a program that is found there is not compiled, and nothing is written down.

    For all threads at once, which is how JAX has it: one of them after the other.
    """
    GLOBALS.acquire()
    before = jax.config.jax_enable_compilation_cache  # pyrefly: ignore[missing-attribute]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once per process, or after this
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
        GLOBALS.release()


def _refuse_callbacks(jaxpr: jex_core.Jaxpr, chip: Chip) -> None:
    if calling := callbacks_in(jaxpr):
        raise ValueError(
            f"the program calls back into Python ({', '.join(calling)}), and a program for {chip.name}, which is not "
            "here, has no Python to call: leave out jax.debug.print, jax.debug.callback, jax.pure_callback and "
            "io_callback, or compile for chip='local'."
        )


def _report(
    chip: Chip,
    depth: Depth,
    answer: dict[str, Any],
    jaxpr: jex_core.ClosedJaxpr,
    leaves: Sequence[Leaf],
    provenance: Provenance,
) -> Report:
    products = count_products(jaxpr.jaxpr)
    unless_told: dict[str, Any] = {"constant_bytes": 0, "collectives": [], "buffers": []}
    answer = unless_told | answer
    if said := answer.get("error"):
        peak = needed_bytes(said)
        if peak is None:
            raise RuntimeError(f"the compiler for {chip.name} refused the program: {said[:1500]}{remedy(said)}")
        arguments = sum(leaf.bytes for leaf in leaves if not leaf.on_host)
        outputs = sum(shard_bytes(out) for out in jaxpr.out_avals if not on_host(out))
        alias = sum(leaf.bytes for leaf in leaves if leaf.donated and not leaf.on_host)
        temporaries = max(peak - arguments - outputs + alias, 0)
        sizes = {
            "argument": arguments,
            "output": outputs,
            "alias": alias,
            "temp": temporaries,
            "host": 0,
            "constant": 0,
        }
        answer |= {f"{name}_bytes": size for name, size in sizes.items()}
    else:
        # What the compilers lay out on the device, and what a TPU's holds against the chip's memory when it refuses.
        # XLA's own peak is no such number: it ignores temporaries on a CPU, and counts the host's memory where
        # arguments are.
        held = answer["argument_bytes"] + answer["output_bytes"] - answer["alias_bytes"]
        peak = held + answer["temp_bytes"] + answer["constant_bytes"]
    names = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "host_bytes", "constant_bytes")
    report = Report(
        chip,
        **{name: answer[name] for name in (*names, "compile_seconds")},
        peak_bytes=peak,
        depth=depth,
        compiler=answer.get("compiler", f"jaxlib {jaxlib.__version__}, the device at hand"),
        matmul_flops=products.flops,
        kernels=products.kernels,
        compiled_matmul_flops=answer.get("compiled_matmul_flops"),
        collectives=tuple(Collective(**row) for row in answer["collectives"] or ()),
        buffers=tuple(Buffer(**row) for row in answer["buffers"]),
        refused="error" in answer,
        costs=tuple(
            Cost(row["operation"], row["source"], row["times"], row["cycles"] / chip.clock_ghz / 1e9)
            for row in answer.get("costs", ())
            if chip.clock_ghz
        ),
        untimed=answer.get("untimed", {}),
    )
    return dataclasses.replace(
        report, warnings=tuple(program_notes(report, jaxpr, products, leaves, provenance, answer))
    )
