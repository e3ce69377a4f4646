"""One layer to L layers in one call: scanned, unrolled or nested, with rematerialisation."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxmem.common.checks import check_one_of, show
from llamem.layers.custom_rules import combine, partition
from llamem.layers.host_memory import name_in_pieces, refuse_wrong_offload
from llamem.layers.module_state import (
    Watch,
    changed_by,
    check_not_lost,
    layers_axis_named,
    layers_axis_unnamed,
    set_variables,
    variables_in,
)
from llamem.layers.remat import (
    Policy,
    check_names,
    check_policy,
    checkpoint,
    offloads,
)


def stack_layers(layers: Sequence[Any]) -> Any:
    """Stack the parameters of L equal layers, once: leaves `[...]` of each become leaves `[L, ...]`.

    Layers are pytrees of arrays or of shapes (`jax.ShapeDtypeStruct`), nnx or equinox modules; their list may be an
    `nnx.List`. Python numbers, flags and functions stay what they are, one for all layers: an optimizer cannot train
    them. Do this when a model is made or loaded, never inside a training step: there it copies every weight each step.
    Raises ValueError for an empty list, for layers that differ in structure, shapes or in a Python value, and for nnx
    layers that share a variable; TypeError for what is no list.
    """
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise TypeError(f"stack_layers({type(layers).__name__}): expected a list of the layers' parameters.")
    if not layers:
        raise ValueError(
            "stack_layers([]): there is no layer to take shapes from; build leaves of shape [0, ...] instead."
        )
    layers = list(layers)
    _check_nothing_shared(layers)
    _check_built_alike(layers)

    def stacked(path: tuple, *leaves: Any) -> Any:
        if not all(map(is_array, leaves)):
            _check_alike(jax.tree_util.keystr(path), leaves)
            return leaves[0]
        if len(shapes := dict.fromkeys(leaf.shape for leaf in leaves)) > 1:
            place = jax.tree_util.keystr(path)
            raise ValueError(f"stack_layers: {place} has the shapes {', '.join(map(str, shapes))}: give layers of one.")
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return jax.eval_shape(lambda *arrays: jnp.stack(arrays), *leaves)
        return jnp.stack(leaves)

    return layers_axis_named(jax.tree.map_with_path(stacked, *layers))


def unstack_layers(stacked: Any) -> list[Any]:
    """Return the layers of a stack as a list of L pytrees, for checkpoints of other projects: undo `stack_layers`."""
    return [layers_axis_unnamed(layer_at(stacked, i)) for i in range(common_length(stacked))]


def layer_at(stacked: Any, i: int) -> Any:
    """Return layer i of a stack."""

    def of_layer(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda array: array[i], leaf)
        return leaf[i] if is_array(leaf) else leaf

    return jax.tree.map(of_layer, stacked)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, or the shape of one, and no Python value."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def common_length(stacked: Any) -> int:
    """Return L. Raises ValueError where the arrays of a stack have no common first axis."""
    leaves = jax.tree.leaves_with_path(stacked)
    if not any(is_array(leaf) for _, leaf in leaves):
        raise ValueError(
            f"a stack without an array, {show(stacked)}: nothing says how many layers there are. Give parameters or "
            "per_layer inputs [L, ...], from a list of layers llamem.stack_layers(layers); of no layers, [0, ...]."
        )
    shapes = {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves if is_array(leaf)}
    if () in shapes.values() or len({shape[0] for shape in shapes.values()}) != 1:
        raise ValueError(
            "stacked parameters and per-layer inputs need one common first axis, the layers: make it from a list of "
            f"layers with llamem.stack_layers(layers). Shapes seen: {dict(list(shapes.items())[:6])} of {len(shapes)}. "
            "Of a Python number that a transformation made a scalar array (a dropout rate, say) take only the arrays "
            "through it: params, static = eqx.partition(model, eqx.is_array)."
        )
    return next(iter(shapes.values()))[0]


def _check_nothing_shared(layers: list[Any]) -> None:
    owner: dict[int, int] = {}
    for i, layer in enumerate(layers):
        for variable in variables_in(layer):
            if (other := owner.setdefault(id(variable), i)) != i:
                raise ValueError(
                    f"stack_layers: layers {other} and {i} share an nnx.{type(variable).__name__}, of which a stack "
                    "would hold a copy for each: random numbers would be the same in all layers, tied weights would "
                    "come apart. Give each layer its own: of a random stream rngs.fork()."
                )


def _check_built_alike(layers: list[Any]) -> None:
    """Raise ValueError where a layer is another pytree than the first: it has other fields, or another static one."""
    structure = jax.tree.structure(layers[0])
    odd = next((i for i, layer in enumerate(layers) if jax.tree.structure(layer) != structure), None)
    if odd is None:
        return
    place, first, other = _first_difference(layers[0], layers[odd]) or ("the structure", "one", "another")
    if type(first).__name__ == "StateIndex":
        raise ValueError(
            f"stack_layers: {place} is an equinox StateIndex, and each layer has its own. Make layers with state all "
            "at once: stacked, state = equinox.filter_vmap(equinox.nn.make_with_state(Layer))(keys)."
        )
    raise ValueError(
        f"stack_layers: {place or 'the whole'} is {_said(first)} in layer 0 and {_said(other)} in layer {odd}, and all "
        "layers of a stack are one program. Set it alike, and give what differs from layer to layer as an array in "
        "per_layer, by which a layer chooses with jnp.where or jax.lax.cond; or make one module of each group of "
        "layers, of four where every fourth is of another kind, and stack the groups."
    )


class _Missing:
    def __repr__(self) -> str:
        return "not there"


def _first_difference(first: Any, other: Any, place: str = "") -> tuple[str, Any, Any] | None:
    """Return where two objects first differ, arrays aside, and what stands there in both."""
    if is_array(first) and is_array(other):
        return None
    parts, others = _parts(first), _parts(other)
    if type(first) is not type(other) or parts is None or others is None:
        return None if first is other or first == other else (place, first, other)
    for name in {**parts, **others}:
        if name not in parts or name not in others:
            return place + name, *(members.get(name, _Missing()) for members in (parts, others))
        if difference := _first_difference(parts[name], others[name], place + name):
            return difference
    return None


def _said(value: Any) -> str:
    """Return a Python value as it is, a module or variable by its class, and of an array its shape."""
    if isinstance(value, nnx.Variable) or _parts(value) is not None:
        return type(value).__name__
    return f"an array {value.shape}" if is_array(value) else show(value)


def _parts(value: Any) -> dict[str, Any] | None:
    """Return what a module or collection is made of, by how it is reached; None for any other value."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {f"[{i}]": part for i, part in enumerate(value)}
    is_module = isinstance(value, nnx.Pytree) or dataclasses.is_dataclass(value)
    if not is_module or isinstance(value, type) or type(value).__name__ == "StateIndex":
        return None
    return {f".{name}": part for name, part in vars(value).items() if not name.startswith("_pytree__")}


def _check_alike(place: str, values: Sequence[Any]) -> None:
    """Raise ValueError where a Python value of a layer is another one's: the stack would have the first one's."""
    for i, value in enumerate(values):
        if is_array(value) != is_array(values[0]) or not (value is values[0] or value == values[0]):
            raise ValueError(
                f"stack_layers: {place} is {show(values[0])} in layer 0 and {show(value)} in layer {i}. A Python value "
                "is part of the program, which all layers share. Where it should differ from layer to layer, make it "
                "an array (jnp.asarray), or give it as per_layer; else set it alike."
            )


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

    def run(x: Any, layer_xs: tuple[Any, Any]) -> tuple[Any, Any, Watch]:
        params, inputs = layers_axis_unnamed(combine(layer_xs[0], static)), layer_xs[1]
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
        return new_x, (aux, x if return_hidden else None), state

    def traced_alone(x: Any, layer_xs: tuple[Any, Any]) -> tuple[Any, Any, Any]:
        new_x, outs, state = run(x, layer_xs)
        return new_x, outs, state.assigned()

    def body(x: Any, layer_xs: tuple[Any, Any]) -> tuple[Any, Any]:
        new_x, outs, state = run(x, layer_xs)
        values = state.values()
        return new_x, (*outs, {i: values[i] for i in changed})

    changed: list[int] = []
    policy = check_policy(remat)
    if (isinstance(policy, Policy) and policy.names) or variables_in(xs):  # else a scan traces the layer soon enough
        layer_shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), xs)
        traced, (_, _, assigned) = jax.make_jaxpr(traced_alone, return_shape=True)(x, layer_shapes)
        changed = changed_by(traced.jaxpr, assigned)
        check_not_lost(traced.jaxpr, x, layer_shapes)
        check_names(remat, traced)
    if mode != "unroll" and offloads(remat):
        refuse_wrong_offload(f"apply_stack(remat={remat!r})")
    if mode == "unroll" and n_layers > 0:
        x, outs = _unroll(body, x, xs, n_layers, remat)
    elif mode == "nested" and (groups := group_count(n_layers, _bytes(x), _bytes(xs[0]) // max(n_layers, 1))) > 1:
        x, outs = _nest(body, x, xs, groups, remat)
    else:
        x, outs = jax.lax.scan(checkpoint(body, remat), x, xs)
    aux, hidden, state = outs
    set_variables((stacked, per_layer), state)

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
