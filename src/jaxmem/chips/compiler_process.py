"""The child process in which an absent chip's compiler runs: `python compiler_process.py FOLDER [COMPILERS ...]`.

It imports JAX, from the folders COMPILERS where they are named, and nothing of this package. FOLDER holds
`request.json` and `program`, bytes of `jax.export`. The compiler writes down what it does in FOLDER/dump while it
works; at the end `answer.json` is written, with the bytes of JAX's memory analysis, or with the compiler's message
under "error". Standard input is a pipe from the parent, which never writes: its end means that the parent is gone.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:]

import jax
import jax.export
from jax.experimental import mesh_utils, topologies
from jaxlib.mlir import ir


def main(folder: Path) -> None:
    """Compile what FOLDER asks for."""
    request = json.loads((folder / "request.json").read_text())
    program = (folder / "program").read_bytes()
    try:
        exported = jax.export.deserialize(bytearray(program))
    except ValueError as error:
        write_answer(folder, {"error": f"JAX {jax.__version__} cannot read the program: {error}"})
        return
    # Pallas's kernels for newer GPUs are linked with this library, which JAX names only where it traces them.
    for folder_of_plugin in filter(None, map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        for place in folder_of_plugin.submodule_search_locations or ():
            os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(Path(place) / "libmosaic_gpu_runtime.so")
    topology, axes = topologies.get_topology_desc(**request["topology"]), request["axes"]
    outputs: dict[str, Any] = {}
    if axes:
        # Where an axis of the mesh needs a part of a side of the torus: 64 x 4 of 16 x 16 chips.
        devices = mesh_utils.create_device_mesh(tuple(axes.values()), topology.devices, allow_split_physical_axes=True)
        mesh = jax.sharding.Mesh(devices, tuple(axes))
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        places = [sharding or everywhere for sharding in exported.in_shardings_jax(mesh)]
    else:
        device_sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
        places = [device_sharding] * len(exported.in_avals)
        outputs["out_shardings"] = put_on_host([device_sharding] * len(exported.out_avals), request["hosted_results"])
    jitted = jax.jit(
        exported.call,
        donate_argnums=tuple(request["donated"]),
        keep_unused=True,
        in_shardings=tuple(put_on_host(places, request["hosted_arguments"])),
        **outputs,
    )
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    dump = folder / "dump"
    answer: dict[str, Any]
    try:
        lowered = jitted.trace(*shapes).lower(lowering_platforms=(request["topology"]["platform"],))
        if request["topology"]["platform"] == "cuda":
            mark_on_host(lowered.compiler_ir("stablehlo"), request["hosted_arguments"], request["hosted_results"])
        options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True, **request["options"]}
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        answer = {"error": str(error)}
    else:
        answer = analysed_bytes(compiled.memory_analysis())
        if not any(dump.glob("*jit_call*after_optimizations.txt")):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # XLA cannot print every TPU program
                (dump / "jit_call.after_optimizations.txt").write_text(compiled.as_text() or "")
    write_answer(folder, answer)


def write_answer(folder: Path, answer: dict[str, Any]) -> None:
    """Write FOLDER/answer.json, which appears whole."""
    unfinished = folder / "answer.unfinished"
    unfinished.write_text(json.dumps(answer))
    unfinished.rename(folder / "answer.json")


def analysed_bytes(analysis: Any) -> dict[str, int]:
    """Return what `assigned_bytes` does from JAX's `compiled.memory_analysis()`, but for constants."""
    names = ("argument", "output", "alias", "temp")
    table = {f"{name}_bytes": int(getattr(analysis, f"{name}_size_in_bytes")) for name in names}
    host = {name: int(getattr(analysis, f"host_{name}_size_in_bytes")) for name in names}
    return table | {"host_bytes": host["argument"] + host["output"] - host["alias"] + host["temp"]}


def put_on_host(places: list[Any], numbers: list[int]) -> list[Any]:
    """Return the shardings, those of these numbers in the host's memory."""
    return [place.with_memory_kind("pinned_host") if i in numbers else place for i, place in enumerate(places)]


def mark_on_host(module: Any, arguments: list[int], results: list[int]) -> None:
    """Say in the StableHLO module which arguments and results of `main` lie in the host's memory.

    JAX writes these marks for devices that have memories. Those of an absent GPU's topology have none; without the
    marks, its compiler counts such an argument on the device too, or refuses the program.
    """
    main = next(op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")
    with module.context:
        for attribute, numbers in (("arg_attrs", arguments), ("res_attrs", results)):
            if not numbers:
                continue
            rows = [{named.name: named.attr for named in row} for row in main.attributes[attribute]]
            for number in numbers:
                rows[number]["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            main.attributes[attribute] = ir.ArrayAttr.get([ir.DictAttr.get(row) for row in rows])


def end_with_parent(folder: Path) -> None:
    """Wait for the end of the parent, then remove FOLDER, which nobody reads any more, and end this process."""
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, args=(Path(sys.argv[1]),), daemon=True).start()
    main(Path(sys.argv[1]))
