"""What a step really occupies on this machine."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import psutil


def most_memory(step: Callable[[], Any]) -> int:
    """Return the most bytes in use while `step()` runs: of the device, or else what this process adds.

    A GPU or TPU counts its own bytes. On a CPU the process's resident memory is looked at once a millisecond, less what
    was there before.
    """
    device = jax.local_devices()[0]
    if device.memory_stats():
        step()
        return device.memory_stats()["peak_bytes_in_use"]
    process, done = psutil.Process(), threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(process.memory_info().rss)

    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    done.set()
    watcher.join()
    return max(seen, default=before) - before
