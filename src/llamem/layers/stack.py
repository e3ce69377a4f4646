"""One layer to L layers in one call: scanned, unrolled or nested, with rematerialisation."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from llamem._checks import check_one_of
from llamem.layers.module_state import Watch, check_not_lost, has_state, set_variables
from llamem.layers.offload import name_in_pieces, refuse_wrong_offload
from llamem.layers.remat import Policy, check_names, check_policy, checkpoint, offloads
from llamem.layers.stacking import common_length, is_array, layer_at
from llamem.layers.trees import combine, partition

Mode = Literal["scan", "unroll", "nested"]


def apply_stack(
    layer: Callable[..., Any],
    stacked: Any,
    x: Any,
    per_layer: Any = None,
    *,
    mode: Mode = "scan",
    remat: str | Policy | None = None,
    has_aux: bool = False,
    return_hidden: bool = False,
) -> Any:
    """Apply L layers to `x`: `layer(params, x)`, or `layer(params, x, inputs)` where `per_layer` is given.

    Shapes: every array of `stacked` and of `per_layer` has the layers as its first axis, `[L, ...]`; L may be 0. `x` is
    any pytree, and a layer returns one of the same shapes and types (`(x, aux)` with `has_aux=True`). Python values in
    `stacked` are the same for all layers. Layers of several kinds say which they are: with
    `per_layer=jnp.array([0, 0, 1, ...])` a layer is `lambda p, x, kind: jax.lax.switch(kind, [local, full], p, x)`.

    `stacked` may be an nnx module, `apply_stack(lambda layer, x: layer(x), module, x)`: counters of random streams,
    statistics and whatever else a layer sets of its variables are set in `module`, as a list of layers would have it.

    `mode`: "scan" compiles one layer and loops, "unroll" repeats it L times in the program, "nested" scans over groups
    of layers and rematerialises groups as well as layers, for one more forward pass; `group_count` chooses the groups.
    Nested holds the weights and gradients of one group a second time, so it pays where inputs outweigh weights: many
    layers on long sequences. Under a policy that offloads, the inputs of all groups wait on the host, beside what one
    group offloads. A prime L has no groups and is scanned. With `remat=None` nothing is rematerialised: the nested
    loops are then a scan in another shape. `remat`: None, a name from `llamem.POLICIES` or a `llamem.Policy`. Neither
    changes a value; both change what is stored for the backward pass. Unrolled, the last layer is left as it is: its
    backward pass begins at once, so recomputing it saves nothing.

    Returns `x`, then (if asked) `aux` stacked to `[L, ...]`, then (if asked) the hidden states `[L + 1, ...]`: what
    entered each layer, and the result. Raises ValueError for unequal L, unknown modes, unknown names in a policy and
    state of an nnx module that would be lost, TypeError for a layer that changes the shape or type of `x`.
    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; the system answered is SkyRL tx.
    """
    check_one_of("mode", mode, get_args(Mode))
    arrays, static = partition(stacked, lambda _, leaf: is_array(leaf))
    xs, x = jax.tree.map(jnp.asarray, ((arrays, per_layer), x))  # NumPy's float64 becomes float32 unless x64 is on
    n_layers = common_length(xs)

    def body(x: Any, layer_xs: tuple[Any, Any]) -> tuple[Any, Any]:
        params, inputs = combine(layer_xs[0], static), layer_xs[1]
        state = Watch((params, inputs))
        try:
            result = layer(params, x) if per_layer is None else layer(params, x, inputs)
        except Exception as error:
            if isinstance(stacked, Sequence):
                error.add_note("stacked is a list: one of layers goes through llamem.stack_layers(layers) first.")
            raise
        if has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(f"with has_aux=True a layer returns (x, aux), a tuple of two; got {type(result).__name__}.")
        new_x, aux = result if has_aux else (result, None)
        _check_same_types(x, new_x)
        return new_x, (aux, x if return_hidden else None, state.changed())

    policy = check_policy(remat)
    if (isinstance(policy, Policy) and policy.names) or has_state(xs):  # else a scan traces the layer soon enough
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), xs)
        check_names(remat, check_not_lost(body, x, one))
    if mode != "unroll" and offloads(remat):
        refuse_wrong_offload(f"apply_stack(remat={remat!r})")
    if mode == "unroll" and n_layers > 0:
        x, outs = _unroll(body, x, xs, n_layers, remat)
    elif mode == "nested" and (groups := group_count(n_layers, _bytes(x), _bytes(xs[0]) // max(n_layers, 1))) > 1:
        x, outs = _nest(body, x, xs, groups, remat)
    else:
        x, outs = jax.lax.scan(checkpoint(body, remat), x, xs)
    aux, hidden, changed = outs
    set_variables((stacked, per_layer), changed)

    results = [x]
    if has_aux:
        results.append(aux)
    if return_hidden:
        results.append(jax.tree.map(lambda inputs, last: jnp.concatenate([inputs, last[None]]), hidden, x))
    return results[0] if len(results) == 1 else tuple(results)


def group_count(n_layers: int, carry_bytes: int, layer_bytes: int) -> int:
    """Return the number of groups G of a nested scan that holds fewest bytes; 1 where L has no divisor between 1 and L.

    `carry_bytes` are those of `x`, `layer_bytes` those of one layer's weights. While a group of L/G layers is at work,
    the inputs of G groups and of its own L/G layers are alive, and a second time its weights, and their gradients:
    `(G + L/G) * carry_bytes + 2 * (L/G) * layer_bytes`. One layer's workspace comes on top, whatever G is.
    Long sequences lead to about sqrt(L) groups, heavy weights to more and smaller ones. See notebook 03.
    """

    def cost(groups: int) -> int:
        per_group = n_layers // groups
        return (groups + per_group) * carry_bytes + 2 * per_group * layer_bytes

    return min((g for g in range(2, n_layers) if n_layers % g == 0), key=cost, default=1)


def _unroll(body: Callable, x: Any, xs: Any, n_layers: int, remat: str | Policy | None) -> tuple[Any, Any]:
    rematerialised = checkpoint(body, remat)
    outs = []
    for i in range(n_layers):
        x, out = (rematerialised if i < n_layers - 1 else body)(x, layer_at(xs, i))
        outs.append(out)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def _nest(body: Callable, x: Any, xs: Any, groups: int, remat: str | Policy | None) -> tuple[Any, Any]:
    grouped = jax.tree.map(lambda a: a.reshape(groups, len(a) // groups, *a.shape[1:]), xs)
    away = offloads(remat)

    def group(x: Any, xs: Any) -> tuple[Any, Any]:
        x = jax.tree.map(_named, x) if away else x
        return jax.lax.scan(checkpoint(body, remat), x, xs)

    # The group keeps its input alone, where the policy has room for it. One that saved more out here would save it for
    # all L layers at once.
    keep = Policy(offload=("group_in",)) if away else None if remat is None else "nothing"
    x, outs = jax.lax.scan(checkpoint(group, keep), x, grouped)
    return x, jax.tree.map(lambda a: a.reshape(groups * a.shape[1], *a.shape[2:]), outs)


def _named(x: jax.Array) -> jax.Array:
    return name_in_pieces(x, "group_in") if x.ndim == 3 else checkpoint_name(x, "group_in")


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _check_same_types(x: Any, new_x: Any) -> None:
    def types(tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), tree)

    if types(x) != types(new_x):
        raise TypeError(
            f"a layer must return x as it came, so that the next layer can take it. In: {types(x)}. Out: "
            f"{types(new_x)}. Cast or project the result back inside the layer; other outputs go through has_aux=True."
        )
