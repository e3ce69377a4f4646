"""Passes over the logits of `hidden @ head.T`, one tile at a time: losses, statistics and hand-made gradients.

`token_pass` tiles the tokens: each tile sees the whole vocabulary. `vocab_losses`, `vocab_gradients` and
`vocab_frozen` tile the vocabulary: each tile sees all tokens, and an online softmax joins them. What differentiates
through which pass is decided in `linear_softmax.py`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from llamem.tiling import fold_tiles

# Rows of a vocabulary tile. An unaligned tile makes the TPU compiler lay the head out anew: a copy of all of it.
VOCAB_ALIGN = 128


@dataclasses.dataclass(frozen=True)
class Softmax:
    """What is done between the matrix product and the loss, and how it is tiled. Hashable: it keys the jit cache."""

    num_tiles: int
    axis: str = "tokens"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    accumulate_dtype: Any = jnp.float32
    with_stats: bool = False


def matmul(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Matrix product in the operands' common type, accumulated and returned in float32 (or wider)."""
    dtype = jnp.result_type(a, b)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=wide(dtype))


def wide(*arrays: Any) -> Any:
    """The type of logits, losses and sums: float32, or wider if an array is."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def _logits(cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array | None) -> Array:
    logits_NV = matmul(x_ND, head_VD, (1, 1))
    if bias_V is not None:
        logits_NV += bias_V
    if cfg.scale != 1.0:
        logits_NV *= cfg.scale
    if cfg.softcap is not None:
        logits_NV = cfg.softcap * jnp.tanh(logits_NV / cfg.softcap)
    return logits_NV


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
    cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array | None, targets_N: Array, w_N: Array, wanted: tuple = ()
) -> tuple[Array, dict, dict]:
    """Over tiles of tokens: `sum(w * loss)`, the rows `[N]`, and the `wanted` gradients of the sum.

    `wanted` is out of "x", "head", "bias", "weights". One matrix product, and one more each for "x" and "head".
    """
    vocab = head_VD.shape[0]
    shapes = {"head": head_VD, "bias": bias_V}

    def step(sums: dict, tile: tuple) -> tuple[dict, dict]:
        x_TD, targets_T, w_T = tile
        z_TV = _logits(cfg, x_TD, head_VD, bias_V)
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
        sums = sums | {"total": sums["total"] + jnp.sum(jnp.where(w_T == 0, 0, w_T * rows["loss"]))}
        grads = {}
        if set(wanted) & {"x", "head", "bias"}:
            hit_TV = jnp.arange(vocab) == targets_T[:, None]
            d_TV = _raw_gradient(cfg, vocab, z_TV, exp_TV / sum_T1, lse_T, hit_TV, w_T)
            if "bias" in wanted:
                sums["bias"] += jnp.sum(d_TV, 0).astype(cfg.accumulate_dtype)
            d_TV = d_TV.astype(jnp.result_type(x_TD, head_VD))
            if "x" in wanted:
                grads["x"] = matmul(d_TV, head_VD, (1, 0)).astype(x_TD.dtype)
            if "head" in wanted:
                sums["head"] += matmul(d_TV, x_TD, (0, 0)).astype(cfg.accumulate_dtype)
        return sums, {"rows": rows, "grads": grads}

    sums = {k: jnp.zeros(shapes[k].shape, cfg.accumulate_dtype) for k in ("head", "bias") if k in wanted}
    sums["total"] = jnp.zeros((), wide(x_ND, head_VD, w_N))
    sums, out = fold_tiles(step, sums, (x_ND, targets_N, w_N), cfg.num_tiles)
    grads = out["grads"] | {k: sums[k].astype(shapes[k].dtype) for k in ("head", "bias") if k in sums}
    if "weights" in wanted:
        grads["weights"] = out["rows"]["loss"].astype(w_N.dtype)
    return sums["total"], out["rows"], grads


def _over_vocab(cfg: Softmax, step: Any, init: Any, head_VD: Array, bias_V: Array | None) -> tuple[Any, Any]:
    ids_V = jnp.arange(head_VD.shape[0])
    return fold_tiles(step, init, (head_VD, bias_V, ids_V), cfg.num_tiles, align=VOCAB_ALIGN)


def _online(cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array | None, targets_N: Array, with_dx: bool) -> tuple:
    """Online softmax over vocabulary tiles. With `with_dx` the sums of the attention `softmax(x W') W` come along."""
    tokens, dtype = x_ND.shape[0], wide(x_ND, head_VD)
    zero_N = jnp.zeros(tokens, dtype)
    # Everything in `sums` is weighted by exp(-max) of its moment and rescaled when the maximum moves.
    init = {"max": jnp.full(tokens, -jnp.inf, dtype), "sums": {"exp": zero_N}, "target": zero_N}
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
        head_UD, bias_U, ids_U = tile
        z_NU = _logits(cfg, x_ND, head_UD, bias_U)
        top_N = jnp.max(z_NU, -1)
        new = {"max": jnp.maximum(old["max"], top_N)}
        finite_N = jnp.where(jnp.isneginf(new["max"]), 0, new["max"])
        exp_NU = jnp.exp(z_NU - finite_N[:, None])
        rescale_N = jnp.exp(old["max"] - finite_N)
        add = {"exp": jnp.sum(exp_NU, -1)}
        new["target"] = old["target"] + jnp.sum(jnp.where(ids_U == targets_N[:, None], z_NU, 0), -1)
        if cfg.label_smoothing:
            new["mean"] = old["mean"] + jnp.sum(z_NU, -1) / head_VD.shape[0]
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

    end, _ = _over_vocab(cfg, step, init, head_VD, bias_V)
    sums = end["sums"]
    lse_N = end["max"] + jnp.log(sums["exp"])
    stats = {}
    if cfg.with_stats:
        stats["entropy"] = lse_N - sums["exp_z"] / sums["exp"]
        stats["accuracy"] = (end["best"] == targets_N).astype(dtype)
    return end, lse_N, _rows(cfg, lse_N, end["target"], end.get("mean", 0), stats)


def vocab_losses(cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array | None, targets_N: Array) -> tuple:
    """Over vocabulary tiles: rows `[N]` and the logsumexp `[N]`. One matrix product."""
    _, lse_N, rows = _online(cfg, x_ND, head_VD, bias_V, targets_N, with_dx=False)
    return rows, lse_N


def vocab_frozen(cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array | None, targets_N: Array) -> tuple:
    """Rows `[N]`, and the gradient of each loss for its row of `x` `[N, D]`, in one sweep of two matrix products.

    The gradient of logsumexp is attention whose keys and values are both the head: `softmax(x W') W`.
    """
    end, lse_N, rows = _online(cfg, x_ND, head_VD, bias_V, targets_N, with_dx=True)
    eps = cfg.label_smoothing
    pull_ND = end["sums"]["exp_w"] * ((1 + 2 * cfg.z_loss * lse_N) / end["sums"]["exp"])[:, None]
    label_N = (1 - eps) * jnp.broadcast_to(_slope(cfg, end["target"]), lse_N.shape)
    dx_ND = pull_ND - label_N[:, None] * head_VD[targets_N]
    if eps:
        dx_ND -= (eps / head_VD.shape[0]) * end["slope_w"]
    return rows, dx_ND.astype(x_ND.dtype)


def vocab_gradients(
    cfg: Softmax, x_ND: Array, head_VD: Array, bias_V: Array | None, targets_N: Array, lse_N: Array, w_N: Array,
    wanted: tuple,
) -> dict:  # fmt: skip
    """The `wanted` gradients ("x", "head", "bias") of `sum(w * loss)`: the logits again, then one product each.

    A tile holds all tokens, so its rows of the head's gradient are complete: written once, nothing accumulates.
    """

    def step(dx_ND: Any, tile: tuple) -> tuple[Any, dict]:
        head_UD, bias_U, ids_U = tile
        z_NU = _logits(cfg, x_ND, head_UD, bias_U)
        p_NU = jnp.exp(z_NU - lse_N[:, None])
        d_NU = _raw_gradient(cfg, head_VD.shape[0], z_NU, p_NU, lse_N, ids_U == targets_N[:, None], w_N)
        rows = {"bias": jnp.sum(d_NU, 0).astype(bias_U.dtype)} if "bias" in wanted else {}
        d_NU = d_NU.astype(jnp.result_type(x_ND, head_UD))
        if "head" in wanted:
            rows["head"] = matmul(d_NU, x_ND, (0, 0)).astype(head_UD.dtype)
        return (dx_ND + matmul(d_NU, head_UD, (1, 0)) if "x" in wanted else dx_ND), rows

    init = jnp.zeros(x_ND.shape, wide(x_ND, head_VD)) if "x" in wanted else ()
    dx_ND, grads = _over_vocab(cfg, step, init, head_VD, bias_V)
    return grads | {"x": dx_ND.astype(x_ND.dtype)} if "x" in wanted else grads
