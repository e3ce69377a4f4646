"""The truth about memory: what a program needs on a chip, as that chip's own compiler says."""

import contextlib
import dataclasses
import inspect
import math
import re
import tempfile
import time
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.export
import jaxlib
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import core as jex_core

from llamem.memory.chips import Chip, find_chip
from llamem.memory.cross_compile import compile_absent, export_for, traced_for
from llamem.memory.dump import analysed_bytes, needed_bytes
from llamem.memory.hlo import optimised_text
from llamem.memory.hlo_counts import describe
from llamem.memory.jaxprs import callbacks_in, matmul_flops, moved_to_host
from llamem.memory.report import Buffer, Collective, Depth, Report
from llamem.memory.report_cache import cached
from llamem.memory.shapes import is_key, key_implementation, on_host, shape_of
from llamem.memory.timeline import Timeline
from llamem.memory.timeline_schedule import schedule_or_reason

__all__ = ["compile_report", "matmul_flops", "moved_to_host"]


def compile_report(
    fn: Callable[..., Any],
    *args: Any,
    chip: str = "local",
    donate_argnums: tuple[int, ...] = (),
    depth: Depth = "memory",
    cache: bool = True,
) -> Report:
    """Compiles `fn(*args)` for a chip, here or absent, and reports its memory. Nothing is computed.

    `args`: pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and types matter, and for several chips shardings
    over `llamem.find_chip(name).mesh(...)`; what has none lies on every chip whole. For one chip, arguments
    whose sharding has the `memory_kind="pinned_host"` lie in the host's memory, and so do results that `fn` puts there;
    of shapes `fn` has to say it again, `jax.device_put(x, jax.memory.Space.Host)`. `donate_argnums`: which of them
    the program may overwrite, as in `jax.jit(donate_argnums=)`. `chip`: see `llamem.find_chip`. Reports for absent
    chips are cached on disk by program, compiler and chip, under `$LLAMEM_CACHE` or `~/.cache/llamem`.

    `depth`: how far an absent chip's compiler goes. With "memory" it is ended when it has assigned every buffer, in
    seconds; the report is the same, but a compiler that would fail later, while it makes code, is not found out. With
    "code" it goes to the end. The local compiler always does.

    Raises what tracing `fn` raises, ValueError and ImportError as `llamem.find_chip` does, RuntimeError where a
    compiler dies.
    """
    chosen = find_chip(chip)
    if depth not in typing.get_args(Depth):
        raise ValueError(f"depth={depth!r}: expected 'memory', as soon as memory is assigned, or 'code', to the end.")
    donated = _donated_leaves(args, donate_argnums)
    paths, tree = jax.tree.flatten_with_path(args)
    places = [f"args{jax.tree_util.keystr(path)}" for path, _ in paths]
    given = [shape_of(leaf, place) for place, (_, leaf) in zip(places, paths, strict=True)]
    keys = [key_implementation(leaf) if is_key(leaf.dtype) else None for leaf in given]
    leaves = [_placed(shape, leaf, place, chosen) for shape, place, (_, leaf) in zip(given, places, paths, strict=True)]
    mesh = _mesh(leaves, chosen)
    hosted = tuple(i for i, (_, leaf) in enumerate(paths) if _waits_on_host(leaf))

    def flat(*leaves: Any) -> list[Any]:
        # Compilers know no keys, only the numbers they are made of.
        wrapped = [jax.random.wrap_key_data(a, impl=key) if key else a for a, key in zip(leaves, keys, strict=True)]
        outputs = jax.tree.leaves(fn(*jax.tree.unflatten(tree, wrapped)))
        return [jax.random.key_data(out) if is_key(getattr(out, "dtype", None)) else out for out in outputs]

    # The one trace serves the compiler, too. What is donated is for the child process to say, where there is one.
    jitted = jax.jit(flat, donate_argnums=() if chosen.absent else donated, keep_unused=True)
    with traced_for(chosen, mesh):
        jaxpr = jitted.trace(*leaves).jaxpr
    if chosen.absent:
        _refuse_callbacks(jaxpr.jaxpr, chosen)
        program, axes = export_for(chosen, jitted, leaves, mesh), dict(mesh.shape) if mesh else None
        hosts = {"arguments": hosted, "results": [i for i, out in enumerate(jaxpr.out_avals) if on_host(out)]}
        compiling = partial(compile_absent, chosen, bytes(program.serialize()), donated, axes, depth, hosts)
        options = (_versions(chosen), chosen, donated, axes, depth, hosts)
        answer = cached(f"{options} {_without_lines(program)}", compiling) if cache else compiling()
    else:
        start, depth = time.perf_counter(), "code"
        with tempfile.TemporaryDirectory(prefix="llamem-") as dump:
            options = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
            with _no_compilation_cache():
                compiled = jitted.lower(*leaves).compile(compiler_options=options)
            answer = _described(compiled, time.perf_counter() - start)
            answer |= schedule_or_reason(Path(dump), chosen.platform)
    report = _report(chosen, depth, answer, jaxpr, leaves, donated, hosted)
    if "schedule" not in answer:
        return dataclasses.replace(report, no_timeline=answer["no_schedule"])
    names = argument_names(fn, args)
    timeline = Timeline.from_schedule(answer["schedule"], chosen.name, chosen.capacity_bytes, names)
    return dataclasses.replace(report, timeline=timeline)


def report_compiled(compiled: jax.stages.Compiled, traced: jex_core.ClosedJaxpr) -> Report:
    """The report of a program that was compiled for the devices at hand, `traced` being what was traced of it."""
    return _report(find_chip("local"), "code", _described(compiled, 0.0), traced, [], (), ())


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Turns JAX's persistent cache off: a program that is found there is not compiled, and nothing is written down."""
    before = jax.config.jax_enable_compilation_cache  # pyrefly: ignore[missing-attribute]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the setting once per process, or after this
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _described(compiled: jax.stages.Compiled, seconds: float) -> dict[str, Any]:
    read = analysed_bytes(compiled.memory_analysis()) | describe(optimised_text(compiled))
    return {**read, "compile_seconds": seconds}


def _shard(array: Any) -> tuple[int, ...]:
    """The shape of what one device holds."""
    sharding = getattr(array, "sharding", None)
    return sharding.shard_shape(array.shape) if isinstance(sharding, jax.sharding.NamedSharding) else array.shape


def _donated_leaves(args: tuple[Any, ...], donate_argnums: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(donate_argnums, tuple):
        raise TypeError(
            f"donate_argnums={donate_argnums!r}: expected the positions of the arguments as a tuple, such as (0,)."
        )
    wrong = [i for i in donate_argnums if not 0 <= i < len(args)]
    if wrong:
        raise ValueError(
            f"donate_argnums={donate_argnums} names argument {wrong[0]}, but there are {len(args)}: "
            f"0 to {len(args) - 1}."
        )
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    starts = np.cumsum([0, *counts])
    return tuple(int(leaf) for i in donate_argnums for leaf in range(starts[i], starts[i + 1]))


def _placed(shape: jax.ShapeDtypeStruct, leaf: Any, where: str, chip: Chip) -> jax.ShapeDtypeStruct:
    """The shape with the sharding that its leaf names, if any, on the chips of the chip; a key as its numbers."""
    sharding = getattr(leaf, "sharding", None)
    kind = getattr(sharding, "memory_kind", None)
    hosted = _waits_on_host(leaf)
    # What arrays have here without being asked may be called the host's memory: a CPU has no other.
    known = hosted and chip.devices == 1
    if kind not in (None, "device", jax.devices()[0].default_memory().kind) and not known:
        raise ValueError(
            f"{where} is in the memory {kind!r}: arguments there are counted for one chip, in 'pinned_host'. Leave the "
            f"memory_kind out: its bytes then count as those of {chip.name}."
        )
    if hosted:
        sharding = None if chip.absent else sharding  # an absent chip's compiler knows it by the argument's number
    elif not isinstance(sharding, jax.sharding.NamedSharding):
        sharding = None
    elif chip.absent:  # the same axes, of the absent chips
        sharding = jax.sharding.NamedSharding(chip.mesh(**sharding.mesh.shape), sharding.spec)
    if is_key(shape.dtype):
        shape = jax.eval_shape(jax.random.key_data, shape)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding, weak_type=shape.weak_type)


def _waits_on_host(leaf: Any) -> bool:
    """Whether an argument is in the host's memory and no device's own: a CPU's default memory may be called so."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind == "pinned_host" and kind != jax.devices()[0].default_memory().kind


def argument_names(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """A name for each leaf, such as `state.params['norm'].value`: its argument's, and the path inside."""
    try:
        given = inspect.signature(fn).bind(*args).arguments.items()
    except (TypeError, ValueError):  # nothing says what this callable's arguments are called
        given = [("", args)]
    leaves = [(name, path) for name, value in given for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    return [name + jax.tree_util.keystr(path) for name, path in leaves]


def _mesh(leaves: list[jax.ShapeDtypeStruct], chip: Chip) -> Any:
    # What lies in the memory of one device's host has a sharding, too, and no mesh.
    meshes = {leaf.sharding.mesh for leaf in leaves if isinstance(leaf.sharding, jax.sharding.NamedSharding)}
    if chip.devices > 1 and len(meshes) != 1:
        raise ValueError(
            f"{chip.name} has {chip.devices} chips, and the arguments' shardings name {len(meshes)} meshes, not one. "
            f"Say how they are spread: mesh = llamem.find_chip({chip.name!r}).mesh(data={chip.devices}), then "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, jax.P('data')))."
        )
    return meshes.pop() if chip.devices > 1 else None


def _refuse_callbacks(jaxpr: jex_core.Jaxpr, chip: Chip) -> None:
    if calling := sorted(set(callbacks_in(jaxpr))):
        raise ValueError(
            f"the program calls back into Python ({', '.join(calling)}), and a program for {chip.name}, which is not "
            "here, has no Python to call: leave out jax.debug.print, jax.debug.callback, jax.pure_callback and "
            "io_callback, or compile for chip='local'."
        )


def _versions(chip: Chip) -> tuple[str, ...]:
    compiler = {"tpu": "libtpu", "cuda": "jax-cuda12-plugin"}[chip.platform]
    return jax.__version__, jaxlib.__version__, metadata.version(compiler)


def _without_lines(program: jax.export.Exported) -> str:
    """Its text without lines of source: the same cell is the same program in another kernel, or further down."""
    return re.sub(r"^#loc.*$|loc\([^)]*\)", "", program.mlir_module(), flags=re.MULTILINE)


def _report(
    chip: Chip,
    depth: Depth,
    answer: dict[str, Any],
    jaxpr: Any,
    leaves: list[jax.ShapeDtypeStruct],
    donated: tuple[int, ...],
    hosted: tuple[int, ...],
) -> Report:
    def size(shapes: Iterable[Any]) -> int:
        return sum(math.prod(_shard(s)) * s.dtype.itemsize for s in shapes)

    flops = matmul_flops(jaxpr.jaxpr)
    if "error" in answer:
        peak = needed_bytes(answer["error"])
        if peak is None:
            raise RuntimeError(f"the compiler for {chip.name} refused the program: {answer['error'][:1500]}")
        arguments = size(leaf for i, leaf in enumerate(leaves) if i not in hosted)
        outputs = size(out for out in jaxpr.out_avals if not on_host(out))
        alias = size(leaves[i] for i in donated if i not in hosted)
        temp = max(peak - arguments - outputs + alias, 0)
        return Report(
            chip, arguments, outputs, alias, temp, peak, 0, flops, answer["compile_seconds"], depth=depth, refused=True
        )
    # What the compilers lay out on the device, and what a TPU's holds against the chip's memory when it refuses. XLA's
    # own peak is no such number: it ignores temporaries on a CPU, and counts the host's memory where arguments are.
    peak = answer["argument_bytes"] + answer["output_bytes"] - answer["alias_bytes"] + answer["temp_bytes"]
    warnings = []
    if jaxpr.consts and (closed := size(map(shape_of, jaxpr.consts))) > 2**20:
        warnings.append(
            f"{closed / 2**20:.0f} MiB of arrays are closed over: constants, which no line here counts. Pass them."
        )
    if answer["collectives"] is None:
        warnings.append("what chips send to each other cannot be counted: a loop does not say how often it runs.")
    if chip.platform == "tpu" and peak < 512 * 2**20:
        warnings.append("so small that much of it lives in on-chip memory (VMEM), which temp does not count.")
    if not answer["host_bytes"] and (hosted or moved_to_host(jaxpr.jaxpr)):
        warnings.append(
            "the program moves arrays to the host's memory, and none arrived: the compiler kept them on the device."
            if chip.platform != "cpu"
            else "arrays in the host's memory count as the device's: on a CPU that is the same, and nothing is gained."
        )
    if chip.capacity_bytes and peak > 0.85 * chip.capacity_bytes:
        warnings.append(
            "close to the limit, where the compiler rematerialises on its own: judge your remat on a roomier chip."
        )
    names = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "host_bytes", "compile_seconds")
    return Report(
        chip,
        **{name: answer[name] for name in names},
        peak_bytes=peak,
        depth=depth,
        matmul_flops=flops,
        compiled_matmul_flops=answer["compiled_matmul_flops"],
        xla_peak_bytes=answer.get("xla_peak_bytes"),
        collectives=tuple(Collective(**row) for row in answer["collectives"] or ()),
        buffers=tuple(Buffer(**row) for row in answer["buffers"]),
        warnings=tuple(warnings),
    )
