"""Memory of the host: how much of it a process may use."""

import re
from pathlib import Path

PINNED_POOL_BYTES = 64 * 10**9  # what XLA sets aside on a GPU, unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise


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
            told = [_text(root / "sys/fs" / folder / group / name).strip() for group in groups]
            limits += [int(text) for text in told if text.isdigit()]  # no limit is "max"
    return min(limits, default=None)


def _text(file: Path) -> str:
    """Return what stands in a file; "" where there is none to be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
