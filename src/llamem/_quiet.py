"""Imported before all else: no noise, and no search for accelerators that cannot be there.

With libtpu or the CUDA plugin installed for compiling only, JAX's search for devices prints pages of errors and may
wait for a metadata server that does not answer. Where Linux shows no accelerator at all and the user chose no platform,
this chooses the CPU. Nothing is changed once JAX has started its backends, or where an accelerator is there.
"""

import glob
import importlib.util
import os
import sys

_DEVICES = ("/dev/nvidia*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd", "/dev/dxg")
_PLUGINS = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")

if (
    sys.platform == "linux"
    and not any(glob.glob(pattern) for pattern in _DEVICES)
    and any(importlib.util.find_spec(plugin) for plugin in _PLUGINS)
):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the plugin complains of missing drivers when it is loaded
    import jax

    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")
