"""The chips one can compile for: the one at hand, or by name a TPU or an NVIDIA GPU that is not there."""

import dataclasses
import importlib.util
import math
import platform
import re
import sys
from typing import Literal

import jax

from llamem._checks import show


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA's compiler asks a GPU's driver for: bytes, counts, and the clock in GHz."""

    shared_memory_per_core: int
    shared_memory_per_block: int  # at most, where a kernel asks for it
    threads_per_core: int
    cores: int
    fpus_per_core: int
    l2_bytes: int
    clock_ghz: float
    compute_capability: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip, or several equal ones: what their compiler calls them, what one holds and how fast one is.

    `devices` is how many there are, connected as `topology` says. `capacity_bytes` is the memory of one that a program
    can use; None where nothing limits it but this machine. `peak_flops` is dense bf16 matrix FLOP/s (f16 on a T4),
    `bandwidth` bytes/s of its memory; None for the chip at hand, which is measured instead. `absent` chips are compiled
    for in a child process. `gpu` is the description of a GPU that stands in for its driver. A local GPU of any maker
    has the platform "cuda": XLA's compiler for GPUs is one.
    """

    name: str
    platform: Literal["cpu", "tpu", "cuda"]
    device_kind: str
    capacity_bytes: int | None
    peak_flops: float | None = None
    bandwidth: float | None = None
    topology: str = ""
    cores: int = 1
    absent: bool = True
    devices: int = 1
    gpu: Gpu | None = None

    def mesh(self, **axes: int) -> jax.sharding.AbstractMesh:
        """The chips as a mesh with these axes, `find_chip("v5e-8").mesh(data=2, model=4)`, for shardings of shapes.

        Raises ValueError where the axes do not multiply to the number of chips.
        """
        if math.prod(axes.values()) != self.devices:
            raise ValueError(f"mesh({axes}) needs {math.prod(axes.values())} chips; {self.name} has {self.devices}.")
        known = {field.name for field in dataclasses.fields(jax.sharding.AbstractDevice)}  # JAX 0.7 knows no platform
        device: dict = {"device_kind": self.device_kind, "num_cores": self.cores, "platform": self.platform}
        device = {name: value for name, value in device.items() if name in known}
        abstract = jax.sharding.AbstractDevice(**device)
        kinds = (jax.sharding.AxisType.Auto,) * len(axes)  # which JAX 0.12 no longer chooses by itself
        return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), kinds, abstract_device=abstract)


_GiB = 2**30

# XLA's own specifications (`GpuTargetConfigProto`: H100, A100-40), and NVIDIA's data sheets.
_T4 = Gpu(65_536, 65_536, 1024, 40, 64, 4_194_304, 1.59, (7, 5))
_L4 = Gpu(102_400, 101_376, 1536, 58, 128, 50_331_648, 2.04, (8, 9))
_A100 = Gpu(167_936, 166_912, 2048, 108, 64, 41_943_040, 1.41, (8, 0))
_H100 = Gpu(233_472, 232_448, 2048, 132, 128, 52_428_800, 1.98, (9, 0))

# TPU capacities: what the compiler (libtpu 0.0.51) says is available. Speeds: Google Cloud's TPU pages.
# GPU memory, bandwidth and speeds: NVIDIA's data sheets.
CHIPS: dict[str, Chip] = {
    t.name: t
    for t in (
        Chip("v5e-1", "tpu", "TPU v5 lite", int(15.75 * _GiB), 197e12, 819e9, "v5e:1x1"),
        Chip("v6e-1", "tpu", "TPU v6 lite", int(31.24 * _GiB), 918e12, 1640e9, "v6e:1x1"),
        Chip("v5p-1", "tpu", "TPU v5", int(95.73 * _GiB), 459e12, 2765e9, "v5p:1x1x1", cores=2),
        Chip("t4", "cuda", "Tesla T4", 15_655_829_504, 65e12, 320e9, gpu=_T4),
        Chip("l4", "cuda", "NVIDIA L4", 23_580_639_232, 121e12, 300e9, gpu=_L4),
        Chip("a100-40", "cuda", "NVIDIA A100-SXM4-40GB", 42_331_013_120, 312e12, 1555e9, gpu=_A100),
        Chip("a100-80", "cuda", "NVIDIA A100-SXM4-80GB", 84_974_239_744, 312e12, 2039e9, gpu=_A100),
        Chip("h100", "cuda", "NVIDIA H100 80GB HBM3", 84_942_979_072, 989e12, 3352e9, gpu=_H100),
    )
}
# Several chips. Google counts a v5p's two cores: a v5p-8 has four chips.
CHIPS |= {
    name: dataclasses.replace(CHIPS[one], name=name, topology=topology, devices=devices)
    for name, one, topology, devices in (
        ("v5e-4", "v5e-1", "v5e:2x2", 4),
        ("v5e-8", "v5e-1", "v5e:2x4", 8),
        ("v6e-4", "v6e-1", "v6e:2x2", 4),
        ("v6e-8", "v6e-1", "v6e:2x4", 8),
        ("v5p-8", "v5p-1", "v5p:2x2x1", 4),
        ("v5p-16", "v5p-1", "v5p:2x2x2", 8),
        ("h100-8", "h100", "1x1x8", 8),
    )
}


def find_chip(name: str) -> Chip:
    """A chip by name: "local", one of `CHIPS`, or TPUs by how they are connected, "v5e:16x16" or "v5p:4x4x8".

    "cpu", "gpu" and "tpu" mean the local device, which must be of that kind. Raises ValueError for an unknown name,
    RuntimeError for a local device of another kind, ImportError that says what to install
    where the compiler for an absent chip is missing.
    """
    if not isinstance(name, str):
        raise ValueError(f"chip={show(name)}: expected a name such as 'v5e-1' or 'local'. Known: {', '.join(CHIPS)}.")
    if name in ("local", "cpu", "gpu", "tpu"):
        return _local(name)
    found = CHIPS.get(name) or pod(name)
    if found is None:
        raise ValueError(
            f"no chip is called {name!r}. Known: local, cpu, gpu, tpu, {', '.join(CHIPS)}; and several TPUs by "
            "how they are connected, 'v5e:16x16', 'v6e:16x16' or 'v5p:4x4x8'."
        )
    needs = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "nvidia.cuda_nvcc")}[found.platform]
    missing = [module for module in (*needs, "flatbuffers") if not _installed(module)]
    if missing:
        extra = {"tpu": "tpu-compile", "cuda": "gpu-compile"}[found.platform]
        here = "" if _is_linux_x86() else f" It exists for Linux on x86-64 only; this is {sys.platform}."
        raise ImportError(f"compiling for {name!r} needs {', '.join(missing)}: `pip install 'llamem[{extra}]'`.{here}")
    return found


def pod(name: str) -> Chip | None:
    """TPUs by generation and sizes, "v5p:4x4x8"; None where the name is no such thing. Which sizes Google builds, their
    compiler knows.
    """
    generation, _, sizes = name.partition(":")
    one = CHIPS.get(f"{generation}-1")
    if one is None or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", sizes) or sizes.count("x") != one.topology.count("x"):
        return None
    devices = math.prod(int(size) for size in sizes.split("x"))
    return dataclasses.replace(one, name=name, topology=name, devices=devices)


def compiling_for() -> str:
    """The kind of chip that the program being traced is for, "TPU v5 lite" or "cpu", as its `device_kind` says.

    A program for an absent chip is traced under a mesh that carries that chip; any other is for the default device.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def available(name: str) -> bool:
    """Whether programs can be compiled for this chip here."""
    try:
        find_chip(name)
    except (ImportError, RuntimeError):
        return False
    return True


def _local(name: str) -> Chip:
    device = jax.local_devices()[0]
    kind = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}.get(
        device.platform, device.platform
    )
    if name not in ("local", kind):
        raise RuntimeError(
            f"the local device is a {kind} ({device.device_kind}), not a {name}. Use chip='local' for it, or name a "
            f"chip to compile for without having it: {', '.join(CHIPS)}."
        )
    stats = device.memory_stats()
    capacity = stats["bytes_limit"] if stats and "bytes_limit" in stats else None
    platform = "cuda" if kind == "gpu" else device.platform
    return Chip(name, platform, device.device_kind, capacity, absent=False)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def _is_linux_x86() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"
