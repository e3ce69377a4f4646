"""The parameters of L layers as one stack, and back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamem._checks import show
from llamem.layers.module_state import variables_in

REMEDY_STATE = (
    "Make the layers stacked, layers, state = eqx.filter_vmap(eqx.nn.make_with_state(Layer))(keys), and give the state "
    "as per_layer: apply_stack(layer, layers, x, state, has_aux=True) of a layer(params, x, state) that returns "
    "(x, state) gives the new state as aux."
)


def stack_layers(layers: Sequence[Any]) -> Any:
    """Stack the parameters of L equal layers, once: leaves `[...]` of each become leaves `[L, ...]`.

    Layers are pytrees of arrays or of shapes (`jax.ShapeDtypeStruct`), nnx or equinox modules; their list may be an
    `nnx.List`. Python numbers, flags and functions stay what they are, one for all layers: an optimizer cannot train
    them. Do this when a model is made or loaded, never inside a training step: there it copies every weight each step.
    Raises ValueError for an empty list, for layers that differ in structure, shapes or in a Python value, and for nnx
    layers that share a variable; TypeError for what is no list, and for equinox layers with State.
    """
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise TypeError(f"stack_layers({type(layers).__name__}): expected a list of the layers' parameters.")
    if not layers:
        raise ValueError(
            "stack_layers([]): there is no layer to take shapes from; build leaves of shape [0, ...] instead."
        )
    layers = list(layers)
    _check_nothing_shared(layers)
    for i, layer in enumerate(layers):
        _check_like_first(layers[0], layer, i)

    def stacked(*leaves: Any) -> Any:
        if not is_array(leaves[0]):
            return leaves[0]
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
        return jnp.stack(leaves)

    return jax.tree.map(stacked, *layers)


def unstack_layers(stacked: Any) -> list[Any]:
    """Return the layers of a stack as a list of L pytrees, for checkpoints of other projects: undo `stack_layers`."""
    return [layer_at(stacked, i) for i in range(common_length(stacked))]


def layer_at(stacked: Any, i: int) -> Any:
    """Return layer i of a stack."""
    return jax.tree.map(lambda leaf: leaf[i] if is_array(leaf) else leaf, stacked)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, or the shape of one, and no Python value."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def as_arrays(tree: Any, what: str) -> Any:
    """Return the tree with arrays as JAX holds them: NumPy's float64 becomes float32 unless x64 is on.

    Raises TypeError for a leaf that JAX cannot hold.
    """

    def array(path: tuple, leaf: Any) -> Any:
        try:
            return jnp.asarray(leaf)
        except (TypeError, ValueError):
            place = f"{what}{jax.tree_util.keystr(path)}"
            raise TypeError(f"{place} is {type(leaf).__name__} {show(leaf)}: expected an array.") from None

    return jax.tree.map_with_path(array, tree)


def common_length(stacked: Any) -> int:
    """Return L. Raises ValueError where the arrays of a stack have no common first axis."""
    shapes = shapes_of(stacked)
    scalars = [name for name, shape in shapes.items() if not shape]
    lengths = {name: shape[0] for name, shape in shapes.items() if shape}
    if scalars or len(set(lengths.values())) != 1:
        few = dict(list(lengths.items())[:6])
        more = f" and {len(lengths) - 6} more" if len(lengths) > 6 else ""
        alone = (
            f", and scalars at {scalars[:6]}: of a Python number that a transformation made an array (a dropout rate, "
            "say) take only the arrays through it, params, static = eqx.partition(model, eqx.is_array)"
        )
        raise ValueError(
            "stacked parameters and per-layer inputs need one common first axis, the layers: make it from a list of "
            f"layers with llamem.stack_layers(layers). First axes seen: "
            f"{few or f'none in {show(stacked)}'}{more}{alone if scalars else ''}."
        )
    return next(iter(lengths.values()))


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tree's arrays by their places."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves if is_array(leaf)}


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


def _check_like_first(first: Any, layer: Any, i: int) -> None:
    _check_no_equinox_state(layer, i)
    if (wrong := shapes_of(layer)) != (right := shapes_of(first)):
        raise ValueError(
            f"stack_layers: layer {i} is not shaped as layer 0, so they cannot share one array. Layer 0: {right}. "
            f"Layer {i}: {wrong}. Apply layers of another shape on their own, before or after the stack."
        )
    if not _alike(first, layer):
        whole = "the structure", jax.tree.structure(first), jax.tree.structure(layer)
        place, one, other = _first_difference(first, layer) or whole
        raise ValueError(
            f"stack_layers: {place or 'the layer'} is {show(one)} in layer 0 and {show(other)} in layer {i}. A Python "
            "value is part of the program, which all layers share. Where it should differ from layer to layer, make it "
            "an array (jnp.asarray), or give it as per_layer; else set it alike."
        )


def _alike(one: Any, other: Any) -> bool:
    """Return whether two trees have one structure, and the same Python values beside their arrays."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(is_array(a) if is_array(a) or is_array(b) else a is b or a == b for a, b in leaves)


def _first_difference(one: Any, other: Any, place: str = "") -> tuple[str, Any, Any] | None:
    """Return where two layers differ in structure or in a Python value, and those; None for arrays."""
    if type(one) is not type(other):
        return place, one, other
    if is_array(one) or isinstance(one, nnx.Variable):
        return None
    children, others = _children(one), _children(other)
    if children.keys() != others.keys():
        return place, sorted(children), sorted(others)
    for name, child in children.items():
        if found := _first_difference(child, others[name], place + name):
            return found
    return None if children or one == other else (place, one, other)


def _children(node: Any) -> dict[str, Any]:
    if isinstance(node, dict):
        return {f"[{name!r}]": child for name, child in node.items()}
    if isinstance(node, list | tuple):
        return {f"[{i}]": child for i, child in enumerate(node)}
    if isinstance(node, type) or not hasattr(node, "__dict__"):
        return {}
    return {f".{name}": child for name, child in vars(node).items() if not name.startswith("_pytree__")}


def _check_no_equinox_state(layer: Any, i: int) -> None:
    def is_index(node: Any) -> bool:
        return type(node).__name__ == "StateIndex"

    for path, node in jax.tree.leaves_with_path(layer, is_leaf=is_index):
        if is_index(node):
            place = jax.tree_util.keystr(path)
            raise TypeError(f"stack_layers: layer {i}{place} has equinox State, kept outside of it. {REMEDY_STATE}")
