"""The parameters of L layers as one stack, and back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamem._checks import show
from llamem.layers.module_state import variables_in


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

    return jax.tree.map_with_path(stacked, *layers)


def unstack_layers(stacked: Any) -> list[Any]:
    """Return the layers of a stack as a list of L pytrees, for checkpoints of other projects: undo `stack_layers`."""
    return [layer_at(stacked, i) for i in range(common_length(stacked))]


def layer_at(stacked: Any, i: int) -> Any:
    """Return layer i of a stack."""
    return jax.tree.map(lambda leaf: leaf[i] if is_array(leaf) else leaf, stacked)


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


def _first_difference(one: Any, other: Any, place: str = "") -> tuple[str, Any, Any] | None:
    """Return where two objects first differ, arrays aside, and what stands there in both."""
    if is_array(one) and is_array(other):
        return None
    parts, others = _parts(one), _parts(other)
    if type(one) is not type(other) or parts is None or others is None:
        return None if one is other or one == other else (place, one, other)
    for name in {**parts, **others}:
        if name not in parts or name not in others:
            return place + name, *(mine.get(name, _Missing()) for mine in (parts, others))
        if found := _first_difference(parts[name], others[name], place + name):
            return found
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
