"""Compiling for a chip that is not there: a child process that this one talks to in files.

A child, because the compilers are chosen by environment variables that JAX reads when it is imported, and because a
compiler that crashes must not take a notebook's kernel along. The program travels as `jax.export` bytes.
"""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export

from jaxmem.chips import compiler_process
from jaxmem.chips.chip import Chip
from jaxmem.chips.compilers import Compilers
from jaxmem.reading.dump import check_complete, check_room, memory_is_assigned, read_dump
from jaxmem.report import Depth

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


def traced_for(chip: Chip, mesh: Any = None) -> contextlib.AbstractContextManager[Any]:
    """Within it, tracing sees the chip as its chip: Pallas kernels, attention and tile choices ask for it."""
    return jax.sharding.use_abstract_mesh(mesh or chip.mesh()) if chip.absent else contextlib.nullcontext()


def export_for(
    chip: Chip, jitted: jax.stages.Wrapped, leaves: Sequence[jax.ShapeDtypeStruct], mesh: Any = None
) -> jax.export.Exported:
    """Trace and lower `jitted(*leaves)` for the chip's platform. Raises ValueError for kernels of the user's own."""
    with traced_for(chip, mesh):
        # Not for keeping, but for a child process with the same JAX: what may change in a year may be exported.
        names = ("LayoutConstraint", "MoveToHost", "MoveToDevice", "__gpu$xla.gpu.triton")
        allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
        try:
            exported = jax.export.export(jitted, platforms=(chip.platform,), disabled_checks=allowed)(*leaves)
        except ValueError as error:
            if not (calls := sorted(set(re.findall(r"custom_call @([^\s(]+)\(", str(error))))):
                raise
            raise ValueError(
                f"the program calls {', '.join(calls)}, and the compiler for {chip.name} runs in a process that does "
                "not have it: leave such kernels out, by a function of the same shapes, or compile for chip='local'."
            ) from None
    # A `checkify.debug_check` that is switched off leaves an effect behind, without a serialised form or a meaning.
    return dataclasses.replace(exported, ordered_effects=(), unordered_effects=())


@dataclasses.dataclass(frozen=True)
class Request:
    """A program for a chip that is not there, and what its compiler is asked.

    `program` is what `jax.export` serialises, `donated` the numbers of the arguments that it may overwrite, `axes` are
    those of the mesh of several chips. Arguments and results of the numbers `hosted_*` lie in the host's memory.
    With the `depth` "memory" the compiler is ended once it has assigned memory. `options` are the compiler's.
    """

    chip: Chip
    compilers: Compilers
    program: bytes = dataclasses.field(repr=False)
    depth: Depth = "memory"
    donated: tuple[int, ...] = ()
    axes: Mapping[str, int] | None = None
    hosted_arguments: tuple[int, ...] = ()
    hosted_results: tuple[int, ...] = ()
    options: Mapping[str, str | bool] = dataclasses.field(default_factory=dict)


def compile_absent(request: Request) -> dict[str, Any]:
    """Return what the chip's compiler says: all of `read_dump`, in place of bytes `{"error": the compiler's message}`.

    Where a GPU's compiler finds no tiles for a matrix product, as it does where no GPU is there to try them on, it is
    asked again with products by cuBLAS, which the answer says as "products_by_library". Raises RuntimeError where the
    compiler died without an answer, OSError where the temporary folder is full.
    """
    try:
        answer = _compile_in_child(request)
        if "Couldn't find output tile sizes" not in answer.get("error", ""):
            return answer
        by_library = {**request.options, "xla_gpu_enable_triton_gemm": False}
        again = _compile_in_child(dataclasses.replace(request, options=by_library))
        seconds = answer["compile_seconds"] + again["compile_seconds"]
        return again | {"compile_seconds": seconds, "products_by_library": True}
    except OSError as error:
        raise OSError(
            f"the compiler for {request.chip.name} could not write its answer into the temporary folder "
            f"{tempfile.gettempdir()}: {error}. Free some space there, or set TMPDIR to a folder that has a GiB."
        ) from error


def _compile_in_child(request: Request) -> dict[str, Any]:
    chip, start = request.chip, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="llamem-") as name:
        folder = Path(name)
        dump, file = folder / "dump", folder / "answer.json"
        (folder / "program").write_bytes(request.program)
        names = ("donated", "axes", "hosted_arguments", "hosted_results")
        asked = {name: getattr(request, name) for name in names} | {"options": dict(request.options)}
        (folder / "request.json").write_text(json.dumps(asked | {"topology": _topology(chip)}))
        wide = jax.config.jax_enable_x64  # pyrefly: ignore[missing-attribute]
        # What the user set for JAX is for his own: the answer would depend on it, and the cache's key does not.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "LIBTPU_"))}
        environment = {**kept, **_ENVIRONMENT, "JAX_ENABLE_X64": str(int(wide))}
        command = request.compilers.command(compiler_process.__file__, folder)
        # The child ends when its pipe does: with this process, however that ends.
        with (
            (folder / "words").open("w") as words,
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=words, stderr=words) as child,
        ):
            try:
                while child.poll() is None and not (request.depth == "memory" and memory_is_assigned(dump)):
                    time.sleep(0.05)
            finally:
                child.kill()
        assigned = request.depth == "memory" and memory_is_assigned(dump)
        if not assigned and not file.exists():
            check_room(folder)
            died = f"signal {-child.returncode}" if child.returncode < 0 else f"exit status {child.returncode}"
            raise RuntimeError(
                f"the compiler for {chip.name} died with {died} and gave no answer. Your own process is unharmed. "
                f"It is that of {request.compilers.name}. Where it is damaged: `python -m jaxmem compilers --remove`, "
                "then fetch it again. Its last words: "
                f"{(folder / 'words').read_text(errors='replace')[-800:]}"
            )
        answer = {} if assigned else json.loads(file.read_text())
        if "error" not in answer:
            check_complete(dump)
        # Programs that are refused have a schedule too: it shows where they need too much.
        return read_dump(dump, chip.platform) | answer | {"compile_seconds": time.perf_counter() - start}


def _topology(chip: Chip) -> dict[str, Any]:
    """Return what `jax.experimental.topologies.get_topology_desc` is to be given."""
    if chip.platform == "tpu":
        alone: dict[str, Any] = {"chips_per_host_bounds": [1, 1, 1]} if chip.devices == 1 else {}
        return {"platform": "tpu", "topology_name": chip.topology} | alone
    topology = chip.topology or "1x1x1"
    return {"platform": "cuda", "target_config": gpu_description(chip), "topology": topology}


def gpu_description(chip: Chip) -> str:
    """Return the text form of XLA's GPU description, which stands in for asking a driver."""
    gpu = chip.gpu
    assert gpu is not None, chip
    major, minor = gpu.compute_capability
    extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads_per_core}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  shared_memory_per_core: {gpu.shared_memory_per_core}
  core_count: {gpu.cores} fpus_per_core: {gpu.fpus_per_core}
  l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: {gpu.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {int(chip.bandwidth or 0)} device_memory_size: {chip.capacity_bytes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  device_vendor: "NVIDIA Corporation" name: "{chip.device_kind}"
  platform_version: "Compute Capability {major}.{minor}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.device_kind}"
"""
