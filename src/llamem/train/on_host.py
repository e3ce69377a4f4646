"""What of a training state waits in the host's memory, and an optimizer that works on it piece by piece.

Moments and weights of matrices are fetched, used and put back layer by layer, tables of the vocabulary in pieces of
rows. One copy of all of them buys nothing: the compiler fetches them all before it begins. Inside a loop only one
piece is on the device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from llamem.layers.offload import is_on_host, to_device, to_host
from llamem.llama.host_memory import of_matrices, waits_on_host
from llamem.llama.plan import Plan
from llamem.llama.sharding import parameter_name

# Tables of the vocabulary are cut into up to so many pieces of rows, whose size this divides: rows of a bf16 array lie
# 16 together in a TPU's memory.
PIECES, ROWS = 16, 16

# Of gradients, the optimizer's state and parameters, and of the number of their first row or layer: new parameters and
# the new state.
Update = Callable[..., tuple[Any, Any]]


def said(params: Any, opt_state: Any, plan: Plan) -> tuple[Any, Any]:
    """Arguments of a program, with where they are said again: JAX does not know it of shapes."""
    params = of_matrices(params, is_on_host) if plan.weights == "host" else params
    return params, of_matrices(opt_state, is_on_host) if plan.moments == "host" else opt_state


def update_in_turn(update: Update, plan: Plan, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """The new parameters and optimizer state, part by part: the layers, each table of the vocabulary, all vectors.

    `update` computes every element by itself: what it needs of all gradients, such as their norm, it knows already.
    With weights on the host, gradients of matrices are there, too.
    """
    tables = sorted({part_of(path) for path, _ in jax.tree.leaves_with_path(params)} - {"layers", "vectors"})
    done_params, done_state = update(*(select(tree, "vectors") for tree in (grads, opt_state, params)))
    for part in ("layers", *tables):
        new = in_turn(update, plan, *(select(tree, part) for tree in (grads, opt_state, params)))
        # Counters, which every part counted alike, are in all of them.
        done_params, done_state = join(done_params, new[0]), join(done_state, new[1])
    return done_params, done_state


def in_turn(
    update: Update, plan: Plan, grads: Any, opt_state: Any, params: Any, grads_on_host: bool | None = None
) -> tuple[Any, Any]:
    """`update` piece by piece of the leading axis, in a loop that changes parameters and moments in place.

    All leaves are matrices of one leading axis, or counters, which stay as they are.
    """
    leaves = jax.tree.leaves(params)
    if not leaves or not leaves[0].shape[0]:
        return params, opt_state
    rows = _rows(leaves[0])
    weights, moments = plan.weights == "host", plan.moments == "host"
    d_weights = weights if grads_on_host is None else grads_on_host

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
        pieces = cut(grads, start, d_weights), cut(opt_state, start, moments), cut(params, start, weights)
        new_params, new_state = update(*_in_types_of_weights(*pieces), start)
        return (put(params, new_params, start, weights), put(opt_state, new_state, start, moments)), None

    (params, opt_state), _ = jax.lax.scan(step, (params, opt_state), jnp.arange(leaves[0].shape[0] // rows))
    return params, opt_state


def _in_types_of_weights(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any, Any]:
    return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params), opt_state, params


def part_of(path: tuple[Any, ...]) -> str:
    """Which part of the work a leaf belongs to: "layers", "vectors", or the name of a table."""
    if not waits_on_host(path):
        return "vectors"
    return "layers" if in_blocks(path) else str(parameter_name(path))


def in_blocks(path: tuple[Any, ...]) -> bool:
    """Whether a leaf is of the stacked layers, and so has them as its first axis."""
    return any(getattr(entry, "key", None) == "blocks" for entry in path)


def select(tree: Any, part: str, of: Callable[[tuple[Any, ...]], str] = part_of) -> Any:
    """The tree with the leaves of one part, and counters; None for the others, which optimizers pass over."""

    def one(path: Any, leaf: Any) -> Any:
        return leaf if parameter_name(path) is None or of(path) == part else None

    return jax.tree.map_with_path(one, tree)


def join(one: Any, other: Any) -> Any:
    """Two selections of a tree as one."""
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, is_leaf=lambda leaf: leaf is None)


def _rows(leaf: Any) -> int:
    """Rows of one piece: a layer, or a share of a table; the whole table where no such share divides it."""
    if leaf.ndim > 2:
        return 1
    size = leaf.shape[0]
    return next((size // n for n in range(PIECES, 1, -1) if size % (n * ROWS) == 0), size)
