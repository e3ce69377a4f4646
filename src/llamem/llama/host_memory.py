"""What of a model, or of an optimizer's moments, waits in the host's memory where a plan says so: the matrices."""

from collections.abc import Callable
from typing import Any

import jax

from llamem.llama.sharding import PARAMETERS, parameter_name


def waits_on_host(path: tuple[Any, ...]) -> bool:
    """Whether a leaf of parameters or moments is a matrix's. Vectors are small and stay: the TPU compiler dies of
    fetching one row of a bf16 `[L, D]`.
    """
    name = parameter_name(path)
    return name is not None and len(PARAMETERS[name]) > 1


def host_sharding() -> jax.sharding.Sharding:
    """Where they lie between steps. Raises ValueError where this backend has no such memory."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def of_matrices(tree: Any, put: Callable[[Any], Any]) -> Any:
    """`put` of every leaf that is a matrix's, the others as they are."""
    return jax.tree.map_with_path(lambda path, a: put(a) if waits_on_host(path) else a, tree)
