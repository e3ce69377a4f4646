"""What of a model, or of an optimizer's moments, waits in the host's memory, and how it is updated piece by piece.

Moments and weights of matrices are fetched, used and put back layer by layer, tables of the vocabulary in pieces of
rows. One copy of all of them buys nothing: the compiler fetches them all before it begins. Inside a loop only one
piece is on the device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llamem.layers.custom_rules import combine, partition
from llamem.layers.host_memory import to_device, to_host
from llamem.llama.plan import Plan
from llamem.llama.weights import PARAMETERS, parameter_name
from llamem.train.optimizers import UpdateRule, is_stacked


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


# Tables of the vocabulary are cut into up to so many pieces of rows, whose size this divides: rows of a bf16 array lie
# 16 together in a TPU's memory.
PIECES, ROWS = 16, 16


def update_by_parts(update: UpdateRule, plan: Plan, grads: Any, moments: Any, params: Any) -> tuple[Any, Any]:
    """Return the new parameters and moments: of all vectors, of the layers, of each table of the vocabulary.

    `update` computes every element by itself. Gradients are on the device.
    """

    def part_of(path: tuple[Any, ...]) -> str:
        if not waits_on_host(path):
            return "vectors"
        return "layers" if is_stacked(path) else str(parameter_name(path))

    def trees(part: str) -> tuple[Any, ...]:
        return tuple(partition(tree, lambda path, _: part_of(path) == part)[0] for tree in (grads, moments, params))

    tables = sorted({part_of(path) for path, _ in jax.tree.leaves_with_path(params)} - {"layers", "vectors"})
    done = [update(*trees("vectors")), *(update_by_rows(update, plan, *trees(part)) for part in ("layers", *tables))]
    return functools.reduce(combine, done)


def update_by_rows(update: UpdateRule, plan: Plan, grads: Any, moments: Any, params: Any) -> tuple[Any, Any]:
    """Apply `update` piece by piece of the leading axis, in a loop that changes parameters and moments in place.

    All leaves are matrices of one leading axis. Gradients are on the device.
    """
    leaves = jax.tree.leaves(params)
    if not leaves or not leaves[0].shape[0]:
        return params, moments
    rows = _rows_of_a_piece(leaves[0])
    weights_there, moments_there = plan.weights == "host", plan.moments == "host"

    def cut(tree: Any, start: Array, from_host: bool) -> Any:
        pieces = jax.tree.map(lambda whole: jax.lax.dynamic_slice_in_dim(whole, start, rows), tree)
        return jax.tree.map(to_device, pieces) if from_host else pieces

    def put(tree: Any, pieces: Any, start: Array, on_host: bool) -> Any:
        pieces = jax.tree.map(to_host, pieces) if on_host else pieces
        return jax.tree.map(
            lambda whole, piece: jax.lax.dynamic_update_slice_in_dim(whole, piece, start, 0), tree, pieces
        )

    def step(carry: tuple[Any, Any], i: Array) -> tuple[tuple[Any, Any], None]:
        start, (params, moments) = i * rows, carry
        piece = cut(params, start, weights_there)
        piece_grads = jax.tree.map(lambda g, p: g.astype(p.dtype), cut(grads, start, False), piece)
        new_params, new_moments = update(piece_grads, cut(moments, start, moments_there), piece, start)
        return (put(params, new_params, start, weights_there), put(moments, new_moments, start, moments_there)), None

    return jax.lax.scan(step, (params, moments), jnp.arange(leaves[0].shape[0] // rows))[0]


def _rows_of_a_piece(leaf: Any) -> int:
    """Return one layer, or a share of a table; the whole table where no such share divides it."""
    if leaf.ndim > 2:
        return 1
    size = leaf.shape[0]
    return next((size // n for n in range(PIECES, 1, -1) if size % (n * ROWS) == 0), size)
