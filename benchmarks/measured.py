"""The peak memory of a call that really runs, as the device's allocator or the operating system counts it."""

import ctypes
import dataclasses
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The peak of one call: `rise_bytes` above what was in use when it began (its arguments were), and who counted.

    `exact=False`: the device was fuller before, in this process, so this call's own rise is at most `rise_bytes`.
    """

    rise_bytes: int
    start_bytes: int
    counted_by: str
    exact: bool = True

    def __str__(self) -> str:
        most = "" if self.exact else "at most "
        return f"{most}{self.rise_bytes / 2**20:.0f} MiB above {self.start_bytes / 2**20:.0f} MiB ({self.counted_by})"


def measure(fn: Callable[..., Any], *args: Any, donate_argnums: tuple[int, ...] = ()) -> Measurement:
    """Compile `fn`, then call it once on `args` (arrays) and measure the peak while it runs.

    On an accelerator from the allocator's statistics, on a CPU from the process's resident memory (Linux only; other
    threads of the process count too, and a few MiB of the runtime's own; in a process that has freed much a rise can
    hide in what it still holds: measure in a fresh one). Donated arguments are gone afterwards.
    Raises RuntimeError where neither exists.
    """
    device = jax.local_devices()[0]
    args = jax.block_until_ready(jax.device_put(args, device, may_alias=not donate_argnums))
    compiled = jax.jit(fn, donate_argnums=donate_argnums).lower(*args).compile()
    gc.collect()
    if stats := device.memory_stats():
        before, old_peak = stats["bytes_in_use"], stats["peak_bytes_in_use"]
        jax.block_until_ready(compiled(*args))
        peak = (device.memory_stats() or {})["peak_bytes_in_use"]
        return Measurement(peak - before, before, f"allocator of {device.device_kind}", exact=peak > old_peak)
    _give_back()
    try:
        _CLEAR.write_text("5")  # resets the peak to what is resident now
        before = _resident("VmRSS")
    except OSError as error:
        raise RuntimeError(
            "the device keeps no memory statistics, and this system offers no peak of resident memory that can be "
            f"reset ({error}). measure() works on GPUs, TPUs and on Linux CPUs; compile_report() works everywhere."
        ) from None
    jax.block_until_ready(compiled(*args))
    return Measurement(_resident("VmHWM") - before, before, "resident set of this process")


def _give_back() -> None:
    """Have glibc return to the system what earlier calls freed: it is resident, and would hide a rise."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: 0)(0)


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024
