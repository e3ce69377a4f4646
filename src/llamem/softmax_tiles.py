"""Passes over the logits of `hidden @ head.T`, one tile at a time: losses, statistics and hand-made gradients.

`token_pass` tiles the tokens: each tile sees the whole vocabulary. `vocab_losses`, `vocab_gradients` and
`vocab_frozen` tile the vocabulary: each tile sees all tokens, and an online softmax joins them. What differentiates
through which pass is decided in `linear_softmax.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from llamem.tiling import fold_tiles

# Rows of tiles are multiples of these. An unaligned vocabulary tile makes the TPU compiler lay the head out anew: a
# copy of all of it.
VOCAB_ALIGN = 128
TOKEN_ALIGN = 16


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


def _logits(cfg: Softmax, raw_NV: Array) -> Array:
    logits_NV = raw_NV * cfg.scale if cfg.scale != 1.0 else raw_NV
    return cfg.softcap * jnp.tanh(logits_NV / cfg.softcap) if cfg.softcap is not None else logits_NV


def _project(cfg: Softmax, x_TD: Array, head: list, wanted: tuple) -> tuple[Array, Any]:
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
    raw_TV = matmul(x_TD, head_VD, (1, 1))

    def pull(d_TV: Array) -> dict:
        grads = {"1": jnp.sum(d_TV, 0)} if "1" in wanted else {}
        d_TV = d_TV.astype(jnp.result_type(x_TD, head_VD))
        if "x" in wanted:
            grads["x"] = matmul(d_TV, head_VD, (1, 0))
        if "0" in wanted:
            grads["0"] = matmul(d_TV, x_TD, (0, 0))
        return grads

    return raw_TV if bias_V is None else raw_TV + bias_V, pull


def _rows(cfg: Softmax, lse_N: Array, target_N: Array, mean_N: Any, stats: dict) -> dict:
    """Loss and statistics per token; label smoothing as PyTorch defines it."""
    eps = cfg.label_smoothing
    nll_N = lse_N - (1 - eps) * target_N - (eps * mean_N if eps else 0)
    z_loss_N = cfg.z_loss * lse_N**2
    rows = {"loss": nll_N + z_loss_N}
    return rows | {"z_loss": z_loss_N, "logsumexp": lse_N} | stats if cfg.with_stats else rows


def _slope(cfg: Softmax, z_NV: Array) -> Any:
    """d(logit) / d(raw product), from the logit."""
    slope = cfg.scale
    return slope * (1 - (z_NV / cfg.softcap) ** 2) if cfg.softcap is not None else slope


def _raw_gradient(cfg: Softmax, vocab: int, z_NV: Array, p_NV: Array, lse_N: Array, hit_NV: Array, w_N: Array) -> Array:
    """Gradient of `sum(w * loss)` for the raw product: softmax minus labels, through soft-cap and scale."""
    eps, w_N1 = cfg.label_smoothing, w_N[:, None]
    d_NV = p_NV * (w_N * (1 + 2 * cfg.z_loss * lse_N))[:, None] - jnp.where(hit_NV, (1 - eps) * w_N1, 0)
    if eps:
        d_NV -= (eps / vocab) * w_N1
    slope = _slope(cfg, z_NV)
    return d_NV if isinstance(slope, float) and slope == 1.0 else d_NV * slope


def token_pass(
    cfg: Softmax, x_ND: Array, head: list, targets_N: Array, w_N: Array, wanted: tuple = ()
) -> tuple[Array, dict, dict]:
    """Over tiles of tokens: `sum(w * loss)`, the rows `[N]`, and the `wanted` gradients of the sum.

    `wanted` is out of "x", "w" and the places of leaves in `head`, "0", "1", .. One matrix product, and one more each
    for "x" and the head's matrix.
    """
    leaves = [i for i in wanted if i not in ("x", "w")]
    needs_slope = tuple(i for i in wanted if i != "w")

    def step(sums: dict, tile: tuple) -> tuple[dict, dict]:
        x_TD, targets_T, w_T = tile
        raw_TV, pull = _project(cfg, x_TD, head, needs_slope)
        z_TV = _logits(cfg, raw_TV)
        vocab = z_TV.shape[1]
        max_T1 = jnp.max(z_TV, -1, keepdims=True)
        exp_TV = jnp.exp(z_TV - max_T1)
        sum_T1 = jnp.sum(exp_TV, -1, keepdims=True)
        lse_T = (max_T1 + jnp.log(sum_T1))[:, 0]
        target_T = jnp.take_along_axis(z_TV, targets_T[:, None], 1)[:, 0]
        stats = {}
        if cfg.with_stats:
            stats["entropy"] = lse_T - jnp.sum(jnp.where(exp_TV == 0, 0, exp_TV * z_TV), -1) / sum_T1[:, 0]
            stats["accuracy"] = (jnp.argmax(z_TV, -1) == targets_T).astype(lse_T.dtype)
        rows = _rows(cfg, lse_T, target_T, jnp.mean(z_TV, -1) if cfg.label_smoothing else 0, stats)
        # A weight of 0 hides the row, even where its loss is not a number.
        total = sums["total"] + jnp.sum(jnp.where(w_T == 0, 0, w_T * rows["loss"]))
        out = {"rows": rows}
        if needs_slope:
            hit_TV = jnp.arange(vocab) == targets_T[:, None]
            grads = pull(_raw_gradient(cfg, vocab, z_TV, exp_TV / sum_T1, lse_T, hit_TV, w_T))
            sums = sums | {i: sums[i] + grads[i].astype(sums[i].dtype) for i in leaves}
            if "x" in wanted:
                out["x"] = grads["x"].astype(x_TD.dtype)
        return sums | {"total": total}, out

    sums: dict = {i: jnp.zeros(head[int(i)].shape, accumulator(cfg, head[int(i)])) for i in leaves}
    sums["total"] = jnp.zeros((), wide(x_ND, *head, w_N))
    sums, out = fold_tiles(step, sums, (x_ND, targets_N, w_N), cfg.num_tiles, align=TOKEN_ALIGN)
    grads = {i: sums[i].astype(head[int(i)].dtype) for i in leaves}
    if "x" in wanted:
        grads["x"] = out["x"]
    if "w" in wanted:
        grads["w"] = out["rows"]["loss"].astype(w_N.dtype)
    return sums["total"], out["rows"], grads


def _over_vocab(cfg: Softmax, step: Any, init: Any, head: list) -> tuple[Any, Any]:
    ids_V = jnp.arange(head[0].shape[0])
    return fold_tiles(step, init, (head, ids_V), cfg.num_tiles, align=VOCAB_ALIGN)


def _online(cfg: Softmax, x_ND: Array, head: list, targets_N: Array, with_dx: bool) -> tuple:
    """Online softmax over vocabulary tiles. With `with_dx` the sums of the attention `softmax(x W') W` come along."""
    tokens, vocab, dtype = x_ND.shape[0], head[0].shape[0], wide(x_ND, *head)
    zero_N = jnp.zeros(tokens, dtype)
    # Everything in `sums` is weighted by exp(-max) of its moment and rescaled when the maximum moves.
    init: dict = {"max": jnp.full(tokens, -jnp.inf, dtype), "sums": {"exp": zero_N}, "target": zero_N}
    if cfg.label_smoothing:
        init["mean"] = zero_N
    if cfg.with_stats:
        init["sums"]["exp_z"] = zero_N
        init["best"] = jnp.zeros(tokens, int)
    if with_dx:
        init["sums"]["exp_w"] = jnp.zeros(x_ND.shape, dtype)
        if cfg.label_smoothing:
            init["slope_w"] = jnp.zeros(x_ND.shape if cfg.softcap is not None else x_ND.shape[1:], dtype)

    def step(old: dict, tile: tuple) -> tuple[dict, tuple]:
        (head_UD, *bias), ids_U = tile
        z_NU = _logits(cfg, _project(cfg, x_ND, [head_UD, *bias], ())[0])
        top_N = jnp.max(z_NU, -1)
        new: dict = {"max": jnp.maximum(old["max"], top_N)}
        finite_N = jnp.where(jnp.isneginf(new["max"]), 0, new["max"])
        exp_NU = jnp.exp(z_NU - finite_N[:, None])
        rescale_N = jnp.exp(old["max"] - finite_N)
        add = {"exp": jnp.sum(exp_NU, -1)}
        new["target"] = old["target"] + jnp.sum(jnp.where(ids_U == targets_N[:, None], z_NU, 0), -1)
        if cfg.label_smoothing:
            new["mean"] = old["mean"] + jnp.sum(z_NU, -1) / vocab
        if cfg.with_stats:
            add["exp_z"] = jnp.sum(jnp.where(exp_NU == 0, 0, exp_NU * z_NU), -1)
            new["best"] = jnp.where(top_N > old["max"], ids_U[jnp.argmax(z_NU, -1)], old["best"])
        if with_dx:
            slope = jnp.broadcast_to(_slope(cfg, z_NU), z_NU.shape)
            narrow = jnp.result_type(x_ND, head_UD)
            add["exp_w"] = matmul((exp_NU * slope).astype(narrow), head_UD, (1, 0))
            if cfg.label_smoothing and cfg.softcap is not None:
                new["slope_w"] = old["slope_w"] + matmul(slope.astype(narrow), head_UD, (1, 0))
            elif cfg.label_smoothing:
                new["slope_w"] = old["slope_w"] + cfg.scale * jnp.sum(head_UD, 0, dtype=dtype)
        new["sums"] = {k: v * rescale_N.reshape(-1, *[1] * (v.ndim - 1)) + add[k] for k, v in old["sums"].items()}
        return new, ()

    end, _ = _over_vocab(cfg, step, init, head)
    sums = end["sums"]
    lse_N = end["max"] + jnp.log(sums["exp"])
    stats = {}
    if cfg.with_stats:
        stats["entropy"] = lse_N - sums["exp_z"] / sums["exp"]
        stats["accuracy"] = (end["best"] == targets_N).astype(dtype)
    return end, _rows(cfg, lse_N, end["target"], end.get("mean", 0), stats)


def vocab_losses(cfg: Softmax, x_ND: Array, head: list, targets_N: Array) -> tuple:
    """Over vocabulary tiles: rows `[N]`, and the softmax's maximum and sum `[N]`. One matrix product."""
    end, rows = _online(cfg, x_ND, head, targets_N, with_dx=False)
    return rows, (end["max"], end["sums"]["exp"])


def vocab_frozen(cfg: Softmax, x_ND: Array, head: list, targets_N: Array) -> tuple:
    """Rows `[N]`, and the gradient of each loss for its row of `x` `[N, D]`, in one sweep of two matrix products.

    The gradient of logsumexp is attention whose keys and values are both the head: `softmax(x W') W`.
    """
    end, rows = _online(cfg, x_ND, head, targets_N, with_dx=True)
    lse_N = end["max"] + jnp.log(end["sums"]["exp"])
    eps, vocab = cfg.label_smoothing, head[0].shape[0]
    pull_ND = end["sums"]["exp_w"] * ((1 + 2 * cfg.z_loss * lse_N) / end["sums"]["exp"])[:, None]
    label_N = (1 - eps) * jnp.broadcast_to(_slope(cfg, end["target"]), lse_N.shape)
    dx_ND = pull_ND - label_N[:, None] * head[0][targets_N]
    if eps:
        dx_ND -= (eps / vocab) * end["slope_w"]
    return rows, dx_ND.astype(x_ND.dtype)


def vocab_gradients(
    cfg: Softmax, x_ND: Array, head: list, targets_N: Array, max_and_sum_N: tuple, w_N: Array, wanted: tuple
) -> dict:
    """The `wanted` gradients ("x", places in `head`) of `sum(w * loss)`: the logits again, then one product each.

    A tile holds all tokens, so its rows of the head's gradient are complete: written once, nothing accumulates.
    """
    leaves = [i for i in wanted if i != "x"]
    max_N, sum_N = max_and_sum_N
    lse_N = max_N + jnp.log(sum_N)

    def step(dx_ND: Any, tile: tuple) -> tuple[Any, dict]:
        tile_head, ids_U = tile
        raw_NU, pull = _project(cfg, x_ND, tile_head, wanted)
        z_NU = _logits(cfg, raw_NU)
        p_NU = jnp.exp(z_NU - max_N[:, None]) / sum_N[:, None]  # exp(z - lse) would lose the bits of a large lse
        d_NU = _raw_gradient(cfg, head[0].shape[0], z_NU, p_NU, lse_N, ids_U == targets_N[:, None], w_N)
        grads = pull(d_NU)
        rows = {i: grads[i].astype(head[int(i)].dtype) for i in leaves}
        return (dx_ND + grads["x"] if "x" in wanted else dx_ND), rows

    init = jnp.zeros(x_ND.shape, wide(x_ND, *head)) if "x" in wanted else ()
    dx_ND, grads = _over_vocab(cfg, step, init, head)
    return grads | {"x": dx_ND.astype(x_ND.dtype)} if "x" in wanted else grads
