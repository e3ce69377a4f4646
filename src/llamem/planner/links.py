"""What chips send each other in a step, and how fast; and the pace of many chips, from one to thousands.

Nothing here has been measured on a pod. What a chip receives agrees with what the compiler plans for it.
"""

import re

from llamem.memory import CHIPS
from llamem.planner.share import Share

# By family, "v5e" or "a100": facts of `llamem.memory.Chip`.
_FAMILIES = {re.split("[-:]", name)[0]: chip for name, chip in CHIPS.items()}
HOST_LINK = {family: chip.host_link for family, chip in _FAMILIES.items() if chip.host_link}
CHIP_LINK = {family: chip.chip_link for family, chip in _FAMILIES.items() if chip.chip_link}
# Chips that the fast links join: TPU slices and machines of eight GPUs. Google Cloud's TPU pages: a pod of v5e or v6e
# has 256 chips, a v5p job up to 6,144. NVIDIA's data sheets of DGX A100 and DGX H100.
INSIDE = {"v5e": 256, "v6e": 256, "v5p": 6144, "a100": 8, "h100": 8}
# Bytes/s from a chip to those of other slices or machines. TPUs: the data-centre network (DCN) on Google Cloud's TPU
# pages, 6.4 and 25.6 Tbit/s for a pod of 256 v5e and v6e, 50 Gbit/s for a v5p. GPUs: a network card for each, of 200
# Gbit/s in a DGX A100, of 400 in a DGX H100.
NETWORK = {"v5e": 3.125e9, "v6e": 12.5e9, "v5p": 6.25e9, "a100": 25e9, "h100": 50e9}


def received(share: Share) -> dict[str, float]:
    """Return the bytes that one chip receives in a step, by mesh axis; its own part of an array need not travel.

    A layer's weights are gathered for each forward pass, the first, the one again and a nested scan's third, and their
    gradients are summed once. The head is gathered and summed once; rows of the embedding are looked up where they lie.
    Of a frozen model there are no gradients; those of adapters are summed over all devices with other tokens.
    """
    mesh, c = share.mesh, share.compute_bytes
    again = 0 if share.kept else 1 if share.groups == 1 else 2
    forward = 1 + again
    sums = 1 if share.trained else 0
    weights = (forward + sums) * share.L * share.layer_weights + (1 + sums) * share.head
    stream = share.activation_bytes("block_in")
    keys_values = 2 * share.B * share.T * mesh.context * share.K * share.h * c

    def others(parts: int) -> float:
        return (parts - 1) / parts

    found = {
        "fsdp": others(share.split) * weights * c,
        # Sums of the stream: two forward, one of them again, two backward. In a ring a sum travels twice.
        "tensor": 2 * others(mesh.tensor) * (4 + again) * share.L * stream,
        # Keys and values of the whole sequence for each forward pass, and their gradients.
        "context": others(mesh.context) * (forward + 1) * share.L * keys_values,
        "data": 2 * others(mesh.data) * share.params * c
        if share.trained
        else 2 * others(mesh.devices // mesh.tensor) * 4 * share.adapters,
    }
    return {axis: size for axis, size in found.items() if size}
