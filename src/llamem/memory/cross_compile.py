"""Compiling for a chip that is not there: a child process that this one talks to in files.

A child, because the compilers are chosen by environment variables that JAX reads when it is imported, and because a
compiler that crashes must not take a notebook's kernel along. The program travels as `jax.export` bytes.
Run as `python -m llamem.memory.cross_compile REQUEST_FOLDER`.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export

from llamem._files import write_whole
from llamem.memory.targets import Target

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

# XLA's `GpuTargetConfigProto`, from its own specs (h100, a100-40) and NVIDIA's data sheets. Fields, in order: shared
# memory per core, per block by request, threads per core, cores, FPUs per core, L2 bytes, clock in GHz, compute
# capability.
_GPU = {
    "Tesla T4": (65_536, 65_536, 1024, 40, 64, 4_194_304, 1.59, (7, 5)),
    "NVIDIA L4": (102_400, 101_376, 1536, 58, 128, 50_331_648, 2.04, (8, 9)),
    "NVIDIA A100-SXM4-40GB": (167_936, 166_912, 2048, 108, 64, 41_943_040, 1.41, (8, 0)),
    "NVIDIA A100-SXM4-80GB": (167_936, 166_912, 2048, 108, 64, 41_943_040, 1.41, (8, 0)),
    "NVIDIA H100 80GB HBM3": (233_472, 232_448, 2048, 132, 128, 52_428_800, 1.98, (9, 0)),
}


def traced_for(target: Target, mesh: Any = None) -> contextlib.AbstractContextManager[Any]:
    """Within it, tracing sees the target as its chip: Pallas kernels, attention and tile choices ask for it."""
    return jax.sharding.use_abstract_mesh(mesh or target.mesh(x=1)) if target.absent else contextlib.nullcontext()


def export_for(
    target: Target, fn: Callable[..., Any], leaves: Sequence[jax.ShapeDtypeStruct], mesh: Any = None
) -> jax.export.Exported:
    """`fn(*leaves)`, traced and lowered for the target's platform."""
    with traced_for(target, mesh):
        exported = jax.export.export(jax.jit(fn, keep_unused=True), platforms=(target.platform,))(*leaves)
    # A `checkify.debug_check` that is switched off leaves an effect behind, without a serialised form or a meaning.
    return dataclasses.replace(exported, ordered_effects=(), unordered_effects=())


def compile_absent(
    target: Target, program: bytes, donated: Sequence[int], axes: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """What the target's compiler says: the result of `describe`, or `{"error": ...}` with the compiler's message.

    `axes` are those of the mesh of several chips. Raises RuntimeError where the compiler died without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="llamem-") as name:
        folder = Path(name)
        (folder / "program").write_bytes(program)
        request = {"target": dataclasses.asdict(target), "donated": list(donated), "axes": axes}
        (folder / "request.json").write_text(json.dumps(request))
        environment = {**os.environ, **_ENVIRONMENT}
        environment.pop("XLA_FLAGS", None)
        command = [sys.executable, "-m", "llamem.memory.cross_compile", str(folder)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        answer = folder / "answer.json"
        if not answer.exists():
            died = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
            raise RuntimeError(
                f"the compiler for {target.name} died with {died} and gave no answer. Your own process is unharmed. "
                f"Often an old compiler: upgrade libtpu or the CUDA plugin. Its last words: {child.stderr[-800:]}"
            )
        return json.loads(answer.read_text())


def _topology(target: Target) -> Any:
    from jax.experimental import topologies

    if target.platform == "tpu":
        alone: dict[str, Any] = {"chips_per_host_bounds": [1, 1, 1]} if target.devices == 1 else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=target.topology, **alone)
    topology = target.topology or "1x1x1"
    return topologies.get_topology_desc(platform="cuda", target_config=gpu_description(target), topology=topology)


def gpu_description(target: Target) -> str:
    """The text form of XLA's GPU description, which stands in for asking a driver."""
    shared, shared_optin, threads, cores, fpus, l2, clock, (major, minor) = _GPU[target.device_kind]
    extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_optin}
  core_count: {cores} fpus_per_core: {fpus} l2_cache_size: {l2} clock_rate_ghz: {clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {int(target.bandwidth or 0)} device_memory_size: {target.capacity_bytes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  device_vendor: "NVIDIA Corporation" name: "{target.device_kind}"
  platform_version: "Compute Capability {major}.{minor}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{target.device_kind}"
"""


def _child(folder: Path) -> None:
    from jax.experimental import topologies

    from llamem.memory.hlo import describe, optimised_text

    request = json.loads((folder / "request.json").read_text())
    target = Target(**request["target"])
    exported = jax.export.deserialize(bytearray((folder / "program").read_bytes()))
    topology, axes = _topology(target), request["axes"]
    shardings: dict[str, Any] = {}
    if axes:
        mesh = topologies.make_mesh(topology, tuple(axes.values()), tuple(axes))
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        shardings["in_shardings"] = tuple(s or everywhere for s in exported.in_shardings_jax(mesh))
    else:
        one = jax.sharding.SingleDeviceSharding(topology.devices[0])
        shardings |= {"in_shardings": one, "out_shardings": one}
    jitted = jax.jit(exported.call, donate_argnums=tuple(request["donated"]), keep_unused=True, **shardings)
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    answer: dict[str, Any]
    # XLA cannot print every TPU program, but the TPU's compiler can write each down.
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True} if target.platform == "tpu" else {}
    start = time.perf_counter()
    try:
        lowered = jitted.trace(*shapes).lower(lowering_platforms=(target.platform,))
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        answer = {"error": str(error)}
    else:
        written = next(folder.glob("*jit_call*.after_optimizations.txt"), None)
        answer = describe(compiled, written.read_text() if written else optimised_text(compiled))
    answer["compile_seconds"] = time.perf_counter() - start
    write_whole(folder / "answer.json", json.dumps(answer))


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
