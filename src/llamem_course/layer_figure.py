"""What the arrays in the gradient of a stack of layers are, for a figure of its memory."""

from jaxmem.reading.provenance import Category

# What the larger arrays in the gradient of a stack of layers are, by the operation that makes them; the first fits.
PARTS: dict[str, Category] = {
    "splash": "workspace",
    "rematted_computation": "rematerialised",
    "w[": "weights",
    # Slices of the stacked weights.
    "squeeze": "weights",
    "jvp()/slice": "weights",
    # Gradients of slices: of a layer, and of a group in two loops.
    "transpose(jvp(jvp()))/checkpoint/dot_general": "gradients",
    "transpose(jvp())/while/body": "gradients",
    "checkpoint/broadcast_in_dim": "gradients",
}
