"""What chips are: a table of TPUs and NVIDIA GPUs, and which of them a program is being traced for."""

import contextlib
import dataclasses
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, no_type_check

import jax

from jaxmem.common.printing import line_of_source


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
class InSlice(jax.sharding.AbstractDevice):
    """What tracing sees of an absent chip, and the `sides` of its slice of TPUs, (16, 16) of v5e:16x16.

    A field of what JAX compares meshes by: what is traced for one slice is not taken for another.
    """

    sides: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip, or several equal ones: what their compiler calls them, what one holds and how fast one is.

    `devices` is how many there are, connected as `topology` says. `capacity_bytes` is the memory of one that a program
    can use; None where nothing limits it but this machine. `peak_flops` is dense bf16 matrix FLOP/s (f16 on a T4),
    `bandwidth` bytes/s of its memory; None for the chip at hand, which is measured instead. `absent` chips are compiled
    for in a child process. `gpu` is the description of a GPU that stands in for its driver. A local GPU of any maker
    has the platform "cuda": XLA's compiler for GPUs is one. `host_link` and `chip_link` are bytes/s one way to the host
    and to neighbouring chips together; None where they go through the host's link, or are not known. `clock_ghz` is a
    TPU's, in whose cycles its compiler estimates.

    For a card that is not in `CHIPS` add one: `CHIPS["mine"] = dataclasses.replace(CHIPS["rtx4090"], name="mine",
    capacity_bytes=...)`; reports, tiles and plans then know it.
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
    host_link: float | None = None
    chip_link: float | None = None
    clock_ghz: float | None = None

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies bf16 matrices; an NVIDIA GPU before Ampere turns them into f32 first."""
        own = self.gpu or next((chip.gpu for chip in CHIPS.values() if chip.device_kind == self.device_kind), None)
        return own is None or own.compute_capability >= (8, 0)

    @property
    def bf16_flops(self) -> float | None:
        """FLOP/s of bf16 matrix products: `peak_flops`, or those of the f32 units of a chip without `has_bf16`."""
        if self.has_bf16 or self.gpu is None:
            return self.peak_flops
        return 2 * self.gpu.cores * self.gpu.fpus_per_core * self.gpu.clock_ghz * 1e9

    def mesh(self, **axes: int) -> jax.sharding.AbstractMesh:
        """Return the chips as a mesh, `find_chip("v5e-8").mesh(data=2, model=4)`, for shardings of shapes.

        Raises ValueError where the axes do not multiply to the number of chips.
        """
        if math.prod(axes.values()) != self.devices:
            raise ValueError(f"mesh({axes}) needs {math.prod(axes.values())} chips; {self.name} has {self.devices}.")
        known = {field.name for field in dataclasses.fields(jax.sharding.AbstractDevice)}  # JAX 0.7 knows no platform
        device: dict = {"device_kind": self.device_kind, "num_cores": self.cores, "platform": self.platform}
        device = {name: value for name, value in device.items() if name in known}
        sides = self.topology.partition(":")[2]  # of a GPU's there are none
        abstract = InSlice(**device, sides=tuple(int(side) for side in sides.split("x") if side))
        kinds = (jax.sharding.AxisType.Auto,) * len(axes)  # which JAX 0.12 no longer chooses by itself
        return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), kinds, abstract_device=abstract)


_GiB = 2**30

# XLA's own specifications (`GpuTargetConfigProto`: H100, H200, B200, A100-40, A6000), and NVIDIA's data sheets.
_T4 = Gpu(65_536, 65_536, 1024, 40, 64, 4_194_304, 1.59, (7, 5))
_L4 = Gpu(102_400, 101_376, 1536, 58, 128, 50_331_648, 2.04, (8, 9))
_A100 = Gpu(167_936, 166_912, 2048, 108, 64, 41_943_040, 1.41, (8, 0))
_H100 = Gpu(233_472, 232_448, 2048, 132, 128, 52_428_800, 1.98, (9, 0))
_B200 = Gpu(233_472, 232_448, 2048, 148, 128, 132_644_864, 1.965, (10, 0))
_A6000 = Gpu(102_400, 101_376, 1536, 84, 128, 6_291_456, 1.8, (8, 6))
_A10G = dataclasses.replace(_A6000, cores=80, clock_ghz=1.71)
_RTX3090 = dataclasses.replace(_A6000, cores=82, clock_ghz=1.695)
_L40S = dataclasses.replace(_L4, cores=142, l2_bytes=100_663_296, clock_ghz=2.52)
_RTX4090 = dataclasses.replace(_L4, cores=128, l2_bytes=75_497_472, clock_ghz=2.52)
_RTX5090 = Gpu(102_400, 101_376, 1536, 170, 128, 100_663_296, 2.41, (12, 0))

# TPU capacities: what the compiler (libtpu 0.0.51) says is available. Speeds: Google Cloud's TPU pages. A TPU7x has two
# devices, each with half of its memory, speed and links; v7x-1 is one of them.
# GPU memory, bandwidth and dense bf16 speeds, sums in f32: NVIDIA's data sheets; memory less what a driver keeps.
# Host link, bytes/s one way. GPUs: the PCIe generation on NVIDIA's data sheet, 16 lanes, less a fifth for its packets.
# TPUs: 16 and 32 GB/s for v5e and v6e, https://jax-ml.github.io/scaling-book/tpus; that of a v6e is assumed
# for the others. Chip link: Google Cloud's TPU pages (1,600, 3,200 and 4,800 Gbit/s), NVLink one way on data sheets.
# Clock: the peak over what the matrix units do in a cycle: four of 128 x 128 in a v5e, eight in a v5p, four of
# 256 x 256 in a v6e and in a device of a TPU7x.
CHIPS: dict[str, Chip] = {
    name: Chip(
        name,
        "tpu",
        kind,
        int(gib * _GiB),
        flops,
        speed,
        topology,
        cores,
        host_link=host,
        chip_link=link,
        clock_ghz=clock,
    )
    for name, kind, gib, flops, speed, topology, cores, host, link, clock in (
        ("v5e-1", "TPU v5 lite", 15.75, 197e12, 819e9, "v5e:1x1", 1, 16e9, 200e9, 1.5),
        ("v6e-1", "TPU v6 lite", 31.24, 918e12, 1640e9, "v6e:1x1", 1, 32e9, 400e9, 1.75),
        ("v5p-1", "TPU v5", 95.73, 459e12, 2765e9, "v5p:1x1x1", 2, 32e9, 600e9, 1.75),
        ("v7x-1", "TPU7x", 94.74, 1153e12, 3690e9, "tpu7x:1x1x1", 1, 32e9, 300e9, 2.2),
    )
}
CHIPS |= {
    name: Chip(name, "cuda", kind, size, flops, speed, gpu=gpu, host_link=host, chip_link=link)
    for name, kind, size, flops, speed, gpu, host, link in (
        ("t4", "Tesla T4", 15_655_829_504, 65e12, 320e9, _T4, 13e9, None),
        ("l4", "NVIDIA L4", 23_580_639_232, 121e12, 300e9, _L4, 25e9, None),
        ("a10g", "NVIDIA A10G", 23_580_639_232, 70e12, 600e9, _A10G, 25e9, None),
        ("rtx3090", "NVIDIA GeForce RTX 3090", 25_400_000_000, 71e12, 936e9, _RTX3090, 25e9, None),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 25_250_000_000, 165e12, 1008e9, _RTX4090, 25e9, None),
        ("rtx5090", "NVIDIA GeForce RTX 5090", 33_600_000_000, 209e12, 1792e9, _RTX5090, 50e9, None),
        ("a6000", "NVIDIA RTX A6000", 51_041_271_808, 155e12, 768e9, _A6000, 25e9, 56e9),
        ("l40s", "NVIDIA L40S", 47_700_000_000, 362e12, 864e9, _L40S, 25e9, None),
        ("a100-40", "NVIDIA A100-SXM4-40GB", 42_331_013_120, 312e12, 1555e9, _A100, 25e9, 300e9),
        ("a100-80", "NVIDIA A100-SXM4-80GB", 84_974_239_744, 312e12, 2039e9, _A100, 25e9, 300e9),
        ("h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 989e12, 3352e9, _H100, 50e9, 450e9),
        ("h200", "NVIDIA H200 141GB HBM3e", 150_023_000_000, 989e12, 4800e9, _H100, 50e9, 450e9),
        ("b200", "NVIDIA B200", 191_514_411_008, 2250e12, 7672e9, _B200, 50e9, 900e9),
    )
}
# Several chips. Google counts a v5p's two cores: a v5p-8 has four chips.
CHIPS |= {
    name: dataclasses.replace(CHIPS[single_chip], name=name, topology=topology, devices=devices)
    for name, single_chip, topology, devices in (
        ("v5e-4", "v5e-1", "v5e:2x2", 4),
        ("v5e-8", "v5e-1", "v5e:2x4", 8),
        ("v6e-4", "v6e-1", "v6e:2x2", 4),
        ("v6e-8", "v6e-1", "v6e:2x4", 8),
        ("v5p-8", "v5p-1", "v5p:2x2x1", 4),
        ("v5p-16", "v5p-1", "v5p:2x2x2", 8),
        ("h100-8", "h100", "1x1x8", 8),
    )
}


def device_memory() -> int | None:
    """Return the bytes that a program can use on the local device; None where nothing says, as on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def compiling_for() -> str:
    """Return the kind of chip that the program being traced is for, "TPU v5 lite" or "cpu", as its `device_kind` says.

    A program for an absent chip is traced under a mesh that carries that chip; any other is for the default device.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.device_kind if device is not None else jax.devices()[0].device_kind


GLOBALS = threading.RLock()  # held while what is one for all threads of a process is changed in JAX


@contextlib.contextmanager
def questions_heard() -> Iterator[list[str]]:
    """Within it, write down where a traced program asks JAX which devices are here: "jax.devices() in model.py:12".

    For an absent chip the answer is the wrong one. JAX, flax and the packages of this wheel are not listened to, nor
    are other threads. One thread at a time is within it.
    """
    asked: list[str] = []
    own_thread = threading.get_ident()
    beside_jax, beside_this = Path(jax.__file__).parent.parent, Path(__file__).parents[2]
    libraries = beside_jax / "jax", beside_jax / "flax", beside_this / "jaxmem", beside_this / "llamem"
    of_libraries = tuple(f"{folder}{os.sep}" for folder in libraries)

    def listening(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        @no_type_check  # who checks types would stand between this and the line that asks
        def answer_and_write_down(*kind: Any, **keywords: Any) -> Any:
            line = sys._getframe(1)
            if threading.get_ident() == own_thread and not (
                kind or keywords or line.f_code.co_filename.startswith(of_libraries)
            ):
                asked.append(f"jax.{name}() in {line_of_source(line.f_code.co_filename, line.f_lineno)}")
            return answer(*kind, **keywords)

        return answer_and_write_down

    with GLOBALS:
        answers = {name: getattr(jax, name) for name in ("devices", "local_devices", "default_backend")}
        try:
            for name, answer in answers.items():
                setattr(jax, name, listening(name, answer))
            yield asked
        finally:
            for name, answer in answers.items():
                setattr(jax, name, answer)


PINNED_POOL_BYTES = 64 * 2**30  # what XLA sets aside on a GPU, unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise


def host_memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that this process may use; None where the system does not say.

    The machine's memory, or less where the process's container or any above it is limited: a machine may show hundreds
    of GiB to a process that is killed at 12. `root` is where `/proc` and `/sys` lie.
    """
    machine = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    limits = [1024 * int(machine[1])] if machine else []
    # Linux's control groups: "0::/own" of version 2, "7:memory:/own" of version 1.
    for kind, own in re.findall(r"^\d+:([^:]*):/(.*)$", _text(root / "proc/self/cgroup") or "0::/", re.MULTILINE):
        folder, name = ("cgroup", "memory.max") if not kind else ("cgroup/memory", "memory.limit_in_bytes")
        if kind in ("", "memory"):
            groups = (Path(own), *Path(own).parents)
            texts = [_text(root / "sys/fs" / folder / group / name).strip() for group in groups]
            limits += [int(text) for text in texts if text.isdigit()]  # no limit is "max"
    return min(limits, default=None)


def _text(file: Path) -> str:
    """Return what stands in a file; "" where there is none to be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
