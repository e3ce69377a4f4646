"""One tile of the logits of `hidden @ head.T`: from the matrix product to the loss of a row, and back to gradients.

The passes that go over all tiles are in `token_tiles.py` and `vocab_tiles.py`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class CallableHead:
    """How to put a callable head together again from its leaves."""

    tree: jax.tree_util.PyTreeDef

    def __call__(self, leaves: list, x_TD: Array) -> Array:
        """The raw product `[T, V]`."""
        return self.tree.unflatten(leaves)(x_TD)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """What is computed between the matrix product and the loss of a row. Hashable: it keys the jit cache."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    with_stats: bool = False
    callable_head: CallableHead | None = None  # None: the head's leaves are matrices [V, D_i] and, maybe, a bias [V]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How it is computed: which axis is cut, and into what. Hashable: it keys the jit cache."""

    axis: Literal["tokens", "vocab"]
    num_tiles: int
    columns: int | None  # of a tile of tokens that are worked on at a time; None: all of them
    vocab_align: int  # a tile of the vocabulary, or of columns, is a multiple of this wide
    accumulate_dtype: Any  # of a sum of gradients over tiles of tokens
    vocab_axis: str | None = None  # the mesh axis whose devices hold some rows of the head each

    def first_id(self, head: list) -> Any:
        """The id of the first of the head's rows that are here."""
        return 0 if self.vocab_axis is None else lax.axis_index(self.vocab_axis) * head[0].shape[0]

    def vocab(self, head: list) -> int:
        """Rows of the whole head."""
        return head[0].shape[0] * (1 if self.vocab_axis is None else lax.axis_size(self.vocab_axis))


class Operands(NamedTuple):
    """What a loss is made of: hidden `[N, D]`, the head's leaves, and ids `[N]` inside the vocabulary."""

    x_ND: Array
    head: list
    targets_N: Array


class Wanted(NamedTuple):
    """Which gradients are asked for, of the head leaf by leaf."""

    x: bool
    head: tuple[bool, ...]
    weights: bool = False

    @property
    def of_logits(self) -> bool:
        """Whether any of them needs the logits' gradient."""
        return self.x or any(self.head)


class Gradients(NamedTuple):
    """Gradients, of the head leaf by leaf; None where none was asked for."""

    x: Array | None
    head: list
    weights: Array | None = None


NOTHING = Wanted(False, ())
STATISTICS = ("loss", "z_loss", "logsumexp", "accuracy", "entropy")  # of a row, where they are asked for


def quiet(rows: Array, w_N: Array) -> Array:
    """Rows `[N]` or `[N, D]`, with 0 for those that are not finite and have a weight of 0, which add nothing to a sum.

    0 * NaN is NaN. Finite rows stay as they are, also under a weight of 0: its own gradient needs them.
    """
    # One truth for each row: of each number the compiler would keep it all through a loop.
    finite_N = jnp.isfinite(rows) if rows.ndim == 1 else jnp.all(jnp.isfinite(rows), -1)
    silent_N = (w_N == 0) & ~finite_N
    return jnp.where(silent_N if rows.ndim == 1 else silent_N[:, None], 0, rows)


def waiting_type(dtype: Any) -> Any:
    """The type in which a gradient waits for the cotangent of the loss: a loss scale must find what float16 loses."""
    return jnp.float32 if dtype == jnp.float16 else dtype


def matmul(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Matrix product in the operands' common type, accumulated and returned in float32 (or wider)."""
    dtype = jnp.result_type(a, b)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=wide(a, b))


def wide(*arrays: Any) -> Any:
    """The type of logits, losses and sums: float32, or wider if an array is."""
    return jnp.result_type(jnp.float32, *(a.dtype for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)))


def matrices_of(head: list) -> list:
    """The head's matrices `[V, D_i]`, which side by side are one `[V, D]`; what follows them is the bias."""
    return [leaf for leaf in head if leaf.ndim == 2]


def columns_met(x_TD: Array, matrices: list) -> list:
    """Hidden cut into the columns `[T, D_i]` that meet each of the head's matrices."""
    if len(matrices) == 1:
        return [x_TD]
    ends = np.cumsum([matrix.shape[1] for matrix in matrices])
    return jnp.split(x_TD, ends[:-1].tolist(), axis=1)


def side_by_side(parts: list) -> Array:
    """Arrays `[T, D_i]` as one `[T, D]`."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def project(softmax: Softmax, x_TD: Array, head: list) -> Array:
    """The raw product `[T, V]`, float32."""
    if softmax.callable_head is not None:
        raw_TV = softmax.callable_head(head, x_TD)
        return raw_TV.astype(wide(raw_TV))
    matrices = matrices_of(head)
    bias = head[len(matrices) :]
    with jax.named_scope("logits"):  # by this name a timeline knows them
        products = map(functools.partial(matmul, contract=(1, 1)), columns_met(x_TD, matrices), matrices)
        raw_TV = functools.reduce(operator.add, products)
    return raw_TV + bias[0] if bias else raw_TV


def project_with_pullback(
    softmax: Softmax, x_TD: Array, head: list, wanted: Wanted
) -> tuple[Array, Callable[[Array, Array], Gradients]]:
    """The raw product `[T, V]`, and the function from its gradient and the rows' weights to the `wanted` gradients."""
    if softmax.callable_head is None:
        return project(softmax, x_TD, head), lambda d_TV, w_T: matrix_gradients(x_TD, head, d_TV, w_T, wanted)
    places = [i for i, is_wanted in enumerate(wanted.head) if is_wanted]

    def call(x_TD: Array, chosen: list) -> Array:
        leaves = [*head]
        for place, leaf in zip(places, chosen, strict=True):
            leaves[place] = leaf
        return softmax.callable_head(leaves, x_TD)

    raw_TV, vjp = jax.vjp(call, x_TD, [head[i] for i in places])

    def pull_back(d_TV: Array, w_T: Array) -> Gradients:
        scale = _power_of_two(w_T, raw_TV.dtype)
        dx_TD, d_chosen = vjp((d_TV * scale).astype(raw_TV.dtype))
        d_head: list = [None] * len(head)
        for place, gradient in zip(places, d_chosen, strict=True):
            d_head[place] = gradient.astype(wide(gradient)) / scale
        return Gradients(dx_TD.astype(wide(dx_TD)) / scale if wanted.x else None, d_head)

    return raw_TV.astype(wide(raw_TV)), pull_back


def matrix_gradients(x_TD: Array, head: list, d_TV: Array, w_T: Array, wanted: Wanted) -> Gradients:
    """The `wanted` gradients of hidden, matrices and bias, from that of the raw product: float32, one product each."""
    matrices = matrices_of(head)
    narrow = jnp.result_type(x_TD, *matrices)
    scale = _power_of_two(w_T, narrow)
    narrow_TV = (d_TV * scale).astype(narrow)
    dx_TD = None
    if wanted.x:
        dx_TD = side_by_side([matmul(narrow_TV, matrix, (1, 0)) for matrix in matrices]) / scale
    d_head: list = [
        matmul(narrow_TV, quiet(part_TD, w_T), (0, 0)) / scale if is_wanted else None
        for part_TD, is_wanted in zip(columns_met(x_TD, matrices), wanted.head, strict=False)
    ]
    d_head += [jnp.sum(d_TV, 0) if is_wanted else None for is_wanted in wanted.head[len(matrices) :]]
    return Gradients(dx_TD, d_head)


def _power_of_two(w_T: Array, dtype: Any) -> Array | float:
    """What makes float16 gradients of rows with such weights about 1, without rounding them; 1 for other types.

    A mean over 65,536 tokens has weights of 1.5e-5, and float16 nothing below 6e-8.
    """
    if dtype != jnp.float16:
        return 1.0
    _, exponent = jnp.frexp(jax.lax.stop_gradient(jnp.max(jnp.abs(w_T), initial=0)))
    return jnp.ldexp(jnp.ones((), w_T.dtype), -exponent)


def logits(softmax: Softmax, raw_NV: Array) -> Array:
    """Scaled and soft-capped raw products."""
    z_NV = raw_NV * softmax.scale if softmax.scale != 1.0 else raw_NV
    return softmax.softcap * jnp.tanh(z_NV / softmax.softcap) if softmax.softcap is not None else z_NV


def slope(softmax: Softmax, z_NV: Array) -> Any:
    """d(logit) / d(raw product), from the logit."""
    return softmax.scale * (1 - (z_NV / softmax.softcap) ** 2) if softmax.softcap is not None else softmax.scale


def row_losses(softmax: Softmax, lse_N: Array, target_N: Array, mean_N: Array | None, stats: dict) -> dict:
    """Loss and statistics per token; `mean_N` of the logits, for label smoothing as PyTorch defines it."""
    nll_N = lse_N - (1 - softmax.label_smoothing) * target_N
    if mean_N is not None:
        nll_N -= softmax.label_smoothing * mean_N
    z_loss_N = softmax.z_loss * lse_N**2
    rows = {"loss": nll_N + z_loss_N}
    return rows | {"z_loss": z_loss_N, "logsumexp": lse_N} | stats if softmax.with_stats else rows


def raw_gradient(
    softmax: Softmax, vocab: int, z_NV: Array, p_NV: Array, lse_N: Array, hit_NV: Array, w_N: Array
) -> Array:
    """Gradient of `sum(w * loss)` for the raw product: softmax minus labels, through soft-cap and scale.

    `z_NV` may be some of the `vocab` columns only: logits `z_NV`, their softmax `p_NV`, and `hit_NV`, which of them
    is its row's target.
    """
    eps, w_N1 = softmax.label_smoothing, w_N[:, None]
    d_NV = p_NV * (w_N * (1 + 2 * softmax.z_loss * lse_N))[:, None] - jnp.where(hit_NV, (1 - eps) * w_N1, 0)
    if eps:
        d_NV -= (eps / vocab) * w_N1
    if softmax.softcap is not None or softmax.scale != 1.0:
        d_NV *= slope(softmax, z_NV)
    return jnp.where(((w_N == 0) & ~jnp.isfinite(lse_N))[:, None], 0, d_NV)  # as `quiet`, which would look at it all
