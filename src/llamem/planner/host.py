"""What waits in the host's memory, and what of it crosses the link in a step."""

from llamem.planner.share import Share, activation_bytes


def host_bytes(share: Share) -> int:
    """Bytes in the host's memory where most of it is in use."""
    plan, p, c = share.plan, share.param_bytes, share.compute_bytes
    layers, groups = (share.L, 0) if share.groups == 1 else (share.L // share.groups, share.groups)
    total = layers * _offloaded(share) + groups * _group_input(share)
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
    nested = share.groups > 1
    total = share.L * _offloaded(share) * (2 * passes if nested else 1 + passes)
    total += share.groups * _group_input(share) * (1 + passes) if nested else 0
    if plan.moments == "host":
        total += 2 * 2 * p * share.matrices  # there and back
    if plan.weights == "host":
        stack = p * share.L * share.layer_weights
        reads = 1 + passes * (2 if nested else 1)  # forward and backward, a group twice
        total += stack * reads + 2 * p * share.head  # and the embedding, the head
        total += 2 * p * share.tables * share.head + stack  # changed: tables are read once more, layers are at hand
        if plan.update == "after":  # layers are read once more, too; gradients go and come
            total += stack + 2 * (stack + _table_gradients(share))
        if _head_waits(share):
            total += share.compute_bytes * share.head * (1 + (passes if share.tables == 1 else 1))
    return total


def _offloaded(share: Share) -> int:
    """Bytes of a layer's activations that wait on the host."""
    return sum(activation_bytes(share, name) for name in share.offloaded)


def _group_input(share: Share) -> int:
    """Bytes of what enters a group of layers, where it waits on the host: wherever anything does."""
    return activation_bytes(share, "block_in") if share.offloaded else 0


def _head_waits(share: Share) -> bool:
    """Whether the head's gradient, with weights on the host, waits there for a backward pass over the layers."""
    return share.tables == 1 or share.backward_passes > 1


def _table_gradients(share: Share) -> int:
    """Bytes of the gradients of embedding and head; a sum of both where they are one."""
    return share.head * (share.param_bytes if share.tables == 1 else 2 * share.compute_bytes)
