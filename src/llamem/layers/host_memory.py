"""Arrays on their way to the host's memory and back, and what compilers cannot do with them."""

import jax
import jax.numpy as jnp
import jaxlib
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

# Of one copy. The TPU compiler (libtpu 0.0.51) dies of copies to the host of 4 GiB or more.
MAX_BYTES = 2**32 - 1

_WRONG_ON_GPUS = ("0.10.2", "0.11.0")  # of jaxlib

# libtpu 0.0.23 makes room for all results of a scan on the device first, where JAX 0.7's types say that they lie on the
# host. XLA's own marks are not seen in types.
_TYPES_TELL = jax.__version_info__ >= (0, 8)


def in_pieces(x_BTD: Float[Array, "B T D"], most: int = MAX_BYTES) -> list[Float[Array, "B _ D"]]:
    """Return the array itself, or where it has more than `most` bytes pieces of T that have not."""
    B, T, D = x_BTD.shape
    tokens = max(1, most // (B * D * x_BTD.dtype.itemsize))
    return [x_BTD] if tokens >= T else jnp.array_split(x_BTD, -(-T // tokens), axis=1)


def name_in_pieces(x_BTD: Float[Array, "B T D"], name: str, most: int = MAX_BYTES) -> Float[Array, "B T D"]:
    """Name `x_BTD` with `checkpoint_name` for a policy that offloads it: in pieces of T above `most` bytes.

    Each piece is a residual of its own, under the same name.
    """
    pieces = [checkpoint_name(piece, name) for piece in in_pieces(x_BTD, most)]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def refuse_wrong_offload(what: str) -> None:
    """Raise RuntimeError where the program being traced is for a GPU at hand that reads offloaded arrays wrongly.

    The compiler for NVIDIA GPUs of two jaxlib versions reads what a backward pass fetches from the host's memory from
    the wrong layer, without an error: https://github.com/openxla/xla/pull/46231. `what` names the caller.
    """
    absent = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None
    if absent or jax.default_backend() != "gpu" or jaxlib.__version__ not in _WRONG_ON_GPUS:
        return
    raise RuntimeError(
        f"{what}: with jaxlib {jaxlib.__version__} NVIDIA GPUs read what is offloaded back from the wrong layer, and "
        "the gradients would be wrong without an error. Install jax and jaxlib 0.10.1, or 0.11.1 or newer, or offload "
        "nothing."
    )


def is_on_host(x: Array) -> Array:
    """Return the same array, said to lie in the host's memory: an argument's shape does not tell JAX."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_host(x: Array) -> Array:
    """Move an array to the host's memory (`pinned_host`), inside a program."""
    return jax.device_put(_row_major(x), jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """Move an array to the device's memory, inside a program."""
    return _row_major(jax.device_put(x, jax.memory.Space.Device))


def stacked_on_host(x: Array) -> Array:
    """Move to the host what a scan stacks up from turn to turn."""
    return to_host(x) if _TYPES_TELL else _marked("MoveToHost", _row_major(x))


def from_stack_on_host(x: Array) -> Array:
    """Move one turn's part of such a stack to the device."""
    return to_device(x) if _TYPES_TELL else _row_major(_marked("MoveToDevice", x))


def _marked(mark: str, x: Array) -> Array:
    move = jax.ffi.ffi_call(mark, jax.ShapeDtypeStruct(x.shape, x.dtype), custom_call_api_version=1)
    return jax.lax.platform_dependent(x, cpu=lambda x: x, default=move)


def _row_major(x: Array) -> Array:
    # The compiler may choose another layout for what it computes with, and then wants it on the host too, where a TPU's
    # dies of changing it.
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))
