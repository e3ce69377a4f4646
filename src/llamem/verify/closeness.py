"""Whether two results of one computation are equal but for rounding: row by row, so that no layer hides another.

Two programs that compute the same in another order differ by rounding. The comparison knows two bounds: a fraction of
the value itself, by the coarsest type, and what the value does when every input moves by its last bit. A gradient that
is zero in truth, such as that of a bias before a normalisation, is nothing but rounding: only the second judges it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
_TIMES_NOISE = 6  # two programs round independently, and one sample of the noise is few


@dataclasses.dataclass(frozen=True)
class DifferingRow:
    """A row of an array that differs: where it is (() for all of it), how far it is off, and its size; both norms."""

    place: tuple[int, ...]
    error: float
    size: float

    @property
    def index(self) -> str:
        """`[3]`, as one writes it behind the array's name; "" for the whole array."""
        return f"[{', '.join(map(str, self.place))}]" if self.place else ""


def moved_by_rounding(tree: Any, mantissa_bits: int) -> Any:
    """Return `tree` with every floating-point leaf times 1 +- 2^-mantissa_bits, signs at random.

    That is as if its last bit had fallen otherwise. Other leaves stay as they are, and each leaf where it lies.
    """
    generator = np.random.default_rng(1)

    def moved(leaf: Any) -> Any:
        if not jnp.issubdtype(dtype_of(leaf), jnp.floating):
            return leaf
        # At least one step of the leaf's own type, or nothing would move.
        step = 2.0 ** -min(mantissa_bits, jnp.finfo(dtype_of(leaf)).nmant)
        factor = 1 + step * generator.choice([-1.0, 1.0], np.shape(leaf))
        if not hasattr(leaf, "dtype"):
            return leaf * float(factor)
        result = (np.asarray(leaf, np.float64) * factor).astype(leaf.dtype)
        if not isinstance(leaf, jax.Array):
            return result
        # What is on one device without having been put there may go to any other.
        return jax.device_put(result, leaf.sharding) if leaf.committed else jnp.asarray(result)

    return jax.tree.map(moved, tree)


def dtype_of(leaf: Any) -> Any:
    """Return the type of a leaf; Python's own numbers have JAX's."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def differing_rows(
    got: np.ndarray, want: np.ndarray, tolerance: float, moved: Callable[[], np.ndarray]
) -> list[DifferingRow]:
    """Return rows along the first axis, such as layers, in which `got` is not `want`: beyond tolerance and rounding.

    `moved` makes `want` from inputs moved by rounding; it is asked only where the tolerance is exceeded. In a vector
    every element is a row. An expert or unit inside a row counts where `got` is all zero and `want` is not.
    """
    rows = _beyond_rounding(got, want, tolerance, moved, axes=1)
    if want.ndim < 3 or not rows:
        return rows
    lost = [row for row in _beyond_rounding(got, want, tolerance, moved, axes=2) if not got[row.place].any()]
    whole = {row.place for row in rows if not got[row.place].any()}  # of a layer that is lost, the layer is named
    return [row for row in lost if row.place[:1] not in whole] or rows


def _beyond_rounding(
    got: np.ndarray, want: np.ndarray, tolerance: float, moved: Callable[[], np.ndarray], axes: int
) -> list[DifferingRow]:
    error, size = _norms(np.asarray(got - want), axes), _norms(want, axes)
    off = ~(error <= tolerance * size)  # so written, a NaN is off
    if not off.any():
        return []
    noise = _norms(np.asarray(moved() - want), axes)
    # The noise of a few elements may be small by chance, so that of all rows counts.
    few = want.size < 16 * error.size
    noise = 2 * np.maximum(noise, np.sqrt(np.mean(noise**2))) if few else noise
    off &= ~(error <= _TIMES_NOISE * noise)
    places = [tuple(map(int, place)) for place in np.argwhere(off)]
    return [DifferingRow(place, float(error[place]), float(size[place])) for place in places]


def _norms(values: np.ndarray, axes: int) -> np.ndarray:
    """Return the Euclidean norm of every row along the first `axes` axes."""
    return np.asarray(np.sqrt(np.sum(np.abs(values) ** 2, axis=tuple(range(min(axes, values.ndim), values.ndim)))))
