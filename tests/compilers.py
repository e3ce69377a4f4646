"""Which compilers a figure in a test holds for."""

import jax
import pytest

from llamem.host.memory import host_place

# libtpu 0.0.23 comes with JAX 0.7.2. What it makes of large programs is told in docs/tried.md, "Versions".
not_of_old_compilers = pytest.mark.skipif(
    jax.__version_info__ < (0, 10),
    reason="holds for libtpu 0.0.51 and newer: that of JAX 0.7 lays out otherwise, and writes no timelines down",
)
with_host_memory = pytest.mark.skipif(
    host_place().memory_kind != "pinned_host",
    reason="before JAX 0.10.2 what waits on the host lies in a CPU's plain memory",
)
