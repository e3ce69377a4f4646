"""An optimizer whose moments wait in the host's memory: fetched, used and put back layer by layer.

One copy of all moments buys nothing: the compiler fetches them all before it begins. Inside a loop over layers only one
layer's are on the device.
"""

from typing import Any

import jax
import optax
from jaxtyping import Array

from llamem.layers.offload import is_on_host, to_device, to_host
from llamem.llama.sharding import PARAMETERS, parameter_name

# Tables of the vocabulary are cut into up to so many pieces of rows, whose size this divides: rows of a bf16 array lie
# 16 together in a TPU's memory.
PIECES, ROWS = 16, 16


def waits_on_host(path: tuple[Any, ...]) -> bool:
    """Whether a leaf of an optimizer's state is a moment of a matrix. Vectors are small and stay: the TPU compiler dies
    of fetching one row of a bf16 `[L, D]`.
    """
    name = parameter_name(path)
    return name is not None and len(PARAMETERS[name]) > 1


def host_sharding() -> jax.sharding.Sharding:
    """Where moments lie between steps. Raises ValueError where this backend has no such memory."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def update_in_turn(optimizer: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """`optimizer`'s new parameters and its new state, whose moments of matrices lie on the host, as given.

    `optimizer` computes every element by itself: what it needs of all gradients, such as their norm, it knows already.
    """
    opt_state = jax.tree.map_with_path(lambda path, a: is_on_host(a) if waits_on_host(path) else a, opt_state)
    tables = sorted({_part(path) for path, _ in jax.tree.leaves_with_path(params)} - {"layers", "vectors"})
    done_params, done_state = _update(optimizer, *(_select(tree, "vectors") for tree in (grads, opt_state, params)))
    for part in ("layers", *tables):
        new = _in_turn(optimizer, *(_select(tree, part) for tree in (grads, opt_state, params)))
        # Counters, which every part counted alike, are in all of them.
        done_params, done_state = _join(done_params, new[0]), _join(done_state, new[1])
    return done_params, done_state


def _in_turn(optimizer: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """`_update` piece by piece of the leading axis, in a loop that changes parameters and moments in place."""
    leaves = jax.tree.leaves(params)
    if not leaves or not leaves[0].shape[0]:
        return params, opt_state
    rows = _rows(leaves[0])

    def cut(tree: Any, start: Array) -> Any:
        def one(path: Any, a: Array) -> Array:
            return a if parameter_name(path) is None else jax.lax.dynamic_slice_in_dim(a, start, rows)

        return jax.tree.map_with_path(one, tree)

    def put(path: Any, whole: Array, piece: Array, start: Array) -> Array:
        if parameter_name(path) is None:
            return whole
        return jax.lax.dynamic_update_slice_in_dim(whole, piece, start, 0)

    def step(carry: tuple[Any, Any], i: Array) -> tuple[tuple[Any, Any], None]:
        start = i * rows
        (params, opt_state), (p, s) = carry, cut(carry, start)
        s = jax.tree.map_with_path(lambda path, a: to_device(a) if waits_on_host(path) else a, s)
        p, s = _update(optimizer, cut(grads, start), s, p)
        s = jax.tree.map_with_path(lambda path, a: to_host(a) if waits_on_host(path) else a, s)
        new = jax.tree.map_with_path(lambda *leaf: put(*leaf, start), (params, opt_state), (p, s))
        return new, None

    (params, opt_state), _ = jax.lax.scan(step, (params, opt_state), jax.numpy.arange(leaves[0].shape[0] // rows))
    return params, opt_state


def _update(optimizer: optax.GradientTransformation, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _part(path: tuple[Any, ...]) -> str:
    """Which part of the work a leaf belongs to: "layers", "vectors", or the name of a table."""
    if not waits_on_host(path):
        return "vectors"
    in_blocks = any(getattr(entry, "key", None) == "blocks" for entry in path)
    return "layers" if in_blocks else str(parameter_name(path))


def _select(tree: Any, part: str) -> Any:
    """The tree with the leaves of one part, and counters; None for the others, which optimizers pass over."""

    def one(path: Any, leaf: Any) -> Any:
        return leaf if parameter_name(path) is None or _part(path) == part else None

    return jax.tree.map_with_path(one, tree)


def _join(one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, is_leaf=lambda leaf: leaf is None)


def _rows(leaf: Any) -> int:
    """Rows of one piece: a layer, or a share of a table; the whole table where no such share divides it."""
    if leaf.ndim > 2:
        return 1
    size = leaf.shape[0]
    return next((size // n for n in range(PIECES, 1, -1) if size % (n * ROWS) == 0), size)
