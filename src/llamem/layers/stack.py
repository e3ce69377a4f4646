"""One layer to L layers in one call: scanned, unrolled or nested, with rematerialisation."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from llamem.layers.offload import name_in_pieces
from llamem.layers.remat import Policy, check_names, check_policy, checkpoint, offloads
from llamem.memory.gpu_offload import warn_of_wrong_offload

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
    """Applies L layers to `x`: `layer(params, x)`, or `layer(params, x, inputs)` where `per_layer` is given.

    Shapes: every leaf of `stacked` and of `per_layer` has the layers as its first axis, `[L, ...]`; L may be 0. `x` is
    any pytree, and a layer returns one of the same shapes and types (`(x, aux)` with `has_aux=True`).

    `mode`: "scan" compiles one layer and loops, "unroll" repeats it L times in the program, "nested" scans over groups
    of layers and rematerialises groups as well as layers, for one more forward pass; `group_count` chooses the groups.
    Nested holds the weights and gradients of one group a second time, so it pays where inputs outweigh weights: many
    layers on long sequences. Under a policy that offloads, the inputs of all groups wait on the host, beside what one
    group offloads. A prime L has no groups and is scanned. With `remat=None` nothing is rematerialised: the nested
    loops are then a scan in another shape. `remat`: None, a name from `llamem.POLICIES` or a `llamem.Policy`. Neither
    changes a value; both change what is stored for the backward pass. Unrolled, the last layer is left as it is: its
    backward pass begins at once, so recomputing it saves nothing.

    Returns `x`, then (if asked) `aux` stacked to `[L, ...]`, then (if asked) the hidden states `[L + 1, ...]`: what
    entered each layer, and the result. Raises ValueError for unequal L, unknown modes and unknown names in a policy,
    TypeError for a layer that changes the shape or type of `x`.
    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; the system answered is SkyRL tx.
    """
    if mode not in ("scan", "unroll", "nested"):
        raise ValueError(f"mode={mode!r}: expected 'scan', 'unroll' or 'nested'.")
    _check_arguments(layer, per_layer)
    xs, x = _arrays((stacked, per_layer), "stacked or per_layer"), _arrays(x, "x")
    n_layers = _common_length(xs)

    def body(x: Any, layer_xs: tuple[Any, Any]) -> tuple[Any, Any]:
        params, inputs = layer_xs
        result = layer(params, x) if per_layer is None else layer(params, x, inputs)
        if has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(f"with has_aux=True a layer returns (x, aux), a tuple of two; got {type(result).__name__}.")
        new_x, aux = result if has_aux else (result, None)
        return new_x, (aux, x if return_hidden else None)

    _check_layer(body, x, xs, remat)
    if mode != "unroll" and offloads(remat):
        warn_of_wrong_offload(f"apply_stack(remat={remat!r})")
    if mode == "unroll" and n_layers > 0:
        x, (aux, hidden) = _unroll(body, x, xs, n_layers, remat)
    elif mode == "nested" and (groups := group_count(n_layers, _bytes(x), _bytes(xs[0]) // max(n_layers, 1))) > 1:
        x, (aux, hidden) = _nest(body, x, xs, groups, remat)
    else:
        x, (aux, hidden) = jax.lax.scan(checkpoint(body, remat), x, xs)

    results = [x]
    if has_aux:
        results.append(aux)
    if return_hidden:
        results.append(jax.tree.map(lambda inputs, last: jnp.concatenate([inputs, last[None]]), hidden, x))
    return results[0] if len(results) == 1 else tuple(results)


def stack_layers(layers: list[Any]) -> Any:
    """Stacks the parameters of L equal layers, once: leaves `[...]` of each become leaves `[L, ...]`.

    Do this when a model is made or loaded, never inside a training step: there it copies every weight in every step.
    Raises ValueError for an empty list, where there is nothing to take the shapes from, and for layers of other
    structure or shape than the first.
    """
    if not isinstance(layers, (list, tuple)):
        raise TypeError(f"stack_layers({type(layers).__name__}): expected a list of the layers' parameters.")
    if not layers:
        raise ValueError(
            "stack_layers([]): there is no layer to take shapes from; build leaves of shape [0, ...] instead."
        )
    layers = [_arrays(layer, f"layer {i}") for i, layer in enumerate(layers)]
    for i, layer in enumerate(layers):
        if (wrong := _shapes(layer)) != (first := _shapes(layers[0])):
            raise ValueError(
                f"stack_layers: layer {i} is not shaped as layer 0, so they cannot share one array. Layer 0: {first}. "
                f"Layer {i}: {wrong}. Apply layers of another shape on their own, before or after the stack."
            )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def unstack_layers(stacked: Any) -> list[Any]:
    """The inverse of `stack_layers`: a list of L pytrees, for checkpoints of other projects."""
    stacked = _arrays(stacked, "stacked")
    return [_index(stacked, i) for i in range(_common_length(stacked))]


def group_count(n_layers: int, carry_bytes: int, layer_bytes: int) -> int:
    """The number of groups G of a nested scan that holds fewest bytes; 1 where L has no divisor between 1 and L.

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
        x, out = (rematerialised if i < n_layers - 1 else body)(x, _index(xs, i))
        outs.append(out)
    return x, stack_layers(outs)


def _nest(body: Callable, x: Any, xs: Any, groups: int, remat: str | Policy | None) -> tuple[Any, Any]:
    grouped = jax.tree.map(lambda a: a.reshape(groups, len(a) // groups, *a.shape[1:]), xs)
    away = isinstance(policy := check_policy(remat), Policy) and bool(policy.offload)

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


def _index(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], tree)


def _arrays(tree: Any, what: str) -> Any:
    """Every leaf as JAX holds it: NumPy's float64 becomes float32 unless x64 is on."""

    def array(path: tuple, leaf: Any) -> jax.Array:
        try:
            return jnp.asarray(leaf)
        except (TypeError, ValueError):
            place = f"{what}{jax.tree_util.keystr(path)}"
            raise TypeError(f"{place} is {type(leaf).__name__} {str(leaf)[:60]!r}: expected an array.") from None

    return jax.tree.map_with_path(array, tree)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def _common_length(xs: Any) -> int:
    shapes = _shapes(xs)
    scalars = [name for name, shape in shapes.items() if not shape]
    lengths = {name: shape[0] for name, shape in shapes.items() if shape}
    if scalars or len(set(lengths.values())) != 1:
        few = dict(list(lengths.items())[:6])
        more = f" and {len(lengths) - 6} more" if len(lengths) > 6 else ""
        raise ValueError(
            "stacked parameters and per-layer inputs need one common first axis, the layers: make it from a list of "
            f"layers with llamem.stack_layers(layers). First axes seen: {few}{more}"
            f"{f', and scalars at {scalars[:6]}' if scalars else ''}."
        )
    return next(iter(lengths.values()))


def _check_arguments(layer: Any, per_layer: Any) -> None:
    """Whether a layer can be called with what it will be given, as far as Python knows its arguments."""
    if not callable(layer):
        raise TypeError(f"layer is {type(layer).__name__}: expected a function layer(params, x) that returns x.")
    try:
        signature = inspect.signature(layer)
    except (TypeError, ValueError):
        return
    given = ("params", "x") if per_layer is None else ("params", "x", "inputs")
    try:
        signature.bind(*given)
    except TypeError:
        remedy = (
            "Where it takes inputs of its own for each layer, give them as per_layer, with leaves [L, ...]."
            if per_layer is None
            else "Give it a third argument, or leave per_layer out."
        )
        raise TypeError(
            f"the layer is called as layer({', '.join(given)}), but its arguments are {signature}. {remedy}"
        ) from None


def _check_layer(body: Callable, x: Any, xs: Any, remat: str | Policy | None) -> None:
    x_in = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), xs)
    try:
        jaxpr, (x_out, _) = jax.make_jaxpr(body, return_shape=True)(x_in, one)
    except Exception as error:
        if _looks_like_a_list_of_layers(xs[0]):
            raise TypeError(
                "call apply_stack(layer, llamem.stack_layers(layers), x): stacked is a list of layers, and a layer was "
                f"given all of them at once ({type(error).__name__}: {error})."
            ) from error
        raise
    x_out = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x_out)
    if x_out != x_in:
        raise TypeError(
            f"a layer must return x as it came, so that the next layer can take it. In: {x_in}. Out: {x_out}. "
            "Cast or project the result back inside the layer; other outputs go through has_aux=True."
        )
    check_names(remat, jaxpr)


def _looks_like_a_list_of_layers(stacked: Any) -> bool:
    is_list = isinstance(stacked, (list, tuple)) and len(stacked) > 0
    return is_list and all(_shapes(layer) == _shapes(stacked[0]) for layer in stacked)
