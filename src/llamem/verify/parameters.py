"""Parameters that are not what they seem: stacked layers that begin as one, tied weights that were split."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.verify.ways import dtype_of

_IDENTICAL = (
    "layers are identical in {names}: made by a vmap that did not split the key (nnx.split_rngs), or copied, they "
    "begin as one layer."
)
_SPLIT = "equal: {names}. A tied weight was split in two, and each gets half of the gradient."


def parameter_faults(params: Any, gradients: Callable[[], Any]) -> list[str]:
    """Return what is wrong with parameters, in words. `gradients` makes theirs, where two leaves are equal.

    Only what looks random is judged: zeros, ones, identities and tables may well be alike. Of two equal leaves both
    must have a gradient: a frozen copy, such as a target network that starts as the model, is no fault.
    """
    identical, split = [], []
    equal: dict[tuple[Any, bytes], list[tuple[str, int]]] = defaultdict(list)
    for place, (path, leaf) in enumerate(jax.tree.leaves_with_path(params)):
        if np.ndim(leaf) < 2 or not jnp.issubdtype(dtype_of(leaf), jnp.floating):
            continue
        name, values = jax.tree_util.keystr(path), np.asarray(leaf)
        rows = Counter(row.tobytes() for row in values if values.ndim > 2 and _looks_random(row))
        if twins := sum(times for times in rows.values() if times > 1):
            identical.append(f"{name} ({twins} of {len(values)})")
        if _looks_random(values):
            equal[values.shape, values.tobytes()].append((name, place))
    for leaves in equal.values():
        grads = jax.tree.leaves(gradients()) if len(leaves) > 1 else []
        trained = [name for name, place in leaves if grads and np.any(np.asarray(grads[place]))]
        if len(trained) > 1:  # names that differ by a number alone are layers of a list
            of_list = len({re.sub(r"\d+", "", name) for name in trained}) == 1
            (identical if of_list else split).append(" and ".join(trained))
    found = [_IDENTICAL.format(names=", ".join(identical))] if identical else []
    return found + ([_SPLIT.format(names=", ".join(split))] if split else [])


def _looks_random(values: np.ndarray) -> bool:
    # Drawn numbers are nearly all different, as far as their type can tell; tables and identities repeat a few.
    some = np.asarray(values.ravel()[:4096], np.float32)
    possible = {1: 16, 2: 256}.get(values.dtype.itemsize, some.size)
    return len(np.unique(some)) > min(some.size // 2, possible)
