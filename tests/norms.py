"""How far two trees of numbers are from each other, leaf by leaf."""

import math
from typing import Any

import jax
import numpy as np


def relative_errors(found: Any, expected: Any) -> list[float]:
    """`|found - expected| / |expected|` of each leaf, by Euclidean norms in float64; structures may differ in type."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return [relative_error(a, b) for a, b in pairs]


def errors_by_name(found: Any, expected: Any) -> dict[str, float]:
    """`relative_errors` under the names of the leaves, which a test shows where it fails."""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(found)]
    return dict(zip(names, relative_errors(found, expected), strict=True))


def relative_error(found: Any, expected: Any) -> float:
    """`|found - expected| / |expected|` of two arrays of one shape; a NaN is infinitely far, as no maximum hides."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    error = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))
    return math.inf if math.isnan(error) else error
