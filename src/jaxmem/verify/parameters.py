"""Parameters that are not what they seem: stacked layers that begin as one, tied weights that were split."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jaxmem.checks import few
from jaxmem.jaxprs import Scan, control_flow, equations
from jaxmem.verify.with_and_without import dtype_of

_IDENTICAL = (
    "layers are identical in {names}: made by a vmap that did not split the key (nnx.split_rngs), or copied, they "
    "begin as one layer."
)
_SOME_IDENTICAL = (
    "cannot tell: some rows are identical in {names}. So they should be where layers were copied to make a model "
    "deeper, or experts made of one; after a vmap that did not split the key (nnx.split_rngs) they should not."
)
_SPLIT = "equal: {names}. A tied weight was split in two, and each gets half of the gradient."


def parameter_faults(params: Any, gradients: Callable[[], Any], program: jex_core.Jaxpr) -> tuple[list[str], list[str]]:
    """Return what is wrong with parameters, and what may be meant so, in words.

    `gradients` makes theirs, where two leaves are equal; `program` is the traced loss, which tells what its layers are.
    Only what looks random is judged: zeros, ones, identities and tables may well be alike. Of two equal leaves both
    must have a gradient: a frozen copy, such as a target network that starts as the model, is no fault. Layers that
    are all identical are a fault; some of them, or the experts of a layer, may have been copied on purpose.
    """
    identical, some, split = [], [], []
    taken_row_by_row = _stacks_in(program)
    equal: dict[tuple[Any, bytes], list[tuple[str, int]]] = defaultdict(list)
    in_lists: Counter[str] = Counter()
    for place, (path, leaf) in enumerate(jax.tree.leaves_with_path(params)):
        if np.ndim(leaf) < 2 or not jnp.issubdtype(dtype_of(leaf), jnp.floating):
            continue
        name, values = jax.tree_util.keystr(path), np.asarray(leaf)
        rows = Counter(row.tobytes() for row in values if values.ndim > 2 and _looks_random(row))
        if twins := sum(times for times in rows.values() if times > 1):
            all_layers = rows.most_common(1)[0][1] == len(values) and values.shape in taken_row_by_row
            (identical if all_layers else some).append(f"{name} ({twins} of {len(values)})")
        if _looks_random(values):
            equal[values.shape, values.tobytes()].append((name, place))
            in_lists[_without_numbers(name)] += 1
    for leaves in equal.values():
        grads = jax.tree.leaves(gradients()) if len(leaves) > 1 else []
        trained = [name for name, place in leaves if grads and np.any(np.asarray(grads[place]))]
        kinds = {_without_numbers(name) for name in trained}
        if len(trained) > 1 and len(kinds) == 1:  # names that differ by a number alone are layers of a list
            all_layers = len(trained) == in_lists[kinds.pop()]
            (identical if all_layers else some).append(" and ".join(trained))
        elif len(trained) > 1:
            split.append(" and ".join(trained))
    wrong = [_IDENTICAL.format(names=few(identical))] if identical else []
    wrong += [_SPLIT.format(names=few(split))] if split else []
    return wrong, [_SOME_IDENTICAL.format(names=few(some))] if some else []


def _stacks_in(program: jex_core.Jaxpr) -> set[tuple[int, ...]]:
    """Return the shapes of arrays whose rows a program takes one by one: by a loop, of groups or not, or by slices."""
    found = set()
    for eqn, _ in equations(program):
        shapes = [getattr(var.aval, "shape", ()) for var in eqn.invars]
        if isinstance(flow := control_flow(eqn), Scan):
            stacked = shapes[flow.n_consts + flow.n_carry :]
            found |= {*stacked, *((shape[0] * shape[1], *shape[2:]) for shape in stacked if len(shape) > 1)}
        elif eqn.primitive.name in ("slice", "dynamic_slice"):
            found |= {shapes[0]} if eqn.outvars[0].aval.shape == (1, *shapes[0][1:]) else set()  # pyrefly: ignore
    return found


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _looks_random(values: np.ndarray) -> bool:
    # Drawn numbers are nearly all different, as far as their type can tell; tables and identities repeat a few.
    some = np.asarray(values.ravel()[:4096], np.float32)
    possible = {1: 16, 2: 256}.get(values.dtype.itemsize, some.size)
    return len(np.unique(some)) > min(some.size // 2, possible)
