"""A stack of layers that is larger than the chip: each layer is fetched, computed and put back inside a loop.

`forward` keeps what entered each layer. `backward` goes back over them, computes each layer again and hands its
gradient to a function that may use it up at once: then no two layers' gradients ever exist together. With `groups`, as
in a nested scan, only what entered each group of layers is kept, and a group is run again before it is gone back over.

What a TPU's compiler (libtpu 0.0.51) cannot do decides some details. A matrix meets the host row-major, and no copy has
4 GiB (`llamem.layers.host_memory`). Vectors stay on the device: one row of a bf16 `[L, D]` cannot be cut out of the
host's memory.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from llamem.layers.host_memory import (
    from_stack_on_host,
    in_pieces,
    refuse_wrong_offload,
    stacked_on_host,
    to_device,
    to_host,
)

Layer = Callable[[Any, Array], Array]  # of one layer's parameters and what enters it
# Of the carry, the layer's number, its parameters and their gradients: the carry, and what is stacked over layers.
Visit = Callable[[Any, Array, Any, Any], tuple[Any, Any]]


def fetch(layer: PyTree) -> PyTree:
    """Fetch one layer's matrices from the host to the device; differentiated, gradients go to the host."""
    return jax.tree.map(lambda a: to_device(a) if a.ndim > 1 else a, layer)


def take(stacked: PyTree, i: Array, on_host: bool) -> PyTree:
    """Take layer `i` of a stack `[L, ...]` to the device."""
    layer = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), stacked)
    return fetch(layer) if on_host else layer


def put_back(stacked: PyTree, layer: PyTree, i: Array, on_host: bool) -> PyTree:
    """Return the stack with `layer`, on the device, as its layer `i`; in place where a loop carries the stack."""
    layer = jax.tree.map(lambda a: to_host(a) if a.ndim > 1 else a, layer) if on_host else layer
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, i, 0), stacked, layer)


def forward(
    layer: Layer,
    stacked: PyTree,
    x_BTD: Float[Array, "B T D"],
    *,
    weights_on_host: bool,
    inputs_on_host: bool,
    groups: int = 1,
) -> tuple[Float[Array, "B T D"], Any]:
    """Run all layers, one after the other; return the result and what entered each layer or group, for `backward`."""
    if not (n_layers := _length(stacked)):
        return x_BTD, None

    def step(x_BTD: Array, i: Array) -> tuple[Array, None]:
        return layer(take(stacked, i, weights_on_host), x_BTD), None

    def keeping(x_BTD: Array, numbers: Array) -> tuple[Array, list[Array]]:
        kept = _kept(x_BTD, inputs_on_host)
        last_BTD, _ = step(x_BTD, numbers) if groups == 1 else jax.lax.scan(step, x_BTD, numbers)
        return last_BTD, kept

    return jax.lax.scan(keeping, x_BTD, _numbers(n_layers, groups))


def backward(
    layer: Layer,
    stacked_of: Callable[[Any], PyTree],
    inputs: Any,
    dx_BTD: Float[Array, "B T D"],
    carry: Any,
    visit: Visit,
    *,
    weights_on_host: bool,
    inputs_on_host: bool,
    groups: int = 1,
) -> tuple[Float[Array, "B T D"], Any, Any]:
    """Go from the last layer to the first; return the gradient of what entered, the last carry, what `visit` stacked.

    `inputs`: as `forward` gave them. `stacked_of(carry)`: the stack of parameters, which may be in the carry, and so be
    changed by `visit(carry, i, params, gradients)`; that is given those of layer `i`, on the device.
    """
    if not (n_layers := _length(stacked_of(carry))):
        return dx_BTD, carry, None
    if inputs_on_host:
        refuse_wrong_offload("a backward pass over layers whose inputs wait on the host")

    def step(state: tuple[Array, Any], at: tuple[Array, list[Array]]) -> tuple[tuple[Array, Any], Any]:
        (dx_BTD, carry), (i, kept) = state, at
        x_BTD = _at_hand(kept, inputs_on_host)
        params = take(stacked_of(carry), i, weights_on_host)
        _, pull = jax.vjp(layer, params, x_BTD)
        d_params, dx_BTD = pull(dx_BTD)
        carry, out = visit(carry, i, params, d_params)
        return (dx_BTD, carry), out

    def group(state: tuple[Array, Any], at: tuple[Array, list[Array]]) -> tuple[tuple[Array, Any], Any]:
        numbers, kept = at
        stacked = stacked_of(state[1])  # of this group's layers none is changed yet

        def again(x_BTD: Array, i: Array) -> tuple[Array, list[Array]]:
            return layer(take(stacked, i, weights_on_host), x_BTD), _kept(x_BTD, inputs_on_host)

        _, inputs = jax.lax.scan(again, _at_hand(kept, inputs_on_host), numbers)
        return jax.lax.scan(step, state, (numbers, inputs), reverse=True)

    body = step if groups == 1 else group
    (dx_BTD, carry), out = jax.lax.scan(body, (dx_BTD, carry), (_numbers(n_layers, groups), inputs), reverse=True)
    if groups > 1:
        out = jax.tree.map(lambda a: a.reshape(n_layers, *a.shape[2:]), out)
    return dx_BTD, carry, out


def _numbers(n_layers: int, groups: int) -> Array:
    """Return the layers' numbers `[L]`, or `[groups, L / groups]`."""
    return jnp.arange(n_layers) if groups == 1 else jnp.arange(n_layers).reshape(groups, -1)


def _kept(x_BTD: Array, on_host: bool) -> list[Array]:
    return [stacked_on_host(piece) for piece in in_pieces(x_BTD)] if on_host else [x_BTD]


def _at_hand(kept: list[Array], on_host: bool) -> Array:
    return jnp.concatenate([from_stack_on_host(piece) for piece in kept], axis=1) if on_host else kept[0]


def _length(stacked: PyTree) -> int:
    leaves = jax.tree.leaves(stacked)
    return leaves[0].shape[0] if leaves else 0
