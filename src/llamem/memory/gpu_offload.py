"""What is offloaded to the host on NVIDIA GPUs: a fault of two compilers that gives wrong gradients, and its cure.

The GPU compiler of jaxlib 0.10.2 and 0.11.0 notes on each slice of a loop where it lies, `dynamic_slice_config`, and
notes the wrong place on slices that a backward pass reads from the host's memory: layer 0 where it wants the last one.
The run follows the note. Measured, and mended in 0.11.1: https://github.com/openxla/xla/pull/46231.
"""

import contextlib
import os
import warnings
from collections.abc import Callable

import jax
import jaxlib

_WRONG_SLICES = ("0.10.2", "0.11.0")  # of jaxlib; 0.10.1 writes no such note, 0.11.1 a right one
FAULTY_PASS = "dynamic-slice-annotator"
# What JAX writes into a program that puts something into the host's memory, or takes it from there.
_ON_HOST = ("pinned_host", "annotate_device_placement")


def has_wrong_slices() -> bool:
    """Return whether this jaxlib's compiler for NVIDIA GPUs reads offloaded residuals back from the wrong place."""
    return jaxlib.__version__ in _WRONG_SLICES


class WrongOffloadWarning(UserWarning):
    """A program is traced for a GPU whose compiler reads offloaded arrays back from the wrong place."""


def offload_options(program_text: Callable[[], str], platform: str) -> dict[str, str]:
    """Return the compiler options that a program needs, of the platform "cpu", "tpu", "cuda" or "gpu".

    For GPUs, with jaxlib 0.10.2 and 0.11.0, they switch the faulty pass off where something lies in the host's memory;
    else there are none. Bytes on the device and on the host stay the same. `program_text` gives its StableHLO.
    """
    if not has_wrong_slices() or platform not in ("cuda", "gpu"):
        return {}
    text = program_text()
    return {"xla_disable_hlo_passes": FAULTY_PASS} if any(mark in text for mark in _ON_HOST) else {}


def compile_lowered(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile for the device at hand, with the options that the program needs (`offload_options`)."""
    return lowered.compile(compiler_options={**offload_options(lowered.as_text, jax.default_backend())})


def offloads_rightly() -> contextlib.AbstractContextManager:
    """Within it, what is traced is compiled with `offload_options`: no warning is needed."""
    return warnings.catch_warnings(action="ignore", category=WrongOffloadWarning)


def warn_of_wrong_offload(what: str) -> None:
    """Warn that the program being traced, for the GPU at hand, needs a compiler option: `what` says why.

    Silent where the fault is not, or where XLA_FLAGS switches the pass off.
    """
    if jax.default_backend() != "gpu" or not has_wrong_slices() or FAULTY_PASS in os.environ.get("XLA_FLAGS", ""):
        return
    warnings.warn(
        f"{what}: with jaxlib {jaxlib.__version__}, NVIDIA GPUs read what is offloaded back from the wrong layer, and "
        "the gradients are wrong without an error. Update jaxlib to 0.11.1 or newer, or switch the faulty pass off: "
        f'jax.jit(step, compiler_options={{"xla_disable_hlo_passes": "{FAULTY_PASS}"}}), or '
        f"XLA_FLAGS=--xla_disable_hlo_passes={FAULTY_PASS} before Python starts. With the option, ignore this warning.",
        WrongOffloadWarning,
        stacklevel=4,
    )
