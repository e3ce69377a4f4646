"""What waits in the host's memory, and what of it crosses the link in a step."""

from llamem.planner.share import Share, activation_bytes


def host_bytes(share: Share) -> int:
    """Bytes in the host's memory where most of it is in use."""
    plan, p, c = share.plan, share.param_bytes, share.compute_bytes
    total = share.L * sum(activation_bytes(share, name) for name in share.offloaded)
    if plan.moments == "host":
        total += 2 * p * share.matrices
    if plan.weights == "host":
        total += p * share.matrices + (c * share.head if _head_waits(share) else 0)
        if plan.update == "after":
            total += p * share.L * share.layer_weights + _table_gradients(share)
    return total


def link_bytes(share: Share) -> int:
    """Bytes that cross the link between the device and its host in a step, both ways."""
    plan, p, passes = share.plan, share.param_bytes, share.backward_passes
    inputs = share.L * sum(activation_bytes(share, name) for name in share.offloaded)
    total = inputs * (1 + passes)
    if plan.moments == "host":
        total += 2 * 2 * p * share.matrices  # there and back
    if plan.weights == "host":
        stack = p * share.L * share.layer_weights
        total += stack * (1 + passes) + 2 * p * share.head  # read forward and backward; the embedding, the head
        total += 2 * p * share.tables * share.head + stack  # changed: tables are read once more, layers are at hand
        if plan.update == "after":  # layers are read once more, too; gradients go and come
            total += stack + 2 * (stack + _table_gradients(share))
        if _head_waits(share):
            reads = passes if share.tables == 1 else 1
            total += share.compute_bytes * share.head * (1 + reads)
    return total


def _head_waits(share: Share) -> bool:
    """Whether the head's gradient, with weights on the host, waits there for a backward pass over the layers."""
    return share.tables == 1 or share.backward_passes > 1


def _table_gradients(share: Share) -> int:
    """Bytes of the gradients of embedding and head; a sum of both where they are one."""
    return share.head * (share.param_bytes if share.tables == 1 else 2 * share.compute_bytes)
