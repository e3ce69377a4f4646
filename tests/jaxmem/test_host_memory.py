"""The host memory that a process may use, where its container has less than the machine."""

import pytest

from jaxmem import host_memory_limit

GiB = 2**30


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/", {}, 256),
        ("0::/", {"memory.max": "max"}, 256),
        ("0::/", {"memory.max": f"{12 * GiB}"}, 12),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": f"{9 * GiB}"}, 9),  # one above it is limited
        ("4:cpu:/x\n7:memory:/job", {"memory/job/memory.limit_in_bytes": f"{16 * GiB}"}, 16),
        ("7:memory:/job", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, 256),  # version 1 says "none" so
    ],
)
def test_the_least_of_the_machine_and_its_containers(tmp_path, own, limits, expected):
    write(tmp_path, {"proc/meminfo": f"MemTotal:  {256 * 2**20} kB\nMemFree: 1 kB\n", "proc/self/cgroup": own})
    write(tmp_path / "sys/fs/cgroup", limits)
    assert host_memory_limit(tmp_path) == expected * GiB


def test_a_system_that_does_not_say(tmp_path):
    assert host_memory_limit(tmp_path) is None
