"""Chips by name: the one at hand, or a TPU or an NVIDIA GPU that is not there, where its compiler is installed."""

import dataclasses
import math
import re

import jax

from jaxmem.answers import source
from jaxmem.chips.chip import CHIPS, Chip, device_memory
from jaxmem.chips.compilers import find_compilers, no_compilers
from jaxmem.common.checks import show


def known_chip(name: str) -> Chip | None:
    """Return a chip of `CHIPS`, or TPUs by how they are connected; None for what is no such name.

    Capitals, spaces, dashes and the maker's words make no difference: "A100-80GB", "NVIDIA GeForce RTX 4090".
    """
    plain = _plain(name)
    alike = (chip for own, chip in CHIPS.items() if plain in (_plain(own), _plain(chip.device_kind)))
    return CHIPS.get(name) or next(alike, None) or pod(name.lower())


def _plain(name: str) -> str:
    plain = re.sub(r"nvidia|geforce|tesla|quadro|tpu|sxm\d?|pcie|hbm\w*|[\s_-]", "", name.lower())
    return plain.replace("v5litepod", "v5e").replace("rtxa", "a").removesuffix("gb")


def find_chip(name: str) -> Chip:
    """Return a chip by name: "local", one of `CHIPS`, or TPUs by how they are connected, "v5e:16x16" or "v5p:4x4x8".

    "cpu", "gpu" and "tpu" mean the local device, which must be of that kind. Raises ValueError for an unknown name,
    RuntimeError for a local device of another kind, ImportError that says how to get it where the compiler for an
    absent chip is missing (`jaxmem.fetch_compilers`).
    """
    chip = chip_called(name)
    if chip.absent and find_compilers(chip.platform) is None and source() is None:
        raise ImportError(no_compilers(name, chip.platform))
    return chip


def chip_called(name: str) -> Chip:
    """Return a chip by name, as `find_chip` does, with or without a compiler for it."""
    if not isinstance(name, str):
        raise ValueError(f"chip={show(name)}: expected a name such as 'v5e-1' or 'local'. Known: {', '.join(CHIPS)}.")
    if name in ("local", "cpu", "gpu", "tpu"):
        return _local(name)
    chip = known_chip(name)
    if chip is None:
        raise ValueError(
            f"no chip is called {name!r}. Known: local, cpu, gpu, tpu, {', '.join(CHIPS)}; and several TPUs by "
            "how they are connected, 'v5e:16x16', 'v6e:16x16' or 'v5p:4x4x8'. One that is like another: "
            "jaxmem.CHIPS['mine'] = dataclasses.replace(jaxmem.CHIPS['rtx3090'], name='mine', capacity_bytes=11 << 30)."
        )
    return chip


def pod(name: str) -> Chip | None:
    """Return TPUs by generation and sizes, "v5p:4x4x8"; None where the name is no such thing. Their compiler
    knows which sizes Google builds. A v7x is half of a chip, and of slices of those we know nothing.
    """
    generation, _, sizes = name.partition(":")
    chip = CHIPS.get(f"{generation}-1")
    if chip is None or not chip.topology.startswith(f"{generation}:"):
        return None
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", sizes) or sizes.count("x") != chip.topology.count("x"):
        return None
    devices = math.prod(int(size) for size in sizes.split("x"))
    return dataclasses.replace(chip, name=name, topology=name, devices=devices)


def available(name: str) -> bool:
    """Return whether programs can be compiled for this chip here, or have answers that are stored with the course."""
    try:
        find_chip(name)
    except (ImportError, RuntimeError):
        return False
    return True


def _local(name: str) -> Chip:
    device = jax.local_devices()[0]
    kind = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
    if name not in ("local", kind):
        raise RuntimeError(
            f"the local device is a {kind} ({device.device_kind}), not a {name}. Use chip='local' for it, or name a "
            f"chip to compile for without having it: {', '.join(CHIPS)}."
        )
    platform = "cuda" if kind == "gpu" else device.platform
    return Chip(name, platform, device.device_kind, device_memory(), absent=False)
