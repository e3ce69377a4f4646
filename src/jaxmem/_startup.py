"""Imported before all else: no noise, and no search for accelerators that cannot be there.

With libtpu or the CUDA plugin installed for compiling only, JAX's search for devices prints pages of errors and may
wait for a metadata server that does not answer. Where Linux shows no accelerator at all and the user chose no platform,
this chooses the CPU. Nothing is changed once JAX has started its backends, or where an accelerator is there.
"""

import contextlib
import ctypes
import glob
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_DEVICES = ("/dev/nvidia*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd", "/dev/dxg")
_PLUGINS = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    # The libraries write to the file descriptor: replacing sys.stderr would not catch them.
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


if (
    sys.platform == "linux"
    and not any(glob.glob(pattern) for pattern in _DEVICES)
    and any(importlib.util.find_spec(plugin) for plugin in _PLUGINS)
):
    with _no_stderr():
        import jax

        # JAX loads every plugin's library when it looks for devices. The CUDA one says there that it found no driver.
        for folder in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
            spec = importlib.util.find_spec(folder) if importlib.util.find_spec("jax_plugins") else None
            if spec and spec.origin:
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(Path(spec.origin).with_name("xla_cuda_plugin.so")))

    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")
