"""One tile of the logits of `hidden @ head.T`: from the matrix product to the loss of a row, and back to gradients.

The passes that go over all tiles are in `passes.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Softmax:
    """What is done between the matrix product and the loss, and how it is tiled. Hashable: it keys the jit cache."""

    num_tiles: int
    axis: str = "tokens"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    head_tree: Any = None  # of a callable head; None: the leaves are a matrix [V, D] and, maybe, a bias [V]
    accumulate_dtype: Any = jnp.float32
    with_stats: bool = False
    columns: int | None = None  # that a CPU's cache holds of a tile of tokens; None: whole rows, for accelerators


def matmul(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Matrix product in the operands' common type, accumulated and returned in float32 (or wider)."""
    dtype = jnp.result_type(a, b)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=wide(a, b))


def wide(*arrays: Any) -> Any:
    """The type of logits, losses and sums: float32, or wider if an array is."""
    return jnp.result_type(jnp.float32, *(a.dtype for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)))


def accumulator(cfg: Softmax, leaf: Array) -> Any:
    """The type in which a leaf's gradient grows: `accumulate_dtype`, or float64 for a float64 leaf."""
    return leaf.dtype if leaf.dtype == jnp.float64 else cfg.accumulate_dtype


def logits(cfg: Softmax, raw_NV: Array) -> Array:
    """Scaled and soft-capped raw products."""
    logits_NV = raw_NV * cfg.scale if cfg.scale != 1.0 else raw_NV
    return cfg.softcap * jnp.tanh(logits_NV / cfg.softcap) if cfg.softcap is not None else logits_NV


def project(cfg: Softmax, x_TD: Array, head: list, wanted: tuple) -> tuple[Array, Any]:
    """Raw product `[T, V]`, and its pull-back: from a gradient `[T, V]` to the `wanted` ones, in float32."""
    if cfg.head_tree is not None:
        leaves = [i for i in wanted if i != "x"]

        def call(x_TD: Array, chosen: list) -> Array:
            full = [*head]
            for i, leaf in zip(leaves, chosen, strict=True):
                full[int(i)] = leaf
            return cfg.head_tree.unflatten(full)(x_TD)

        primals = (x_TD, [head[int(i)] for i in leaves])
        if not wanted:
            raw_TV = call(*primals)
            return raw_TV.astype(wide(raw_TV)), None
        raw_TV, pull_back = jax.vjp(call, *primals)

        def pull(d_TV: Array) -> dict:
            dx_TD, d_leaves = pull_back(d_TV.astype(raw_TV.dtype))
            return {"x": dx_TD} | dict(zip(leaves, d_leaves, strict=True))

        return raw_TV.astype(wide(raw_TV)), pull
    head_VD, bias_V = (*head, None)[:2]
    with jax.named_scope("logits"):  # by this name a timeline knows them
        raw_TV = matmul(x_TD, head_VD, (1, 1))
    return raw_TV if bias_V is None else raw_TV + bias_V, lambda d_TV: matrix_gradients(x_TD, head_VD, d_TV, wanted)


def matrix_gradients(x_TD: Array, head_VD: Array, d_TV: Array, wanted: tuple) -> dict:
    """The `wanted` ones of hidden "x", matrix "0" and bias "1", from the raw product's gradient `[T, V]`."""
    grads = {"1": jnp.sum(d_TV, 0)} if "1" in wanted else {}
    d_TV = d_TV.astype(jnp.result_type(x_TD, head_VD))
    if "x" in wanted:
        grads["x"] = matmul(d_TV, head_VD, (1, 0))
    if "0" in wanted:
        grads["0"] = matmul(d_TV, x_TD, (0, 0))
    return grads


def row_losses(cfg: Softmax, lse_N: Array, target_N: Array, mean_N: Any, stats: dict) -> dict:
    """Loss and statistics per token; label smoothing as PyTorch defines it."""
    eps = cfg.label_smoothing
    nll_N = lse_N - (1 - eps) * target_N - (eps * mean_N if eps else 0)
    z_loss_N = cfg.z_loss * lse_N**2
    rows = {"loss": nll_N + z_loss_N}
    return rows | {"z_loss": z_loss_N, "logsumexp": lse_N} | stats if cfg.with_stats else rows


def slope(cfg: Softmax, z_NV: Array) -> Any:
    """d(logit) / d(raw product), from the logit."""
    return cfg.scale * (1 - (z_NV / cfg.softcap) ** 2) if cfg.softcap is not None else cfg.scale


def raw_gradient(cfg: Softmax, vocab: int, z_NV: Array, p_NV: Array, lse_N: Array, hit_NV: Array, w_N: Array) -> Array:
    """Gradient of `sum(w * loss)` for the raw product: softmax minus labels, through soft-cap and scale."""
    eps, w_N1 = cfg.label_smoothing, w_N[:, None]
    d_NV = p_NV * (w_N * (1 + 2 * cfg.z_loss * lse_N))[:, None] - jnp.where(hit_NV, (1 - eps) * w_N1, 0)
    if eps:
        d_NV -= (eps / vocab) * w_N1
    chain = slope(cfg, z_NV)
    return d_NV if isinstance(chain, float) and chain == 1.0 else d_NV * chain
