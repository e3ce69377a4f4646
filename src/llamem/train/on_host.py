"""An update whose moments or weights wait in the host's memory, piece by piece.

Moments and weights of matrices are fetched, used and put back layer by layer, tables of the vocabulary in pieces of
rows. One copy of all of them buys nothing: the compiler fetches them all before it begins. Inside a loop only one
piece is on the device.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llamem.layers.offload import to_device, to_host
from llamem.layers.trees import combine
from llamem.llama.host_memory import waits_on_host
from llamem.llama.plan import Plan
from llamem.llama.sharding import parameter_name
from llamem.train.optimizers import UpdateRule, is_stacked

# Tables of the vocabulary are cut into up to so many pieces of rows, whose size this divides: rows of a bf16 array lie
# 16 together in a TPU's memory.
PIECES, ROWS = 16, 16


def update_by_parts(update: UpdateRule, plan: Plan, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """Return the new parameters and optimizer state: of the layers, each table of the vocabulary, all vectors.

    `update` computes every element by itself. Gradients are on the device.
    """
    tables = sorted({part_of(path) for path, _ in jax.tree.leaves_with_path(params)} - {"layers", "vectors"})
    done_params, done_state = update(*(select_part(tree, "vectors") for tree in (grads, opt_state, params)))
    for part in ("layers", *tables):
        new = update_by_rows(update, plan, *(select_part(tree, part) for tree in (grads, opt_state, params)))
        # Counters, which every part counted alike, are in all of them.
        done_params, done_state = combine(done_params, new[0]), combine(done_state, new[1])
    return done_params, done_state


def update_by_rows(update: UpdateRule, plan: Plan, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """Apply `update` piece by piece of the leading axis, in a loop that changes parameters and moments in place.

    All leaves are matrices of one leading axis, or counters, which stay as they are. Gradients are on the device.
    """
    leaves = jax.tree.leaves(params)
    if not leaves or not leaves[0].shape[0]:
        return params, opt_state
    rows = _rows_of_a_piece(leaves[0])
    weights, moments = plan.weights == "host", plan.moments == "host"

    def cut(tree: Any, start: Array, from_host: bool) -> Any:
        def one(path: Any, a: Array) -> Array:
            if parameter_name(path) is None:
                return a
            piece = jax.lax.dynamic_slice_in_dim(a, start, rows)
            return to_device(piece) if from_host else piece

        return jax.tree.map_with_path(one, tree)

    def put(tree: Any, pieces: Any, start: Array, on_host: bool) -> Any:
        def one(path: Any, whole: Array, piece: Array) -> Array:
            if parameter_name(path) is None:
                return whole
            return jax.lax.dynamic_update_slice_in_dim(whole, to_host(piece) if on_host else piece, start, 0)

        return jax.tree.map_with_path(one, tree, pieces)

    def step(carry: tuple[Any, Any], i: Array) -> tuple[tuple[Any, Any], None]:
        start, (params, opt_state) = i * rows, carry
        piece = cut(params, start, weights)
        piece_grads = jax.tree.map(lambda g, p: g.astype(p.dtype), cut(grads, start, False), piece)
        new_params, new_state = update(piece_grads, cut(opt_state, start, moments), piece, start)
        return (put(params, new_params, start, weights), put(opt_state, new_state, start, moments)), None

    (params, opt_state), _ = jax.lax.scan(step, (params, opt_state), jnp.arange(leaves[0].shape[0] // rows))
    return params, opt_state


def part_of(path: tuple[Any, ...]) -> str:
    """Return which part of the work a leaf belongs to: "layers", "vectors", or the name of a table."""
    if not waits_on_host(path):
        return "vectors"
    return "layers" if is_stacked(path) else str(parameter_name(path))


def select_part(tree: Any, part: str, part_of: Any = part_of) -> Any:
    """Return the tree with the leaves of one part, and counters; None for the others, which optimizers pass over."""

    def one(path: Any, leaf: Any) -> Any:
        return leaf if parameter_name(path) is None or part_of(path) == part else None

    return jax.tree.map_with_path(one, tree)


def _rows_of_a_piece(leaf: Any) -> int:
    """Return one layer, or a share of a table; the whole table where no such share divides it."""
    if leaf.ndim > 2:
        return 1
    size = leaf.shape[0]
    return next((size // n for n in range(PIECES, 1, -1) if size % (n * ROWS) == 0), size)
