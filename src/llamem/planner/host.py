"""What waits in the host's memory, what of it crosses the link in a step, and how much a host can hold."""

import os

from llamem.memory import Chip, host_memory_limit
from llamem.memory.measured import PINNED_POOL_BYTES
from llamem.planner.share import Share

_GPU_POOL_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # says more, or less, than XLA's own pool


def host_bytes(share: Share) -> int:
    """Return the bytes in the host's memory where most of it is in use."""
    plan, c = share.plan, share.compute_bytes
    total = share.layers_at_work * _offloaded(share) + _group_inputs(share)
    if plan.moments == "host":
        total += 2 * share.matrix_bytes
    if plan.weights == "host":  # a tied head's gradient waits there for the embedding's
        total += share.matrix_bytes + (c * share.head if share.trained and share.tables == 1 else 0)
    return total


def link_bytes(share: Share) -> int:
    """Return the bytes that cross the link between the device and its host in a step, both ways."""
    plan, p = share.plan, share.param_bytes
    total = 2 * share.L * _offloaded(share) + 2 * _group_inputs(share)
    if plan.moments == "host":
        total += 2 * 2 * share.matrix_bytes  # there and back
    if plan.weights == "host":  # read forward and backward, in groups twice; written once; tables are read once more
        tables, reads = p * share.tables * share.head, 3 if share.groups > 1 else 2
        total += (reads + share.trained) * (share.matrix_bytes - tables) + 2 * p * share.head
        if share.trained:
            total += 2 * tables + (2 * share.compute_bytes * share.head if share.tables == 1 else 0)
    return total


def host_limit(chip: Chip, given: int | None) -> tuple[float, str]:
    """Return how many bytes a run may keep on a chip's host, and what says so; infinity where nothing does.

    `given` is what the user says that the host holds. On GPUs XLA's pool of pinned memory is a bound, and for the chip
    at hand this machine's memory, or its container's.
    """
    limits = [(float(given), "the host")] if given is not None else []
    if chip.platform == "cuda":
        says = os.environ.get(_GPU_POOL_GB, "")
        pool = int(says) * 10**9 if says.isdigit() else PINNED_POOL_BYTES
        limits.append((float(pool), f"XLA's pool of host memory for GPUs, unless {_GPU_POOL_GB} says more,"))
    if not chip.absent and chip.platform != "cpu" and (here := host_memory_limit()):
        limits.append((float(here), "this machine, or its container,"))
    return min(limits, default=(float("inf"), ""))


def _offloaded(share: Share) -> int:
    """Return the bytes of a layer's activations that wait on the host."""
    return sum(map(share.activation_bytes, share.offloaded))


def _group_inputs(share: Share) -> int:
    """Return the bytes of what enters groups of layers, where it waits on the host: wherever anything does."""
    return share.groups * share.activation_bytes("block_in") if share.offloaded and share.groups > 1 else 0
