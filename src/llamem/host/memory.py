"""What of a model, or of an optimizer's moments, waits in the host's memory where a plan says so: the matrices."""

from collections.abc import Callable
from typing import Any

import jax

from llamem.llama.weights import PARAMETERS, parameter_name


def waits_on_host(path: tuple[Any, ...]) -> bool:
    """Return whether a leaf of parameters or moments is a matrix's. Vectors stay: the TPU compiler dies of
    fetching one row of a bf16 `[L, D]`.
    """
    name = parameter_name(path)
    return name is not None and len(PARAMETERS[name]) > 1


def host_sharding() -> jax.sharding.Sharding:
    """Return where a compiler is told that they lie between steps. Raise ValueError where there is no such memory."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def host_place() -> jax.sharding.Sharding:
    """Return where this process puts its own: there, too; before JAX 0.10.2 on a CPU in its plain memory, the same."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0]) if _cpu_leaves_nothing() else host_sharding()


def same_places(state: Any) -> Any:
    """Return `out_shardings` of a jitted step that returns `(state, metrics)`: each array lies where the old one did.

    Without them JAX 0.7 brings home what a step leaves on the host. None where the compiler cannot be told.
    """
    return None if _cpu_leaves_nothing() else (jax.tree.map(lambda leaf: leaf.sharding, state), None)


def _cpu_leaves_nothing() -> bool:
    """Return whether programs can leave no result in the host's memory: for a CPU, before JAX 0.10.2.

    They end with NOT_FOUND (annotate_device_placement) if they are told where results lie, or the process dies.
    """
    return jax.__version_info__ < (0, 10, 2) and jax.default_backend() == "cpu"


def of_matrices(tree: Any, put: Callable[[Any], Any]) -> Any:
    """Apply `put` to every leaf that is a matrix's, and return the others as they are."""
    return jax.tree.map_with_path(lambda path, a: put(a) if waits_on_host(path) else a, tree)
