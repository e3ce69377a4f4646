"""Low-rank adapters of experts: what they add to a mixture's products, row by row, each row with its sequence's own.

A row of a mixture meets one of E experts with one of A adapters: one of `E A` pairs of thin matrices. The rows are
sorted by expert, and within an expert by adapter, so that the rows of one pair lie side by side. A loop goes over runs
of such rows: it reads them, multiplies them with the two thin matrices of their pair, and adds the result in place. So
the work is that of two thin products per row, whatever the number of adapters; nothing of an expert's `[in, out]` is
made, no adapter is copied, and no row is sorted again.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Rows that follow each other in the mixture's order: adapter, expert, first row and number of rows of each run.
Runs = tuple[Int[Array, " R"], Int[Array, " R"], Int[Array, " R"], Int[Array, " R"]]


@dataclasses.dataclass(frozen=True)
class ExpertAdapters:
    """One layer's adapters: `a` `[A, E, r, in]`, `b` `[A, E, r, out]`, `scale` `[A]`, by "gate", "up" and "down".

    Not all three need to be there. `adapter_B` says which of the A each sequence uses; `count` is A.
    """

    a: Mapping[str, Array]
    b: Mapping[str, Array]
    scale: Mapping[str, Array]
    adapter_B: Int[Array, " B"]
    count: int

    def of_rows(self, T: int) -> Int[Array, " N"]:
        """Return the adapter of each token of `[B, T]`; A, one beyond the last, where it is none of them."""
        return jnp.repeat(jnp.where(self._known_B, self.adapter_B, self.count), T)

    def adder(self, experts_Nk: Int[Array, "N k"], place_Nk: Int[Array, "N k"], max_run: int) -> Callable[..., Array]:
        """Return `add(target, x_GgI, out_GgO)`: `out`, the frozen product of `x`, with what the target's adapters add.

        `place_Nk`: the rows' places in the sorted order, in which `x` and `out` lie. Targets without adapters are as
        they were.
        """
        E, B = next(iter(self.a.values())).shape[1], len(self.adapter_B)
        adapter_N = self.of_rows(len(experts_Nk) // B)
        length, runs = _runs(experts_Nk, adapter_N, place_Nk, (self.count, E), E * min(self.count, B), max_run)

        def add(target: str, x_GgI: Array, out_GgO: Array) -> Array:
            if target not in self.a:
                return out_GgO
            x_PI, out_PO = (array.reshape(-1, array.shape[-1]) for array in (x_GgI, out_GgO))
            pairs = self.a[target], self.b[target], self.scale[target]
            return add_low_rank(length, out_PO, x_PI, pairs, runs).reshape(out_GgO.shape)

        return add

    def nan_where_unknown(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return `x_BTD` with NaN for sequences whose adapter is none of them."""
        return jnp.where(self._known_B[:, None, None], x_BTD, jnp.nan)

    @property
    def _known_B(self) -> Array:
        return (self.adapter_B >= 0) & (self.adapter_B < self.count)


def _runs(
    experts_Nk: Array, adapter_N: Array, place_Nk: Array, sizes: tuple[int, int], pairs_met: int, max_run: int
) -> tuple[int, Runs]:
    """Return the most rows of a run, and the runs: no more than any routing to so many pairs at once needs."""
    A, E = sizes
    length = min(max_run, 8 * -(-experts_Nk.size // (8 * pairs_met)))
    n_runs = experts_Nk.size // length + min(pairs_met, experts_Nk.size)
    pair_Nk = adapter_N[:, None] * E + experts_Nk  # of none of them: beyond the last pair
    counts_Q = jnp.zeros((A + 1) * E, jnp.int32).at[pair_Nk].add(1)[: A * E]
    first_Q = jnp.full((A + 1) * E, jnp.iinfo(jnp.int32).max // 2).at[pair_Nk].min(place_Nk)[: A * E]
    runs_Q = -(-counts_Q // length)
    end_Q = jnp.cumsum(runs_Q)
    run_R = jnp.arange(n_runs)
    pair_R = jnp.minimum(jnp.searchsorted(end_Q, run_R, side="right"), A * E - 1)
    done_R = (run_R - (end_Q - runs_Q)[pair_R]) * length
    count_R = jnp.clip(counts_Q[pair_R] - done_R, 0, length)
    start_R = jnp.where(count_R > 0, first_Q[pair_R] + done_R, 0)
    return length, (pair_R // E, pair_R % E, start_R, count_R)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def add_low_rank(
    length: int,
    out_PO: Float[Array, "P O"],
    x_PI: Float[Array, "P I"],
    pairs: tuple[Float[Array, "A E r I"], Float[Array, "A E r O"], Float[Array, " A"]],
    runs: Runs,
) -> Float[Array, "P O"]:
    """Add `scale (x[p] a') b` with the pair of row p to `out[p]`; rows in no run stay. Runs have `length` rows.

    Gradients of `a` and `b` grow in f32, or their own type where that is wider.
    """

    def step(out_PO: Array, run: Any) -> tuple[Array, None]:
        added_hO = _low_rank(_read(x_PI, run, length), *_pair(pairs, run))
        return _add(out_PO, run, added_hO.astype(out_PO.dtype)), None

    return lax.scan(step, out_PO, runs)[0]


def _forward(length: int, out_PO: Array, x_PI: Array, pairs: Any, runs: Runs) -> tuple[Array, Any]:
    return add_low_rank(length, out_PO, x_PI, pairs, runs), (x_PI, pairs, runs)


def _backward(length: int, residuals: Any, d_PO: Array) -> tuple[Array, Array, Any, None]:
    x_PI, pairs, runs = residuals

    def step(totals: Any, run: Any) -> tuple[Any, None]:
        dx_PI, (a, b, scale) = totals
        added_hO, pull = jax.vjp(_low_rank, _read(x_PI, run, length), *_pair(pairs, run))
        dx_hI, da_rI, db_rO, d_scale = pull(_read(d_PO, run, length).astype(added_hO.dtype))
        adapter, expert, _, _ = run
        a, b = a.at[adapter, expert].add(da_rI.astype(a.dtype)), b.at[adapter, expert].add(db_rO.astype(b.dtype))
        return (_add(dx_PI, run, dx_hI), (a, b, scale.at[adapter].add(d_scale.astype(scale.dtype)))), None

    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), pairs)
    (dx_PI, d_pairs), _ = lax.scan(step, (jnp.zeros_like(x_PI), wide), runs)
    return d_PO, dx_PI, jax.tree.map(lambda x, d: d.astype(x.dtype), pairs, d_pairs), None


add_low_rank.defvjp(_forward, _backward)


def _low_rank(x_hI: Array, a_rI: Array, b_rO: Array, scale: Array) -> Array:
    """Return `scale (x a') b` of one pair's rows, in the type of `x`; the inner one is scaled before it is rounded."""
    wide = jnp.promote_types(x_hI.dtype, jnp.float32)
    z_hr = jnp.einsum("hI,rI->hr", x_hI, a_rI.astype(x_hI.dtype), preferred_element_type=wide) * scale
    return z_hr.astype(x_hI.dtype) @ b_rO.astype(x_hI.dtype)


def _pair(pairs: Any, run: Any) -> tuple[Array, Array, Array]:
    (a, b, scale), (adapter, expert, _, _) = pairs, run
    return a[adapter, expert], b[adapter, expert], scale[adapter]


def _read(array_PD: Array, run: Any, length: int) -> Array:
    """Return the rows of a run, zeros after them: `[length, D]`."""
    start, mine_h1 = _where(array_PD, run, length)
    return jnp.where(mine_h1, lax.dynamic_slice_in_dim(array_PD, start, length), 0)


def _add(array_PD: Array, run: Any, rows_hD: Array) -> Array:
    """Add something to the rows of a run of an array, in place in a loop."""
    start, mine_h1 = _where(array_PD, run, len(rows_hD))
    before_hD = lax.dynamic_slice_in_dim(array_PD, start, len(rows_hD))
    return lax.dynamic_update_slice_in_dim(array_PD, before_hD + jnp.where(mine_h1, rows_hD, 0), start, 0)


def _where(array_PD: Array, run: Any, length: int) -> tuple[Array, Array]:
    """Return where to cut `length` rows that hold the run's, also at the array's end; and which of them those are."""
    _, _, first, count = run
    start = jnp.minimum(first, len(array_PD) - length)
    row_h1 = (start + jnp.arange(length))[:, None]
    return start, (row_h1 >= first) & (row_h1 < first + count)
