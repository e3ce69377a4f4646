"""Passes over the logits of `hidden @ head.T`, one tile at a time: losses, statistics and hand-made gradients.

`token_pass` tiles the tokens: each tile sees the whole vocabulary, on a CPU a cache-full of columns at a time.
`vocab_losses`, `vocab_gradients` and `vocab_frozen` tile the vocabulary: each tile sees all tokens, and an online
softmax joins them. What differentiates through which pass is decided in `gradients.py`.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from llamem.layers.tiling import fold_tiles, tile_size
from llamem.losses.one_tile import (
    Softmax,
    accumulator,
    logits,
    matmul,
    matrix_gradients,
    project,
    raw_gradient,
    row_losses,
    slope,
    wide,
)

# Rows of tiles are multiples of these. An unaligned vocabulary tile makes the TPU compiler lay the head out anew: a
# copy of all of it. A CPU is slow where rows of logits lie a power of two apart: they compete for the same cache lines.
TOKEN_ALIGN, VOCAB_ALIGN, COLUMN_ALIGN = 16, 128, 8


def token_pass(
    cfg: Softmax, x_ND: Array, head: list, targets_N: Array, w_N: Array, wanted: tuple = ()
) -> tuple[Array, dict, dict]:
    """Over tiles of tokens: `sum(w * loss)`, the rows `[N]`, and the `wanted` gradients of the sum.

    `wanted` is out of "x", "w" and the places of leaves in `head`, "0", "1", .. One matrix product, and one more each
    for "x" and the head's matrix.
    """
    gradients = tuple(i for i in wanted if i != "w")
    in_columns = cfg.columns is not None and cfg.head_tree is None and head[0].shape[0] > cfg.columns
    one_tile = _columns_of_rows if in_columns else _whole_rows

    def step(sums: dict, tile: tuple) -> tuple[dict, dict]:
        x_TD, targets_T, w_T = tile
        rows, dx_TD, head_sums = one_tile(cfg, head, x_TD, targets_T, w_T, gradients, sums["head"])
        # A weight of 0 hides the row, even where its loss is not a number.
        total = sums["total"] + jnp.sum(jnp.where(w_T == 0, 0, w_T * rows["loss"]))
        out = {"rows": rows} if dx_TD is None else {"rows": rows, "x": dx_TD.astype(x_TD.dtype)}
        return {"total": total, "head": head_sums}, out

    leaves = [i for i in gradients if i != "x"]
    sums = {
        "total": jnp.zeros((), wide(x_ND, *head, w_N)),
        "head": {i: jnp.zeros(head[int(i)].shape, accumulator(cfg, head[int(i)])) for i in leaves},
    }
    sums, out = fold_tiles(step, sums, (x_ND, targets_N, w_N), cfg.num_tiles, align=TOKEN_ALIGN)
    grads = {i: total.astype(head[int(i)].dtype) for i, total in sums["head"].items()}
    if "x" in wanted:
        grads["x"] = out["x"]
    if "w" in wanted:
        grads["w"] = out["rows"]["loss"].astype(w_N.dtype)
    return sums["total"], out["rows"], grads


def _whole_rows(
    cfg: Softmax, head: list, x_TD: Array, targets_T: Array, w_T: Array, wanted: tuple, head_sums: dict
) -> tuple[dict, Array | None, dict]:
    """A tile of tokens at once: its rows, its gradient of `x` if wanted, and the head's sums of gradients, grown."""
    raw_TV, pull = project(cfg, x_TD, head, wanted)
    z_TV = logits(cfg, raw_TV)
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
    rows = row_losses(cfg, lse_T, target_T, jnp.mean(z_TV, -1) if cfg.label_smoothing else 0, stats)
    if not wanted:
        return rows, None, head_sums
    hit_TV = jnp.arange(vocab) == targets_T[:, None]
    grads = pull(raw_gradient(cfg, vocab, z_TV, exp_TV / sum_T1, lse_T, hit_TV, w_T))
    return rows, grads.get("x"), {i: total + grads[i].astype(total.dtype) for i, total in head_sums.items()}


def _columns_of_rows(
    cfg: Softmax, head: list, x_TD: Array, targets_T: Array, w_T: Array, wanted: tuple, head_sums: dict
) -> tuple[dict, Array | None, dict]:
    """The same, its logits made and later used a few columns at a time: what works on them finds them in the cache.

    All are kept in between, so no product is computed twice.
    """
    assert cfg.columns is not None
    cfg = dataclasses.replace(cfg, num_tiles=-(-head[0].shape[0] // cfg.columns))
    end, rows = _online(cfg, x_TD, head, targets_T, keep=bool(wanted))
    if not wanted:
        return rows, None, head_sums
    softmax = (end["max"], end["sums"]["exp"])
    grads = vocab_gradients(cfg, x_TD, head, targets_T, softmax, w_T, wanted, end["kept"], head_sums)
    return rows, grads.pop("x", None), grads


def _over_vocab(cfg: Softmax, step: Any, init: Any, head: list) -> tuple[Any, Any]:
    ids_V = jnp.arange(head[0].shape[0])
    return fold_tiles(step, init, (head, ids_V), cfg.num_tiles, align=_vocab_align(cfg))


def _vocab_align(cfg: Softmax) -> int:
    return VOCAB_ALIGN if cfg.columns is None else COLUMN_ALIGN


def _tile_number(ids_U: Array, columns: int) -> Array:
    return lax.div(ids_U[0], columns)  # XLA would work out `//`, which asks for signs, anew for every logit


def _online(
    cfg: Softmax, x_ND: Array, head: list, targets_N: Array, with_dx: bool = False, keep: bool = False
) -> tuple:
    """Online softmax over vocabulary tiles.

    With `with_dx` the sums of the attention `softmax(x W') W` come along; with `keep` the logits, by tile.
    """
    tokens, vocab, dtype = x_ND.shape[0], head[0].shape[0], wide(x_ND, *head)
    columns = tile_size(vocab, cfg.num_tiles, _vocab_align(cfg))
    zero_N = jnp.zeros(tokens, dtype)
    # Everything in `sums` is weighted by exp(-max) of its moment and rescaled when the maximum moves.
    init: dict = {"max": jnp.full(tokens, -jnp.inf, dtype), "sums": {"exp": zero_N}, "target": zero_N}
    if cfg.label_smoothing:
        init["mean"] = zero_N
    if cfg.with_stats:
        init["sums"]["exp_z"] = zero_N
        init["best"] = jnp.zeros(tokens, int)
    if keep:
        init["kept"] = jnp.zeros((-(-vocab // columns), tokens, columns), dtype)
    if with_dx:
        init["sums"]["exp_w"] = jnp.zeros(x_ND.shape, dtype)
        if cfg.label_smoothing:
            init["slope_w"] = jnp.zeros(x_ND.shape if cfg.softcap is not None else x_ND.shape[1:], dtype)

    def step(old: dict, tile: tuple) -> tuple[dict, tuple]:
        (head_UD, *bias), ids_U = tile
        z_NU = logits(cfg, project(cfg, x_ND, [head_UD, *bias], ())[0])
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
        if keep:
            new["kept"] = lax.dynamic_update_slice(old["kept"], z_NU[None], (_tile_number(ids_U, columns), 0, 0))
        if with_dx:
            slope_NU = jnp.broadcast_to(slope(cfg, z_NU), z_NU.shape)
            narrow = jnp.result_type(x_ND, head_UD)
            add["exp_w"] = matmul((exp_NU * slope_NU).astype(narrow), head_UD, (1, 0))
            if cfg.label_smoothing and cfg.softcap is not None:
                new["slope_w"] = old["slope_w"] + matmul(slope_NU.astype(narrow), head_UD, (1, 0))
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
    return end, row_losses(cfg, lse_N, end["target"], end.get("mean", 0), stats)


def online_softmax(cfg: Softmax, x_ND: Array, head: list, targets_N: Array) -> tuple[Array, Array, Array]:
    """Over vocabulary tiles, per token: the maximum, the sum of `exp(logit - maximum)`, and the target's logit.

    The last is 0 for a target that is none of these rows.
    """
    end, _ = _online(cfg, x_ND, head, targets_N)
    return end["max"], end["sums"]["exp"], end["target"]


def vocab_losses(cfg: Softmax, x_ND: Array, head: list, targets_N: Array) -> tuple:
    """Over vocabulary tiles: rows `[N]`, and the softmax's maximum and sum `[N]`. One matrix product."""
    end, rows = _online(cfg, x_ND, head, targets_N)
    return rows, (end["max"], end["sums"]["exp"])


def vocab_frozen(cfg: Softmax, x_ND: Array, head: list, targets_N: Array) -> tuple:
    """Rows `[N]`, and the gradient of each loss for its row of `x` `[N, D]`, in one sweep of two matrix products.

    The gradient of logsumexp is attention whose keys and values are both the head: `softmax(x W') W`.
    """
    end, rows = _online(cfg, x_ND, head, targets_N, with_dx=True)
    lse_N = end["max"] + jnp.log(end["sums"]["exp"])
    eps, vocab = cfg.label_smoothing, head[0].shape[0]
    pull_ND = end["sums"]["exp_w"] * ((1 + 2 * cfg.z_loss * lse_N) / end["sums"]["exp"])[:, None]
    label_N = (1 - eps) * jnp.broadcast_to(slope(cfg, end["target"]), lse_N.shape)
    dx_ND = pull_ND - label_N[:, None] * head[0][targets_N]
    if eps:
        dx_ND -= (eps / vocab) * end["slope_w"]
    return rows, dx_ND.astype(x_ND.dtype)


def vocab_gradients(
    cfg: Softmax,
    x_ND: Array,
    head: list,
    targets_N: Array,
    max_and_sum_N: tuple,
    w_N: Array,
    wanted: tuple,
    kept: Array | None = None,
    head_sums: dict | None = None,
) -> dict:
    """The `wanted` gradients ("x", places in `head`) of `sum(w * loss)`: one product each.

    A tile holds all tokens, so its rows of the head's gradient are complete: written once, nothing accumulates; but
    where tokens are tiled too, gradients grow in `head_sums`. Logits are `kept` by `_online`, or computed again.
    """
    max_N, sum_N = max_and_sum_N
    lse_N = max_N + jnp.log(sum_N)

    def step(sums: tuple, tile: tuple) -> tuple[tuple, dict]:
        dx_ND, grown = sums
        (head_UD, *bias), ids_U = tile
        if kept is None:
            z_NU = logits(cfg, project(cfg, x_ND, [head_UD, *bias], ())[0])
        else:
            start = (_tile_number(ids_U, kept.shape[2]), 0, 0)
            z_NU = lax.dynamic_slice(kept, start, (1, len(targets_N), len(ids_U)))[0]
        p_NU = jnp.exp(z_NU - max_N[:, None]) / sum_N[:, None]  # exp(z - lse) would lose the bits of a large lse
        d_NU = raw_gradient(cfg, head[0].shape[0], z_NU, p_NU, lse_N, ids_U == targets_N[:, None], w_N)
        grads = matrix_gradients(x_ND, head_UD, d_NU, wanted)
        if "x" in wanted:
            dx_ND = dx_ND + grads.pop("x")
        if grown is None:
            return (dx_ND, None), {i: grad.astype(head[int(i)].dtype) for i, grad in grads.items()}
        return (dx_ND, {i: _add_rows(grown[i], grads[i], ids_U[0]) for i in grown}), {}

    init = jnp.zeros(x_ND.shape, wide(x_ND, *head)) if "x" in wanted else ()
    (dx_ND, grown), rows = _over_vocab(cfg, step, (init, head_sums), head)
    grads = rows if grown is None else grown
    return grads | {"x": dx_ND.astype(x_ND.dtype)} if "x" in wanted else grads


def _add_rows(total: Array, rows: Array, start: Array) -> Array:
    old = lax.dynamic_slice_in_dim(total, start, len(rows))
    return lax.dynamic_update_slice_in_dim(total, old + rows.astype(total.dtype), start, 0)
