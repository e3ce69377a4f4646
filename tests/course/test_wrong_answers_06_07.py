"""Answers that a reader may well give to the exercises of notebooks 06 and 07, and that are wrong: each is rejected."""

import functools
import itertools
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import Answers, refuse

from llamem_course.exercises import llama3, train_llama3


def block(D, H, K, h, F, norms=2, of_scale=None, keys=2, key_heads=None, out=1, matrices=3, width=None):
    """The numbers of a block, right but for what the arguments say."""
    width = width or H * h
    attention = D * width * (1 + out) + keys * D * (key_heads or K) * h
    return norms * (of_scale or D) + attention + matrices * D * F


def slowed(angle_p, factor, old, low=1.0, high=4.0, wave=2 * np.pi, of: Any = lambda turns_p: turns_p, clip=True):
    """Llama 3.1's angles, right but for what the arguments say; `of`: in what the line between is straight."""
    turns_p = np.asarray(old * angle_p / wave, np.float64)
    keep_p = (of(turns_p) - of(np.float64(low))) / (of(np.float64(high)) - of(np.float64(low)))
    keep_p = np.clip(keep_p, 0, 1) if clip else keep_p
    return angle_p * (keep_p + (1 - keep_p) / factor)


def turns_themselves_on_a_line(angle_p, factor, old):
    """Between, the new number of turns runs from 1/factor to 4, not the share that is kept."""
    turns_p = old * angle_p / (2 * np.pi)
    between_p = 1 / factor + (turns_p - 1) / 3 * (4 - 1 / factor)
    return jnp.select([turns_p >= 4, turns_p <= 1], [angle_p, angle_p / factor], between_p * 2 * np.pi / old)


def in_tiles(q_h, tiles, rescale_sum=True, rescale_mix=True, start=-np.inf, scale=True, last=True, use_max=True):
    """Attention tile by tile, right but for what the flags say."""
    top, total, mix_h = start, 0.0, np.zeros(len(q_h))
    if not last:
        tiles = list(tiles)[:-1] or [(np.zeros((1, 8)), np.zeros((1, 8)))]
    for k_Sh, v_Sh in tiles:
        scores_S = np.asarray(k_Sh, np.float64) @ q_h / (np.sqrt(len(q_h)) if scale else 1.0)
        new_top = max(top, scores_S.max()) if use_max else 0.0
        with np.errstate(all="ignore"):
            p_S, shrink = np.exp(scores_S - new_top), np.exp(top - new_top) if use_max else 1.0
            total = total * (shrink if rescale_sum else 1.0) + p_S.sum()
            mix_h = mix_h * (shrink if rescale_mix else 1.0) + p_S @ np.asarray(v_Sh, np.float64)
        top = new_top
    with np.errstate(all="ignore"):
        return mix_h / total


def from_the_first_maximum(q_h, tiles, dtype: Any = np.float64):
    """Every score counted from the first tile's maximum."""
    top, total, mix_h = None, 0.0, 0.0
    for k_Sh, v_Sh in tiles:
        scores_S = np.asarray(k_Sh, dtype) @ np.asarray(q_h, dtype) / np.sqrt(dtype(len(q_h)))
        top = scores_S.max() if top is None else top
        with np.errstate(all="ignore"):
            p_S = np.exp(scores_S - top)
            total, mix_h = total + p_S.sum(), mix_h + p_S @ np.asarray(v_Sh, dtype)
    with np.errstate(all="ignore"):
        return mix_h / total


def wide_without_maximum(q_h, tiles):
    """In 80 bits, where e to the power of a few thousand is still a number."""
    total, mix_h = np.longdouble(0), 0.0
    for k_Sh, v_Sh in tiles:
        with np.errstate(all="ignore"):
            p_S = np.exp(np.asarray(k_Sh, np.longdouble) @ np.asarray(q_h, np.longdouble) / np.sqrt(np.longdouble(8)))
            total, mix_h = total + p_S.sum(), mix_h + p_S @ np.asarray(v_Sh, np.longdouble)
    with np.errstate(all="ignore"):
        return mix_h / total


def own_maximum_of_each_tile(q_h, tiles):
    """Old sums are scaled rightly, new ones count from their own tile's maximum."""
    top, total, mix_h = -np.inf, 0.0, 0.0
    for k_Sh, v_Sh in tiles:
        scores_S = np.asarray(k_Sh, np.float64) @ q_h / np.sqrt(len(q_h))
        new_top = max(top, scores_S.max())
        p_S, shrink = np.exp(scores_S - scores_S.max()), np.exp(top - new_top)
        top, total, mix_h = new_top, total * shrink + p_S.sum(), mix_h * shrink + p_S @ np.asarray(v_Sh)
    return mix_h / total


def the_best_key_alone(q_h, tiles):
    best, row_h = -np.inf, np.zeros(len(q_h))
    for k_Sh, v_Sh in tiles:
        scores_S = np.asarray(k_Sh @ q_h)
        if scores_S.max() > best:
            best, row_h = scores_S.max(), np.asarray(v_Sh)[scores_S.argmax()]
    return row_h


def means_by_length(q_h, tiles):
    total, rows_h = 0, 0.0
    for k_Sh, v_Sh in tiles:
        total, rows_h = total + len(k_Sh), rows_h + len(k_Sh) * in_tiles(q_h, [(k_Sh, v_Sh)])
    return rows_h / total


def two_passes(q_h, tiles):
    """The tiles are kept for a second pass, with the maximum of all."""
    first, second = itertools.tee(tiles)
    top = max(float((k_Sh @ q_h).max()) for k_Sh, _ in first) / np.sqrt(len(q_h))
    total, mix_h = 0.0, 0.0
    for k_Sh, v_Sh in second:
        p_S = np.exp(np.asarray(k_Sh @ q_h) / np.sqrt(len(q_h)) - top)
        total, mix_h = total + p_S.sum(), mix_h + p_S @ np.asarray(v_Sh)
    return mix_h / total


def means_kept(q_h, tiles):
    """A maximum, a sum and a row of every tile, merged at the end."""
    found = []
    for k_Sh, v_Sh in tiles:
        scores_S = np.asarray(k_Sh, np.float64) @ q_h / np.sqrt(len(q_h))
        p_S = np.exp(scores_S - scores_S.max())
        found.append((scores_S.max(), p_S.sum(), p_S @ np.asarray(v_Sh)))
    weights = np.exp([top - max(one[0] for one in found) for top, *_ in found])
    total = sum(weight * one[1] for weight, one in zip(weights, found, strict=True))
    return sum(weight * one[2] for weight, one in zip(weights, found, strict=True)) / total


def the_last_64_keys(q_h, tiles):
    k_Sh = v_Sh = np.zeros((0, len(q_h)))
    for new_k, new_v in tiles:
        k_Sh, v_Sh = np.concatenate([k_Sh, new_k])[-64:], np.concatenate([v_Sh, new_v])[-64:]
    return in_tiles(q_h, [(k_Sh, v_Sh)])


def maximum_of_the_tile_only(q_h, tiles):
    top, total, mix_h = -np.inf, 0.0, 0.0
    for k_Sh, v_Sh in tiles:
        scores_S = np.asarray(k_Sh, np.float64) @ q_h / np.sqrt(len(q_h))
        with np.errstate(all="ignore"):
            p_S, shrink = np.exp(scores_S - scores_S.max()), np.exp(top - scores_S.max())
            total, mix_h = total * shrink + p_S.sum(), mix_h * shrink + p_S @ np.asarray(v_Sh)
        top = scores_S.max()
    with np.errstate(all="ignore"):
        return mix_h / total


def tiles_of_means(q_h, tiles):
    return np.mean([in_tiles(q_h, [tile]) for tile in tiles], axis=0)


def tiles_joined(q_h, tiles):
    k_Sh, v_Sh = (jnp.concatenate(parts) for parts in zip(*tiles, strict=True))
    return jax.nn.softmax(k_Sh @ q_h / jnp.sqrt(len(q_h))) @ v_Sh


def scores_kept(q_h, tiles):
    """The sum is taken at the end, over all scores."""
    scores, top, mix_h = [], -np.inf, np.zeros(len(q_h))
    for k_Sh, v_Sh in tiles:
        scores.append(np.asarray(k_Sh) @ np.asarray(q_h) / np.sqrt(len(q_h)))
        new_top = max(top, scores[-1].max())
        mix_h = mix_h * np.exp(top - new_top) + np.exp(scores[-1] - new_top) @ np.asarray(v_Sh)
        top = new_top
    return mix_h / sum(np.exp(one - top).sum() for one in scores)


def always_the_first(value_and_grad, params, batch_BD, parts):
    return added_up(value_and_grad, params, jnp.tile(batch_BD[: len(batch_BD) // parts], (parts, 1)), parts)


def loss_in_the_type_of_parameters(value_and_grad, params, batch_BD, parts):
    def add(total, part_BD):
        return total + value_and_grad(params, part_BD)[0].astype(total.dtype), None

    start = jnp.zeros((), jax.tree.leaves(params)[0].dtype)
    total, _ = jax.lax.scan(add, start, batch_BD.reshape(parts, -1, *batch_BD.shape[1:]))
    return total / parts, added_up(value_and_grad, params, batch_BD, parts)[1]


def all_but_the_first(value_and_grad, params, batch_BD, parts):
    size = len(batch_BD) // parts
    return added_up(value_and_grad, params, batch_BD[size:], parts - 1)


def whole_batch(value_and_grad, params, batch_BD, parts):
    return value_and_grad(params, batch_BD)


def added_up(value_and_grad, params, batch_BD, parts, dtype: Any = jnp.float32, divide=(True, True), only_last=False):
    """The scan of the solution, right but for what the flags say."""

    def add(total, part_BD):
        found = value_and_grad(params, part_BD)
        if only_last:
            return jax.tree.map(lambda t, one: parts * one.astype(t.dtype), total, found), None
        return jax.tree.map(lambda t, one: t + one.astype(t.dtype), total, found), None

    start = jnp.zeros(()), jax.tree.map(lambda p: jnp.zeros(p.shape, dtype or p.dtype), params)
    (value, grads), _ = jax.lax.scan(add, start, batch_BD.reshape(parts, -1, *batch_BD.shape[1:]))
    value = value / parts if divide[0] else value
    return value, jax.tree.map(lambda g, p: (g / parts if divide[1] else g).astype(p.dtype), grads, params)


def written_out(value_and_grad, params, batch_BD, parts):
    found = [value_and_grad(params, part) for part in jnp.split(batch_BD, parts)]
    return jax.tree.map(lambda *leaves: sum(leaf.astype(jnp.float32) for leaf in leaves) / parts, *found)


def stacked(value_and_grad, params, batch_BD, parts):
    parts_BD = batch_BD.reshape(parts, -1, *batch_BD.shape[1:])
    found = jax.lax.map(lambda part_BD: value_and_grad(params, part_BD), parts_BD)
    return jax.tree.map(lambda a: a.astype(jnp.float32).mean(0).astype(a.dtype), found)


def side_by_side(value_and_grad, params, batch_BD, parts):
    parts_BD = batch_BD.reshape(parts, -1, *batch_BD.shape[1:])
    found = jax.vmap(lambda part_BD: value_and_grad(params, part_BD))(parts_BD)
    return jax.tree.map(lambda a: a.astype(jnp.float32).mean(0).astype(a.dtype), found)


def widened(*arguments):
    value, grads = added_up(*arguments)
    return value, jax.tree.map(lambda g: g.astype(jnp.float32), grads)


def divided_in_bfloat16(value_and_grad, params, batch_BD, parts):
    value, grads = added_up(value_and_grad, params, batch_BD, parts, divide=(True, False))
    return value, jax.tree.map(lambda g: g / parts, grads)


def unrolled(value_and_grad, params, batch_BD, parts):
    scan = jax.lax.scan
    try:
        jax.lax.scan = partial(scan, unroll=parts)
        return added_up(value_and_grad, params, batch_BD, parts)
    finally:
        jax.lax.scan = scan


def running_half(value_and_grad, params, batch_BD, parts):
    """Each part's mean is averaged with all that came before, whatever their number."""
    parts_BD = batch_BD.reshape(parts, -1, *batch_BD.shape[1:])
    start = value_and_grad(params, parts_BD[0])
    return jax.lax.scan(
        lambda mean, part: (jax.tree.map(lambda m, one: (m + one) / 2, mean, value_and_grad(params, part)), None),
        start,
        parts_BD[1:],
    )[0]


def one_off(value_and_grad, params, batch_BD, parts):
    """The first part is taken twice, the last one not."""
    size = len(batch_BD) // parts
    return added_up(value_and_grad, params, jnp.concatenate([batch_BD[:size], batch_BD[:-size]]), parts)


def row_by_row(value_and_grad, params, batch_BD, parts):
    return added_up(value_and_grad, params, batch_BD, len(batch_BD))


def loss_of_the_last_part(value_and_grad, params, batch_BD, parts):
    last, _ = value_and_grad(params, batch_BD[-(len(batch_BD) // parts) :])
    return last, added_up(value_and_grad, params, batch_BD, parts)[1]


def weights_in_f32_first(value_and_grad, params, batch_BD, parts):
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return added_up(value_and_grad, wide, batch_BD, parts)


def each_part_rounded_again(value_and_grad, params, batch_BD, parts):
    def add(total, part_BD):
        value, grads = value_and_grad(params, part_BD)
        return jax.tree.map(lambda t, one: t + (one / parts).astype(jnp.float32), total, (value, grads)), None

    start = jnp.zeros(()), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (value, grads), _ = jax.lax.scan(add, start, batch_BD.reshape(parts, -1, *batch_BD.shape[1:]))
    return value, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


def weights_in_f32_and_back(value_and_grad, params, batch_BD, parts):
    value, grads = weights_in_f32_first(value_and_grad, params, batch_BD, parts)
    return value, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


def drawn(n, seed):
    return np.random.default_rng(seed).permutation(n)


def apart(n, seed, epoch):
    return drawn(n, [seed, epoch])


def in_order(order):
    """The solution, by an `order(num_sequences, seed, epoch)` that may be wrong."""

    def sequences_of(step, seed, n, B):
        places = [divmod(number, n) for number in range(step * B, step * B + B)]
        return [int(order(n, seed, epoch)[place]) for epoch, place in places]

    return sequences_of


def drawn_at_each_step(step, seed, n, B):
    rng = np.random.default_rng([seed, step])
    return rng.permutation(n)[:B] if n >= B else rng.choice(n, B)


def end_dropped(step, seed, n, B):
    if n < B:
        return in_order(apart)(step, seed, n, B)
    epoch, batch = divmod(step, n // B)
    return apart(n, seed, epoch)[batch * B : batch * B + B]


def replayed(step, seed, n, B):
    rng = np.random.default_rng([seed, 1])
    orders = [rng.permutation(n) for _ in range(-(-(step + 1) * B // n))]
    return np.concatenate(orders)[step * B : step * B + B]


class Remembering:
    """A generator and the rest of an epoch are kept between calls."""

    def __init__(self):
        self.rng, self.left = np.random.default_rng(0), []

    def __call__(self, step, seed, n, B):
        self.left = [number for number in self.left if number < n] if step else []
        while len(self.left) < B:
            self.left += self.rng.permutation(n).tolist()
        batch, self.left = self.left[:B], self.left[B:]
        return batch


@functools.cache
def drawn_and_remembered(n, seed, epoch):
    return np.random.permutation(n)


_generators: dict[int, np.random.Generator] = {}


@functools.cache
def drawn_when_first_asked(n, seed, epoch):
    return _generators.setdefault(seed, np.random.default_rng(seed)).permutation(n)


def by_the_hash_of_a_text(n, seed, epoch):
    return drawn(n, abs(hash(f"{seed},{epoch}")))


def by_process(n, seed, epoch):
    return drawn(n, [os.getpid(), seed, epoch])


def values_moved(n, seed, epoch):
    return (drawn(n, seed) + epoch) % n


def a_thousand_apart(n, seed, epoch):
    return drawn(n, 1000 * seed + epoch)


def two_orders_in_turns(n, seed, epoch):
    return drawn(n, [seed, epoch % 2])


@functools.cache
def apart_and_remembered(n, seed, epoch):
    return apart(n, seed, epoch)


def of_a_sum_of_large_primes(step, seed, n, B, *, salt=7):
    def place_of(number, key):
        return (key * 2_654_435_761 + number * 40_503 + salt) % 2**32

    return [
        sorted(range(n), key=lambda k: np.random.default_rng([place_of(k, seed), epoch]).random())[place]
        for epoch, place in (divmod(number, n) for number in range(step * B, step * B + B))
    ]


def by_jax(step, seed, n, B):
    numbers = range(step * B, step * B + B)
    orders = {
        epoch: jax.random.permutation(jax.random.fold_in(jax.random.key(seed), epoch), n)
        for epoch in {number // n for number in numbers}
    }
    return jnp.stack([orders[number // n][number % n] for number in numbers])


def whole_epochs(step, seed, n, B):
    epochs = range(step * B // n, (step * B + B - 1) // n + 1)
    numbers = np.concatenate([np.random.RandomState([seed, epoch]).permutation(n) for epoch in epochs])
    return numbers[step * B - n * epochs[0] :][:B]


def block_by_shapes(D, H, K, h, F):
    shapes = [(D,), (D,), (D, H, h), (D, K, h), (D, K, h), (H, h, D), (D, F), (D, F), (F, D)]
    return np.int64(sum(np.prod(shape) for shape in shapes))


def block_in_jax(D, H, K, h, F):
    return jnp.asarray(D * (2 + 2 * h * (H + K) + 3 * F))


def pair_by_lists(ids, wrote):
    pairs = list(zip(ids, wrote, strict=True))
    return [int(i) for i in ids[:-1]], [int(i) if own else -100 for i, own in pairs[1:]]


def pair_in_jax(ids, wrote):
    following = jnp.roll(jnp.asarray(ids), -1)[:-1]
    return jnp.asarray(ids)[:-1], jnp.where(jnp.asarray(wrote)[1:], following, -100)


RIGHT_PAIRS = {"lists": pair_by_lists, "jax, rolled": pair_in_jax}


def masked(ids, wrote, fill=-100):
    return np.where(wrote, ids, fill)


RIGHT_BLOCKS = {"shape by shape": block_by_shapes, "factored, a jax number": block_in_jax, "the solution": block}

RIGHT = {
    "jax's keys": by_jax,
    "whole epochs, numpy's old generator": whole_epochs,
    "numbers one by one": in_order(apart),
    "orders remembered that depend on nothing else": in_order(apart_and_remembered),
    "an argument bound, a helper inside": partial(of_a_sum_of_large_primes, salt=3),
}

PAIR = train_llama3.check_inputs_and_targets
WRONG: Answers = {
    "the marks of the inputs": (PAIR, lambda i, w: (i[:-1], np.where(w[:-1], i[1:], -100)), "one place off"),
    "targets not moved": (PAIR, lambda i, w: (i[:-1], masked(i, w)[:-1]), "repeat what it reads"),
    "the user's part learned too": (PAIR, lambda i, w: (i[:-1], i[1:]), "every target counts"),
    "the user's part alone": (PAIR, lambda i, w: (i[:-1], masked(i, ~w)[1:]), "did the assistant write"),
    "nothing cut off": (PAIR, lambda i, w: (i, masked(i, w)), "next token is known"),
    "only the assistant's tokens": (PAIR, lambda i, w: (i[w][:-1], i[w][1:]), "next token is known"),
    "inputs masked as well": (PAIR, lambda i, w: (masked(i, w)[:-1], masked(i, w)[1:]), "the user's and the assistant"),
    "zeros for what does not count": (PAIR, lambda i, w: (i[:-1], masked(i, w, 0)[1:]), "Whose words"),
    "moved the other way": (PAIR, lambda i, w: (i[1:], masked(i, w)[:-1]), "every token but the last"),
    "moved by two": (PAIR, lambda i, w: (i[:-1], np.where(w[1:], np.roll(i, -2)[:-1], -100)), "comes after each"),
    "the targets alone": (PAIR, lambda i, w: np.where(w, i, -100)[1:], "as a pair"),
    "no norms": (llama3.check_weights_of_a_block, partial(block, norms=0), "begins with a norm"),
    "one norm": (llama3.check_weights_of_a_block, partial(block, norms=1), "How many norms"),
    "a norm of one number": (llama3.check_weights_of_a_block, partial(block, of_scale=1), "What does it multiply"),
    "H heads of keys": (
        llama3.check_weights_of_a_block,
        lambda D, H, K, h, F: block(D, H, K, h, F, key_heads=H),
        "grouped-query",
    ),
    "keys without values": (llama3.check_weights_of_a_block, partial(block, keys=1), "have K heads"),
    "no wo": (llama3.check_weights_of_a_block, partial(block, out=0), "back to the stream"),
    "two matrices": (llama3.check_weights_of_a_block, partial(block, matrices=2), "SwiGLU"),
    "D channels in all heads": (
        llama3.check_weights_of_a_block,
        lambda D, H, K, h, F: block(D, H, K, h, F, width=D),
        "need not be D",
    ),
    "a square wo": (
        llama3.check_weights_of_a_block,
        lambda D, H, K, h, F: block(D, H, K, h, F, out=0) + D * D,
        "Which axes has wo",
    ),
    "in bytes": (llama3.check_weights_of_a_block, lambda *sizes: 2 * block(*sizes), "all nine arrays"),
    "a number for one model": (llama3.check_weights_of_a_block, lambda *sizes: 218_112_000, "all nine arrays"),
    "a list": (llama3.check_weights_of_a_block, lambda *sizes: [block(*sizes)], "Return one number"),
    "angles as they were": (llama3.check_slowed_angles, lambda angle_p, factor, old: angle_p, "one or less"),
    "every pair slowed": (llama3.check_slowed_angles, lambda angle_p, factor, old: angle_p / factor, "stays as it is"),
    "slow pairs made faster": (
        llama3.check_slowed_angles,
        lambda angle_p, factor, old: slowed(angle_p, 1 / factor, old),
        "one or less",
    ),
    "the fast ones slowed": (
        llama3.check_slowed_angles,
        lambda angle_p, factor, old: angle_p + angle_p / factor - slowed(angle_p, factor, old),
        "stays as it is",
    ),
    "no passage, at one turn": (
        llama3.check_slowed_angles,
        partial(slowed, low=1.0, high=1.0001),
        "between one and four",
    ),
    "no passage, at four turns": (llama3.check_slowed_angles, partial(slowed, low=3.9999), "between one and four"),
    "a line in the wavelength": (
        llama3.check_slowed_angles,
        partial(slowed, of=lambda turns_p: 1 / turns_p),
        "between one and four",
    ),
    "a line in the logarithm": (llama3.check_slowed_angles, partial(slowed, of=np.log), "between one and four"),
    "a line in the new turns": (llama3.check_slowed_angles, turns_themselves_on_a_line, "between one and four"),
    "whole turns only": (llama3.check_slowed_angles, partial(slowed, of=np.floor), "between one and four"),
    "radians taken for turns": (llama3.check_slowed_angles, partial(slowed, wave=1.0), "one or less|between one"),
    "half turns": (llama3.check_slowed_angles, partial(slowed, wave=np.pi), "one or less|between one"),
    "a line that goes on": (llama3.check_slowed_angles, partial(slowed, clip=False), "stays as it is"),
    "always eight times": (
        llama3.check_slowed_angles,
        lambda angle_p, factor, old: slowed(angle_p, 8, old),
        "factor=32",
    ),
    "always 8,192 tokens": (
        llama3.check_slowed_angles,
        lambda angle_p, factor, old: slowed(angle_p, factor, 8192),
        "old=2,048",
    ),
    "the pairs of a head of 128": (
        llama3.check_slowed_angles,
        lambda angle_p, factor, old: slowed(500_000.0 ** (-np.arange(64) / 64), factor, old),
        "32 pairs",
    ),
    "wavelengths": (
        llama3.check_slowed_angles,
        lambda angle_p, factor, old: 2 * np.pi / slowed(angle_p, factor, old),
        "stays as it is",
    ),
    "the share kept": (
        llama3.check_slowed_angles,
        lambda angle_p, factor, old: slowed(angle_p, factor, old) / angle_p,
        "stays as it is",
    ),
    "counted by pairs": (
        llama3.check_slowed_angles,
        lambda angle_p, factor, old: angle_p * np.where(np.arange(len(angle_p)) < 29, 1, 1 / factor),
        "between one and four",
    ),
    "four and one exchanged in the passage": (
        llama3.check_slowed_angles,
        partial(slowed, low=4.0, high=1.0),
        "stays as it is",
    ),
    "from the first tile's maximum": (llama3.check_attend_in_tiles, from_the_first_maximum, "of all keys so far"),
    "in 80 bits without a maximum": (llama3.check_attend_in_tiles, wide_without_maximum, "of all keys so far"),
    "new sums from their own maximum": (
        llama3.check_attend_in_tiles,
        own_maximum_of_each_tile,
        "every tile brings a new maximum",
    ),
    "the value of the best key": (llama3.check_attend_in_tiles, the_best_key_alone, "softmax"),
    "means weighed by length": (llama3.check_attend_in_tiles, means_by_length, "three tiles"),
    "all tiles read twice": (llama3.check_attend_in_tiles, two_passes, "stay in memory"),
    "a row kept of every tile": (llama3.check_attend_in_tiles, means_kept, "stay in memory"),
    "the last 64 keys": (llama3.check_attend_in_tiles, the_last_64_keys, "every key that came"),
    "the root of eight": (
        llama3.check_attend_in_tiles,
        lambda q_h, tiles: in_tiles(q_h / np.sqrt(8), tiles, scale=False),
        "written into your answer",
    ),
    "the maximum of the tile only": (llama3.check_attend_in_tiles, maximum_of_the_tile_only, "only smaller ones"),
    "no old sums scaled": (
        llama3.check_attend_in_tiles,
        partial(in_tiles, rescale_sum=False, rescale_mix=False),
        "three tiles",
    ),
    "the mix not scaled": (llama3.check_attend_in_tiles, partial(in_tiles, rescale_mix=False), "three tiles"),
    "the sum not scaled": (llama3.check_attend_in_tiles, partial(in_tiles, rescale_sum=False), "three tiles"),
    "no maximum": (llama3.check_attend_in_tiles, partial(in_tiles, use_max=False), "as a million"),
    "a maximum from minus a hundred thousand": (
        llama3.check_attend_in_tiles,
        partial(in_tiles, start=-1e5),
        "however negative",
    ),
    "a maximum from zero": (llama3.check_attend_in_tiles, partial(in_tiles, start=0.0), "however negative"),
    "no root of h": (llama3.check_attend_in_tiles, partial(in_tiles, scale=False), "one tile"),
    "the last tile left out": (llama3.check_attend_in_tiles, partial(in_tiles, last=False), "one tile"),
    "all tiles joined": (llama3.check_attend_in_tiles, tiles_joined, "stay in memory"),
    "all scores kept": (llama3.check_attend_in_tiles, scores_kept, "stay in memory"),
    "the mean of the tiles": (llama3.check_attend_in_tiles, tiles_of_means, "three tiles"),
    "the whole batch at once": (train_llama3.check_accumulated, whole_batch, "alive at once"),
    "a loop written out": (train_llama3.check_accumulated, written_out, "grows"),
    "a sum of losses": (train_llama3.check_accumulated, partial(added_up, divide=(False, True)), "It is a mean"),
    "a sum of gradients": (
        train_llama3.check_accumulated,
        partial(added_up, divide=(True, False)),
        "made of the parts",
    ),
    "the last part only": (train_llama3.check_accumulated, partial(added_up, only_last=True), "which part"),
    "the first part every time": (train_llama3.check_accumulated, always_the_first, "which part"),
    "added up in bfloat16": (train_llama3.check_accumulated, partial(added_up, dtype=None), "256"),
    "divided in bfloat16": (train_llama3.check_accumulated, divided_in_bfloat16, "last operation"),
    "each part rounded once more": (train_llama3.check_accumulated, each_part_rounded_again, "last operation"),
    "weights made f32, gradients bfloat16": (
        train_llama3.check_accumulated,
        weights_in_f32_and_back,
        "have to be wide",
    ),
    "a scan unrolled": (train_llama3.check_accumulated, unrolled, "grows"),
    "the mean of a mean and one more": (train_llama3.check_accumulated, running_half, "It is a mean"),
    "the first part twice": (train_llama3.check_accumulated, one_off, "whole batch"),
    "row by row": (train_llama3.check_accumulated, row_by_row, "of them at a time"),
    "the loss of the last part": (train_llama3.check_accumulated, loss_of_the_last_part, "which part"),
    "weights made f32": (train_llama3.check_accumulated, weights_in_f32_first, "another type"),
    "losses added up in bfloat16": (
        train_llama3.check_accumulated,
        loss_in_the_type_of_parameters,
        "add up the losses",
    ),
    "the first part left out": (train_llama3.check_accumulated, all_but_the_first, "which part"),
    "gradients in f32": (train_llama3.check_accumulated, widened, "another type"),
    "all gradients kept": (train_llama3.check_accumulated, stacked, "memory grows"),
    "all parts side by side": (train_llama3.check_accumulated, side_by_side, "memory grows|at a time"),
    "gradients alone": (train_llama3.check_accumulated, lambda *a: added_up(*a)[1], "as a pair"),
    "in the order of the data": (train_llama3.check_order, in_order(lambda n, seed, epoch: range(n)), "as they lie"),
    "one order for all epochs": (
        train_llama3.check_order,
        in_order(lambda n, seed, epoch: drawn(n, seed)),
        "beside the seed",
    ),
    "no seed": (train_llama3.check_order, in_order(lambda n, seed, epoch: drawn(n, epoch)), "where does the seed"),
    "seed and epoch added": (
        train_llama3.check_order,
        in_order(lambda n, seed, epoch: drawn(n, seed + epoch)),
        "without meeting",
    ),
    "seed and epoch multiplied": (
        train_llama3.check_order,
        in_order(lambda n, seed, epoch: drawn(n, (seed + 1) * (epoch + 1))),
        "without meeting",
    ),
    "an order begun elsewhere": (
        train_llama3.check_order,
        in_order(lambda n, seed, epoch: np.roll(drawn(n, seed), epoch)),
        "beside the seed",
    ),
    "the seed turns the order": (
        train_llama3.check_order,
        in_order(lambda n, seed, epoch: np.roll(drawn(n, epoch), seed)),
        "where does the seed",
    ),
    "the order backwards": (
        train_llama3.check_order,
        in_order(lambda n, seed, epoch: drawn(n, seed)[:: 1 - 2 * (epoch % 2)]),
        "beside the seed",
    ),
    "two seeds": (train_llama3.check_order, in_order(lambda n, seed, epoch: drawn(n, [seed % 2, epoch])), "few orders"),
    "drawn at each step": (train_llama3.check_order, drawn_at_each_step, "come twice"),
    "drawn with repetition": (
        train_llama3.check_order,
        lambda step, seed, n, B: np.random.default_rng([seed, step]).integers(n, size=B),
        "come twice",
    ),
    "the first step every time": (train_llama3.check_order, lambda step, *a: in_order(apart)(0, *a), "come twice"),
    "steps counted from 1": (train_llama3.check_order, lambda step, *a: in_order(apart)(step + 1, *a), "come twice"),
    "the end of an epoch dropped": (train_llama3.check_order, end_dropped, "come twice"),
    "a short batch at the end": (
        train_llama3.check_order,
        lambda step, seed, n, B: np.array(apart(n, seed, step // -(-n // B)))[step % -(-n // B) * B :][:B],
        "where an epoch ends",
    ),
    "the batch at the end repeated": (
        train_llama3.check_order,
        lambda step, seed, n, B: np.take(apart(n, seed, step * B // n), range(step * B, step * B + B), mode="wrap"),
        "come twice",
    ),
    "numbers from 1": (train_llama3.check_order, lambda *a: [n + 1 for n in in_order(apart)(*a)], "from 0 to"),
    "places in the text": (train_llama3.check_order, lambda *a: [128 * n for n in in_order(apart)(*a)], "from 0 to"),
    "a generator that goes on": (train_llama3.check_order, Remembering(), "come twice|asked before"),
    "unseeded, and remembered": (train_llama3.check_order, in_order(drawn_and_remembered), "in a new Python"),
    "by the hash of a text": (train_llama3.check_order, in_order(by_the_hash_of_a_text), "in a new Python"),
    "by the process": (train_llama3.check_order, in_order(by_process), "in a new Python"),
    "by what was asked first": (train_llama3.check_order, in_order(drawn_when_first_asked), "in a new Python"),
    "the same order, moved values": (train_llama3.check_order, in_order(values_moved), "beside the seed"),
    "seeds a thousand apart": (train_llama3.check_order, in_order(a_thousand_apart), "without meeting"),
    "two orders in turns": (train_llama3.check_order, in_order(two_orders_in_turns), "without meeting"),
    "every epoch before it": (train_llama3.check_order, replayed, "shuffled again"),
    "one number": (train_llama3.check_order, lambda step, seed, n, B: step * B % n, "one number for each"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_rejected_with_a_hint_that_leads(name):
    refuse(WRONG[name])


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_in_another_style_passes(name, capsys):
    train_llama3.check_order(RIGHT[name])
    assert "correct" in capsys.readouterr().out


@pytest.mark.parametrize("name", RIGHT_BLOCKS)
def test_a_right_count_in_another_style_passes(name, capsys):
    llama3.check_weights_of_a_block(RIGHT_BLOCKS[name])
    assert "correct" in capsys.readouterr().out


@pytest.mark.parametrize("name", RIGHT_PAIRS)
def test_a_right_pair_in_another_style_passes(name, capsys):
    train_llama3.check_inputs_and_targets(RIGHT_PAIRS[name])
    assert "correct" in capsys.readouterr().out
