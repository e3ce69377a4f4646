"""What waits in the host's memory: activations between forward and backward pass, moments between steps."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

# Of one copy. The TPU compiler (libtpu 0.0.51) dies of copies to the host of 4 GiB or more.
MAX_BYTES = 2**32 - 1


def in_pieces(x_BTD: Float[Array, "B T D"], most: int = MAX_BYTES) -> list[Float[Array, "B _ D"]]:
    """The array itself, or where it has more than `most` bytes pieces of T that have not."""
    B, T, D = x_BTD.shape
    tokens = max(1, most // (B * D * x_BTD.dtype.itemsize))
    return [x_BTD] if tokens >= T else jnp.array_split(x_BTD, -(-T // tokens), axis=1)


def name_in_pieces(x_BTD: Float[Array, "B T D"], name: str, most: int = MAX_BYTES) -> Float[Array, "B T D"]:
    """`checkpoint_name(x_BTD, name)` for a policy that offloads it: in pieces of T where it has more than `most` bytes.

    Each piece is a residual of its own, under the same name.
    """
    pieces = [checkpoint_name(piece, name) for piece in in_pieces(x_BTD, most)]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def is_on_host(x: Array) -> Array:
    """The same array; says of an argument that it lies in the host's memory, which JAX does not know of shapes."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_host(x: Array) -> Array:
    """The same array in the host's memory (`pinned_host`), inside a program."""
    return jax.device_put(_row_major(x), jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """The same array in the device's memory, inside a program."""
    return _row_major(jax.device_put(x, jax.memory.Space.Device))


def _row_major(x: Array) -> Array:
    # The compiler may choose another layout for what it computes with, and then wants it on the host too, where a TPU's
    # dies of changing it.
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
