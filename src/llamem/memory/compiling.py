"""The truth about memory: what a program needs on a chip, as that chip's own compiler says."""

import functools
import hashlib
import json
import math
import re
import time
import typing
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import jaxlib
import numpy as np
from jax.extend import core as jex_core

from llamem._files import cache_folder, write_whole
from llamem.memory.cross_compile import compile_absent, export_for, traced_for
from llamem.memory.dump import analysed_bytes
from llamem.memory.hlo import optimised_text
from llamem.memory.hlo_counts import describe
from llamem.memory.jaxprs import equations, inner_jaxprs
from llamem.memory.report import Buffer, Collective, Depth, Report
from llamem.memory.targets import Target, target


def compile_report(
    fn: Callable[..., Any],
    *args: Any,
    target: str = "local",
    donate: tuple[int, ...] = (),
    depth: Depth = "memory",
    cache: bool = True,
) -> Report:
    """Compiles `fn(*args)` for a chip, here or absent, and reports its memory. Nothing is computed.

    `args`: pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and types matter, and for several chips shardings
    over `llamem.target(name).mesh(...)`; what has none lies on every chip whole. `donate`: which of them the
    program may overwrite, as in `jax.jit(donate_argnums=)`. `target`: see `llamem.target`. Reports for absent chips are
    cached on disk by program, compiler and chip, under `$LLAMEM_CACHE` or `~/.cache/llamem`.

    `depth`: how far an absent chip's compiler goes. With "memory" it is ended when it has assigned every buffer, in
    seconds; the report is the same, but a compiler that would fail later, while it makes code, is not found out. With
    "code" it goes to the end. The local compiler always does.

    Raises what tracing `fn` raises, ValueError and ImportError as `llamem.target` does, RuntimeError where a compiler
    dies.
    """
    chip = _target(target)
    if depth not in typing.get_args(Depth):
        raise ValueError(f"depth={depth!r}: expected 'memory', as soon as memory is assigned, or 'code', to the end.")
    leaves, tree = jax.tree.flatten(args)
    is_key = [_is_key(leaf) for leaf in leaves]
    leaves = [_shape_of(leaf, chip) for leaf in leaves]
    donated = _donated_leaves(args, donate)
    mesh = _mesh(leaves, chip)

    def flat(*leaves: Any) -> list[Any]:
        # Compilers know no keys, only the numbers they are made of.
        wrapped = [jax.random.wrap_key_data(a) if key else a for a, key in zip(leaves, is_key, strict=True)]
        outputs = jax.tree.leaves(fn(*jax.tree.unflatten(tree, wrapped)))
        return [jax.random.key_data(out) if _is_key(out) else out for out in outputs]

    if chip.absent:
        program, axes = export_for(chip, flat, leaves, mesh), dict(mesh.shape) if mesh else None
        compiling = partial(compile_absent, chip, bytes(program.serialize()), donated, axes, depth)
        answer = _cached(compiling, program, (chip, donated, axes, depth)) if cache else compiling()
    else:
        start, depth = time.perf_counter(), "code"
        compiled = jax.jit(flat, donate_argnums=donated, keep_unused=True).lower(*leaves).compile()
        answer = _described(compiled, time.perf_counter() - start)
    with traced_for(chip, mesh):
        jaxpr = jax.make_jaxpr(flat)(*leaves)
    return _report(chip, depth, answer, jaxpr, leaves, donated)


_target = target  # the function, where a parameter has its name


def report_compiled(compiled: jax.stages.Compiled, traced: jex_core.ClosedJaxpr) -> Report:
    """The report of a program that was compiled for the devices at hand, `traced` being what was traced of it."""
    return _report(_target("local"), "code", _described(compiled, 0.0), traced, [], ())


def _described(compiled: jax.stages.Compiled, seconds: float) -> dict[str, Any]:
    read = analysed_bytes(compiled.memory_analysis()) | describe(optimised_text(compiled))
    return {**read, "compile_seconds": seconds}


def matmul_flops(jaxpr: jex_core.Jaxpr) -> int:
    """FLOPs of the matrix products of a jaxpr, those in scans times their length; a cond counts its largest branch.

    `while` loops of unknown length are counted once, as the compilers do.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape  # pyrefly: ignore[missing-attribute]
            out = eqn.outvars[0].aval.shape  # pyrefly: ignore[missing-attribute]
            total += 2 * int(np.prod(out)) * int(np.prod([lhs[axis] for axis in contract]))
        inner = [matmul_flops(jaxpr) for jaxpr in inner_jaxprs(eqn)]
        if eqn.primitive.name == "cond":
            total += max(inner, default=0)
        elif eqn.primitive.name != "pallas_call":
            total += sum(inner) * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else sum(inner)
    return total


def moved_to_host(jaxpr: jex_core.Jaxpr) -> int:
    """Bytes that a program asks to be put into the host's memory, as offloading policies write it, loops multiplied."""
    total = 0
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name == "device_put" and "host" in str(eqn.params["devices"]).lower():
            avals: list[Any] = [var.aval for var in eqn.outvars]
            total += times * sum(aval.size * aval.dtype.itemsize for aval in avals)
    return total


def _shard(array: Any) -> tuple[int, ...]:
    """The shape of what one device holds."""
    sharding = getattr(array, "sharding", None)
    return sharding.shard_shape(array.shape) if isinstance(sharding, jax.sharding.NamedSharding) else array.shape


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(_dtype(leaf), jax.dtypes.prng_key)


def _numbers(array: Any) -> Any:
    """An array, or what a key is made of."""
    return jax.random.key_data(array) if _is_key(array) else np.asarray(array)


def _donated_leaves(args: tuple[Any, ...], donate: tuple[int, ...]) -> tuple[int, ...]:
    wrong = [i for i in donate if not 0 <= i < len(args)]
    if wrong:
        raise ValueError(f"donate={donate} names argument {wrong[0]}, but there are {len(args)}: 0 to {len(args) - 1}.")
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    starts = np.cumsum([0, *counts])
    return tuple(int(leaf) for i in donate for leaf in range(starts[i], starts[i + 1]))


def _shape_of(leaf: Any, chip: Target) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        sharding = None
    elif chip.absent:  # the same axes, of the absent chips
        sharding = jax.sharding.NamedSharding(chip.mesh(**sharding.mesh.shape), sharding.spec)
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(_dtype(leaf)), sharding=sharding)


def _mesh(leaves: list[jax.ShapeDtypeStruct], chip: Target) -> Any:
    meshes = {leaf.sharding.mesh for leaf in leaves if leaf.sharding is not None}
    if chip.devices > 1 and len(meshes) != 1:
        raise ValueError(
            f"{chip.name} has {chip.devices} chips, and the arguments' shardings name {len(meshes)} meshes, not one. "
            f"Say how they are spread: mesh = llamem.target({chip.name!r}).mesh(data={chip.devices}), then "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, jax.P('data')))."
        )
    return meshes.pop() if chip.devices > 1 else None


def _cached(
    compiling: Callable[[], dict[str, Any]],
    program: jax.export.Exported,
    options: tuple[Target, tuple[int, ...], dict[str, int] | None, Depth],
) -> dict[str, Any]:
    versions = (jax.__version__, jaxlib.__version__, _compiler_version(options[0]), _reading_code())
    # Without source lines: the same cell finds its report again in another kernel, or after an edit above it.
    text = re.sub(r"^#loc.*$|loc\([^)]*\)", "", program.mlir_module(), flags=re.MULTILINE)
    identity = repr((versions, options)) + text
    key = hashlib.sha256(identity.encode()).hexdigest()
    file = cache_folder("reports") / f"{key[:32]}.json"
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, ValueError):  # never compiled, or a file cut short by a full disk: compile
        pass
    answer = compiling()
    write_whole(file, json.dumps(answer))
    return answer


@functools.cache
def _reading_code() -> str:
    """A fingerprint of the code that reads what compilers say: an answer read by other code is no answer of this."""
    texts = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _compiler_version(chip: Target) -> str:
    from importlib import metadata

    return metadata.version({"tpu": "libtpu", "cuda": "jax-cuda12-plugin"}[chip.platform])


def _report(
    chip: Target,
    depth: Depth,
    answer: dict[str, Any],
    jaxpr: Any,
    leaves: list[jax.ShapeDtypeStruct],
    donated: tuple[int, ...],
) -> Report:
    def size(shapes: Iterable[Any]) -> int:
        return sum(math.prod(_shard(s)) * np.dtype(s.dtype).itemsize for s in shapes)

    flops = matmul_flops(jaxpr.jaxpr)
    if "error" in answer:
        found = re.search(r"(?:required for HLO temporaries \(|hbm\. Used )([\d.]+)([KMGT])", answer["error"])
        if found is None:
            raise RuntimeError(f"the compiler for {chip.name} refused the program: {answer['error'][:1500]}")
        # Older compilers say "Used"; newer ones speak of temporaries, where the number is of all that must fit.
        peak = int(float(found[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[found[2]])
        arguments, outputs = size(leaves), size(jaxpr.out_avals)
        alias = size(leaves[i] for i in donated)
        temp = max(peak - arguments - outputs + alias, 0)
        return Report(
            chip, arguments, outputs, alias, temp, peak, 0, flops, answer["compile_seconds"], depth=depth, refused=True
        )
    # What the compilers lay out on the device, and what a TPU's holds against the chip's memory when it refuses. XLA's
    # own peak is no such number: it ignores temporaries on a CPU, and counts the host's memory where arguments are.
    peak = answer["argument_bytes"] + answer["output_bytes"] - answer["alias_bytes"] + answer["temp_bytes"]
    warnings = []
    if jaxpr.consts and (closed := size(map(_numbers, jaxpr.consts))) > 2**20:
        warnings.append(
            f"{closed / 2**20:.0f} MiB of arrays are closed over: constants, which no line here counts. Pass them."
        )
    if chip.platform == "tpu" and peak < 512 * 2**20:
        warnings.append("so small that much of it lives in on-chip memory (VMEM), which temp does not count.")
    if not answer["host_bytes"] and moved_to_host(jaxpr.jaxpr):
        warnings.append(
            "the program moves arrays to the host's memory, and none arrived: the compiler kept them on the device."
            if chip.platform != "cpu"
            else "the program offloads to the host's memory: on a CPU that is the device's own, and nothing is gained."
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
        collectives=tuple(Collective(**row) for row in answer["collectives"]),
        buffers=tuple(Buffer(**row) for row in answer["buffers"]),
        warnings=tuple(warnings),
    )
