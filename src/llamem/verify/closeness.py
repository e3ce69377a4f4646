"""Whether two results of one computation are equal but for rounding: row by row, so that no layer hides another.

Two programs that compute the same in another order differ by rounding, by how much depends on the program. So the
comparison knows two bounds: a fraction of the value itself, by the coarsest type, and what the value does when every
input moves by its last bit. A gradient that is zero in truth, such as that of a bias before a normalisation, is
nothing but rounding: only the second bound can judge it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
_TIMES_NOISE = 4  # two programs round independently, and two samples of the noise are few
_FEW = 16  # elements: a row's own noise may be small by chance, so that of all rows is taken


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of an array that differs: where it is (() for all of it), how far it is off, and its size; both norms."""

    place: tuple[int, ...]
    error: float
    size: float

    @property
    def index(self) -> str:
        """`[3]`, as one writes it behind the array's name; "" for the whole array."""
        return f"[{', '.join(map(str, self.place))}]" if self.place else ""


def moved_by_rounding(tree: Any, seed: int, mantissa_bits: int) -> Any:
    """Every floating-point leaf times 1 +- 2^-mantissa_bits, signs at random: as if its last bit had fallen otherwise.

    All other leaves, and Python's own numbers, stay as they are.
    """
    generator = np.random.default_rng(seed)

    def moved(leaf: Any) -> Any:
        if not jnp.issubdtype(dtype_of(leaf), jnp.floating):
            return leaf
        sign = generator.choice([-1.0, 1.0], np.shape(leaf))
        # At least one step of the leaf's own type, or nothing would move.
        step = 2.0 ** -min(mantissa_bits, jnp.finfo(dtype_of(leaf)).nmant)
        if not hasattr(leaf, "dtype"):
            return leaf * float(1 + step * sign)
        result = (np.asarray(leaf, np.float64) * (1 + step * sign)).astype(leaf.dtype)
        return jax.device_put(result, leaf.sharding) if isinstance(leaf, jax.Array) else result

    return jax.tree.map(moved, tree)


def dtype_of(leaf: Any) -> Any:
    """The type of a leaf; Python's own numbers have JAX's."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def differing_rows(
    got: np.ndarray, want: np.ndarray, tolerance: float, others: Callable[[], list[np.ndarray]]
) -> list[Row]:
    """Rows along the first axis, layers for instance, in which `got` is not `want`: beyond tolerance and rounding.

    `others` makes `want` from inputs moved by rounding; it is asked only where the tolerance is exceeded. Of a vector
    every element is a row. An expert or unit inside a row counts where `got` is all zero and `want` is not.
    """
    if want.ndim > 2:
        lost = _norms(want, 2).astype(bool) & ~_norms(got, 2).astype(bool)
        found = _beyond_rounding(got, want, tolerance, others, axes=2) if lost.any() else []
        # Of a layer that is lost as a whole, the layer is named.
        if found := [row for row in found if lost[row.place] and not lost[row.place[0]].all()]:
            return found
    return _beyond_rounding(got, want, tolerance, others, axes=1)


def _beyond_rounding(
    got: np.ndarray, want: np.ndarray, tolerance: float, others: Callable[[], list[np.ndarray]], axes: int
) -> list[Row]:
    error, size = _norms(np.asarray(got - want), axes), _norms(want, axes)
    off = ~(error <= tolerance * size)  # so written, a NaN is off
    if not off.any():
        return []
    noise = np.max([_norms(np.asarray(other - want), axes) for other in others()], axis=0)
    if want.size < _FEW * error.size:
        noise = 2 * np.maximum(noise, np.sqrt(np.mean(noise**2)))
    off &= ~(error <= _TIMES_NOISE * noise)
    places = [tuple(map(int, place)) for place in np.argwhere(off)]
    return [Row(place, float(error[place]), float(size[place])) for place in places]


def _norms(values: np.ndarray, axes: int) -> np.ndarray:
    """The Euclidean norm of every row along the first `axes` axes."""
    return np.asarray(np.sqrt(np.sum(np.abs(values) ** 2, axis=tuple(range(min(axes, values.ndim), values.ndim)))))
