"""The arguments of a program as its compiler is given them: one record for each array."""

import dataclasses
import functools
import inspect
import math
import reprlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.chips.chip import Chip
from jaxmem.common.checks import show
from jaxmem.tracing.jaxprs import is_ref


def shape_of(leaf: Any, where: str = "an argument") -> jax.ShapeDtypeStruct:
    """Return the shape and type that `jax.jit` would see; a Python number stays weakly typed.

    Raises TypeError, with `where` in it, for what is no number, array, shape or random key.
    """
    is_array = hasattr(leaf, "dtype")
    dtype = leaf.dtype if is_array else np.asarray(leaf).dtype
    if is_key(dtype):
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        raise TypeError(
            f"{where} is {reprlib.repr(leaf)}, of type {type(leaf).__name__}: no array, number or "
            "`jax.ShapeDtypeStruct`. A setting is no argument of a program: close over it, as "
            "functools.partial(fn, setting=...) does."
        )
    weak = leaf.weak_type if hasattr(leaf, "weak_type") else not is_array and not isinstance(leaf, bool)
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(dtype), weak_type=weak)


def is_key(dtype: Any) -> bool:
    """Return whether it is the type of random keys such as `jax.random.key` makes."""
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def key_implementation(key: jax.ShapeDtypeStruct) -> Any:
    """Return how a key draws, "threefry2x32" or "rbg", as `jax.random.wrap_key_data(impl=)` takes it."""
    names = []
    jax.eval_shape(lambda key: names.append(jax.random.key_impl(key)), key)  # it answers for arrays, not for shapes
    return names[0]


def on_host(aval: Any) -> bool:
    """Return whether a traced value is said to be in the host's memory."""
    return "host" in str(getattr(aval, "memory_space", "")).lower()


def with_arrays_alone(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return `fn` and its arguments with arrays, numbers and shapes in the place of modules.

    An nnx module or optimizer stands there as its state. What `fn` changes in it in place is a result of the returned
    function, as it is of `nnx.jit(fn)`; what several modules share counts once. Of an equinox module the arrays are
    arguments and the rest is closed over, as `equinox.filter_jit` has it. Without modules both come back as they are.
    """
    leaves, tree = jax.tree.flatten(args, is_leaf=_is_module)
    stateful = {i: leaf for i, leaf in enumerate(leaves) if _is_nnx(leaf)}
    parts = {i: _equinox().partition(leaf, _is_array) for i, leaf in enumerate(leaves) if _is_equinox(leaf)}
    if not stateful and not parts:
        return fn, args
    nnx = _nnx()
    graph, state = nnx.split(dict(stateful)) if stateful else (None, {})
    shown = {i: state.get(i, nnx.State({})) for i in stateful} | {i: arrays for i, (arrays, _) in parts.items()}

    @functools.wraps(fn)
    def of_arrays(*args: Any) -> Any:
        given = tree.flatten_up_to(args)
        modules = nnx.merge(graph, {i: given[i] for i in stateful}) if stateful else {}
        whole = modules | {i: _equinox().combine(given[i], static) for i, (_, static) in parts.items()}
        result = fn(*tree.unflatten([whole.get(i, leaf) for i, leaf in enumerate(given)]))
        results = jax.tree.leaves(result, is_leaf=_is_module)
        returned = [leaf for leaf in results if _is_nnx(leaf)]
        plain = [leaf for leaf in results if not _is_nnx(leaf)]
        # Together: a module that is changed and returned is one result.
        after = _nnx().state((modules, returned)) if modules or returned else None
        return after, [leaf for leaf in jax.tree.leaves(plain) if not parts or _is_array(leaf)]

    return of_arrays, tree.unflatten([shown.get(i, leaf) for i, leaf in enumerate(leaves)])


def _is_module(leaf: Any) -> bool:
    return _is_nnx(leaf) or _is_equinox(leaf)


def _nnx() -> Any:
    """Return flax's nnx where it was imported, as it was where one of its modules is an argument; else None."""
    return sys.modules.get("flax.nnx")


def _is_nnx(leaf: Any) -> bool:
    return _nnx() is not None and isinstance(leaf, _nnx().Pytree)


def _equinox() -> Any:
    """Return equinox where it was imported, likewise."""
    return sys.modules.get("equinox")


def _is_equinox(leaf: Any) -> bool:
    return _equinox() is not None and isinstance(leaf, _equinox().Module)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array among the arguments.

    `name` is the argument's and the path inside, `state.params['norm']`; `argument` the position of the argument.
    `shape` carries the sharding over the chips compiled for; of a random key it is that of the numbers it is made of,
    and `key` says by which method it draws. `donated`: the program may overwrite it. `on_host`: it lies in the host's
    memory.
    """

    name: str
    argument: int
    shape: jax.ShapeDtypeStruct
    key: Any
    donated: bool
    on_host: bool

    @property
    def bytes(self) -> int:
        """What one device holds of it."""
        return shard_bytes(self.shape)


def read_leaves(
    fn: Callable[..., Any], args: tuple[Any, ...], donate_argnums: tuple[int, ...], chip: Chip
) -> tuple[Leaf, ...]:
    """Return a record for each array of `args`, in the order of `jax.tree.leaves`.

    Raises TypeError for what is no array, ValueError for donated positions or a memory that are not there, and for an
    array that is donated and given twice.
    """
    _check_donated(donate_argnums, len(args))
    names = argument_names(fn, args)
    leaves = []
    for name, (path, value) in zip(names, jax.tree.leaves_with_path(args), strict=True):
        place = f"args{jax.tree_util.keystr(path)}"
        if is_ref(value):
            raise TypeError(
                f"the argument `{name}` is a mutable array (jax.new_ref), which a report cannot count: compilers are "
                "given arrays. Give the array itself, and make it mutable inside of the function, ref = "
                "jax.new_ref(x), which returns jax.freeze(ref)."
            )
        shape, position = shape_of(value, place), path[0].idx
        key = key_implementation(shape) if is_key(shape.dtype) else None
        placed = _placed(shape, value, place, chip)
        leaves.append(Leaf(name, position, placed, key, position in donate_argnums, _waits_on_host(value)))
    _check_given_once(leaves, jax.tree.leaves(args))
    return tuple(leaves)


def argument_names(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Return a name for each leaf, such as `state.params['norm']`: its argument's, and the path inside."""
    try:
        given = inspect.signature(fn).bind(*args).arguments.items()
    except (TypeError, ValueError):  # nothing says what this callable's arguments are called
        given = [("", args)]
    leaves = [(name, path) for name, value in given for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    return [(name + jax.tree_util.keystr(path)).removesuffix(".value") for name, path in leaves]


def mesh_of(leaves: Sequence[Leaf], chip: Chip) -> Any:
    """Return the mesh that the arguments lie on; None for one chip where they name none. Raises ValueError for another.

    A mesh of one chip matters too, and so does one that the call stands under: a `jax.shard_map` in the program is over
    it, and a model may ask for it.
    """
    # What lies in the memory of one device's host has a sharding, too, and no mesh.
    shardings = [leaf.shape.sharding for leaf in leaves]
    meshes = {sharding.mesh for sharding in shardings if isinstance(sharding, jax.sharding.NamedSharding)}
    if chip.devices > 1 and len(meshes) != 1:
        raise ValueError(
            f"{chip.name} has {chip.devices} chips, and the arguments' shardings name {len(meshes)} meshes, not one. "
            f"Say how they are spread: mesh = jaxmem.find_chip({chip.name!r}).mesh(data={chip.devices}), then "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, jax.P('data')))."
        )
    if not chip.absent:
        return None
    around = jax.sharding.get_abstract_mesh()  # the user's `jax.set_mesh`
    if not meshes and not around.empty and around.size == chip.devices:
        return chip.mesh(**around.shape)
    return meshes.pop() if len(meshes) == 1 else None


def shard_shape(array: Any) -> tuple[int, ...]:
    """Return the shape of what one device holds of an array or a shape."""
    sharding = getattr(array, "sharding", None)
    is_named = isinstance(sharding, jax.sharding.NamedSharding)
    # Inside of a shard_map a shape is one device's already.
    divided = is_named and set(sharding.mesh.axis_types) != {jax.sharding.AxisType.Manual}
    return sharding.shard_shape(array.shape) if divided else array.shape


def shard_bytes(array: Any) -> int:
    """Return the bytes of what one device holds of an array or a shape."""
    return -(-math.prod(shard_shape(array)) * _bits(array.dtype) // 8)


def _bits(dtype: Any) -> int:
    """Return the bits of one element: 4 of an int4, though NumPy gives it a byte."""
    kinds = {jnp.integer: jnp.iinfo, jnp.floating: jnp.finfo}
    info = next((info for kind, info in kinds.items() if jnp.issubdtype(dtype, kind)), None)
    return int(info(dtype).bits) if info else dtype.itemsize * 8


def _check_donated(donate_argnums: Any, count: int) -> None:
    if not isinstance(donate_argnums, tuple) or any(i not in range(count) for i in donate_argnums):
        raise ValueError(
            f"donate_argnums={show(donate_argnums)}: expected a tuple of positions among the {count} arguments, from 0 "
            f"to {count - 1}, such as donate_argnums=(0,)."
        )


def _check_given_once(leaves: Sequence[Leaf], values: Sequence[Any]) -> None:
    """Raise ValueError where the program is given an array that it may overwrite twice: XLA would refuse to run it."""
    known: dict[Any, Leaf] = {}
    for leaf, value in zip(leaves, values, strict=True):
        if not isinstance(value, jax.Array) or not value.size:
            continue
        first = known.setdefault(_memory_of(value), leaf)
        if first is not leaf and (first.donated or leaf.donated):
            donated = "both are donated" if first.donated and leaf.donated else "one of them is donated"
            raise ValueError(
                f"the arguments `{first.name}` and `{leaf.name}` are one array in memory, and {donated}: the program "
                "would overwrite what it still has to read, so that XLA refuses to run it. Give one of them a copy, "
                "jnp.copy(x), or do not donate it."
            )


def _memory_of(array: jax.Array) -> Any:
    """Return where an array lies, so that two which share their memory are known; of others who it is."""
    try:
        return array.addressable_data(0).unsafe_buffer_pointer()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):  # a random key, a deleted array
        return "", id(array)


def _placed(shape: jax.ShapeDtypeStruct, leaf: Any, where: str, chip: Chip) -> jax.ShapeDtypeStruct:
    """Return the shape with the sharding that its leaf names, if any, on the chip's devices; a key as its numbers."""
    sharding = getattr(leaf, "sharding", None)
    kind = getattr(sharding, "memory_kind", None)
    hosted = _waits_on_host(leaf)
    # What arrays have here without being asked may be called the host's memory: a CPU has no other.
    known = hosted and chip.devices == 1
    if kind not in (None, "device", jax.devices()[0].default_memory().kind) and not known:
        raise ValueError(
            f"{where} is in the memory {kind!r}: arguments there are counted for one chip, in 'pinned_host'. Leave the "
            f"memory_kind out: its bytes then count as those of {chip.name}."
        )
    if hosted:
        sharding = None if chip.absent else sharding  # an absent chip's compiler knows it by the argument's number
    elif not isinstance(sharding, jax.sharding.NamedSharding):
        sharding = None
    elif chip.absent:  # the same axes, of the absent chips
        sharding = jax.sharding.NamedSharding(chip.mesh(**sharding.mesh.shape), sharding.spec)
    if is_key(shape.dtype):
        shape = jax.eval_shape(jax.random.key_data, shape)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding, weak_type=shape.weak_type)


def _waits_on_host(leaf: Any) -> bool:
    """Return whether an argument is in the host's memory: a CPU's default memory, called so too, is its own."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind == "pinned_host" and kind != jax.devices()[0].default_memory().kind
