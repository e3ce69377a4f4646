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
    """Where a compiler is told that they lie between steps. Raises ValueError where this backend has no such memory."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def host_place() -> jax.sharding.Sharding:
    """Where this process puts its own: there, too, but for old CPUs' programs.

    Before JAX 0.10.2 those cannot leave a result there (NOT_FOUND, or a process that dies). A CPU's memory is the
    host's in any case.
    """
    old = jax.__version_info__ < (0, 10, 2) and jax.default_backend() == "cpu"
    return jax.sharding.SingleDeviceSharding(jax.devices()[0]) if old else host_sharding()


def of_matrices(tree: Any, put: Callable[[Any], Any]) -> Any:
    """`put` of every leaf that is a matrix's, the others as they are."""
    return jax.tree.map_with_path(lambda path, a: put(a) if waits_on_host(path) else a, tree)
