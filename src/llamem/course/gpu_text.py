"""The text that the compiler of an absent NVIDIA GPU writes, where it says from which byte a loop reads the host."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import topologies

from llamem.memory import find_chip
from llamem.memory.cross_compile import gpu_description
from llamem.memory.gpu_offload import offloads_rightly
from llamem.memory.hlo import parse
from llamem.memory.slice_notes import SliceNotes, check_slice_notes


def compiled_gpu_text(fn: Callable[..., Any], *shapes: Any, chip: str, options: Mapping[str, str]) -> str:
    """Return the optimised program of `fn(*shapes)` for one absent GPU, with these compiler options and no others.

    `llamem.compile_report` adds the options that the program needs; here none is added, so that what the compiler does
    as it comes can be seen. Needs the CUDA plugin of JAX (`llamem.available(chip)`).
    """
    jax.devices()  # loads the plugins
    description = gpu_description(find_chip(chip))
    topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
    there = jax.sharding.SingleDeviceSharding(topology.devices[0])
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), shapes)
    with offloads_rightly():
        traced = jax.jit(fn, in_shardings=there, out_shardings=there).trace(*shapes)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=dict(options))
    return compiled.as_text() or ""


def noted_slices(text: str) -> SliceNotes:
    """Return what the program notes of its slices in loops, right and wrong: see `SliceNotes`."""
    return check_slice_notes(parse(text))
