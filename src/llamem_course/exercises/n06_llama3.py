"""The exercises of notebook 06."""

import itertools
import tracemalloc
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.llama import rope_tables
from llamem.llama.config import LlamaConfig, RopeScaling
from llamem_course.exercises.exercise import Answer, Exercise


def _block(
    D: int, H: int, K: int, h: int, F: int, *, norms: int = 2, of_scale: int = 0, keys: int = 2, out: int = 1, mlp=3
) -> int:
    """Return the weights of a block, right but for what is given."""
    return norms * (of_scale or D) + (1 + out) * D * H * h + keys * D * K * h + mlp * D * F


def _count(answer: Answer, *sizes: int) -> Any:
    found = answer(*sizes)
    assert found is not None and np.ndim(found) == 0, "Return one number, the sum over all nine arrays."
    return found


check_weights_of_a_block = Exercise(
    1,
    _block,
    {
        "D={:,}, H={}, K={}, h={}, F={:,}".format(*sizes): sizes
        for sizes in ((4096, 32, 8, 128, 14_336), (2048, 32, 8, 64, 8192), (48, 6, 2, 10, 100), (24, 4, 4, 6, 7))
    },
    "Times the layers, plus the tables and a last norm: that is the number on the model card.",
    {
        "Return one number, the sum over all nine arrays.": lambda *sizes: [_block(*sizes)],
        "Each half of a block begins with a norm. How many numbers has its scale?": partial(_block, norms=0),
        "How many norms are there in a block?": partial(_block, norms=1),
        "A norm's scale is not one number. What does it multiply?": partial(_block, of_scale=1),
        "How many heads have keys and values, in grouped-query attention?": (
            lambda D, H, K, h, F: _block(D, H, H, h, F)
        ),
        "Which two projections have K heads?": partial(_block, keys=1),
        "What brings the heads' results back to the stream, and which size has it?": partial(_block, out=0),
        "How many matrices has SwiGLU? One passes through silu, one does not, one leads back.": partial(_block, mlp=2),
        "H heads of h channels need not be D channels together.": (
            lambda D, H, K, h, F: 2 * D + 2 * D * D + 2 * D * K * h + 3 * D * F
        ),
        "Which axes has the matrix that leads back, wo?": [
            lambda D, H, K, h, F: _block(D, H, K, h, F, out=0) + D * D,
            lambda D, H, K, h, F: _block(D, H, K, h, F, out=0) + h * h,
        ],
        "Write down the axes of all nine arrays, then multiply, then add.": [
            lambda *sizes: 2 * _block(*sizes),
            lambda *sizes: 218_112_000,
        ],
    },
    otherwise="Write down the axes of all nine arrays, then multiply, then add.",
    ask=_count,
    told=lambda got, right, *_: f"yours is {got:,}, the block has {right:,}.",
    rtol=0,
)


def _in_llama31(angle_p: Any, factor: float, old: int) -> np.ndarray:
    """Return the package's angles of Llama 3.1, for heads of twice as many channels as there are angles."""
    scaling = RopeScaling(factor=factor, original_max_seq_len=old)
    config = LlamaConfig.from_name("llama3.1-8b", head_dim=2 * len(angle_p), rope_scaling=scaling)
    cos, sin = rope_tables(config, jnp.array([1]))
    return np.arctan2(sin[0], cos[0])


def _slowed(
    angle_p: Any,
    factor: float,
    old: int,
    *,
    low: float = 1.0,
    high: float = 4.0,
    turn: float = 2 * np.pi,
    along: Answer = lambda turns_p: turns_p,
    clip: tuple[float, float] = (0, 1),
) -> Any:
    """Return Llama 3.1's angles, right but for what is given; `along`: in what the line between is straight."""
    turns_p = np.asarray(old * np.asarray(angle_p, np.float64) / turn)
    share_p = (along(turns_p) - along(np.float64(low))) / (along(np.float64(high)) - along(np.float64(low)))
    return angle_p * (1 / factor + (1 - 1 / factor) * np.clip(share_p, *clip))


def _new_turns_on_a_line(angle_p: Any, factor: float, old: int) -> Any:
    turns_p = old * angle_p / (2 * np.pi)
    between_p = (1 / factor + (turns_p - 1) / 3 * (4 - 1 / factor)) * 2 * np.pi / old
    return jnp.select([turns_p >= 4, turns_p <= 1], [angle_p, angle_p / factor], between_p)


def _angles_of(pairs: int) -> Any:
    return jnp.asarray(500_000.0 ** (-np.arange(pairs) / pairs), jnp.float32)


def _one_for_each(answer: Answer, angle_p: Any, factor: float, old: int) -> np.ndarray:
    found_p = np.asarray(answer(angle_p, factor, old), np.float64)
    assert found_p.shape == angle_p.shape, f"Return one angle for each of the {len(angle_p)} pairs."
    return found_p


def _first_wrong(found_p: Any, right_p: Any, angle_p: Any, factor: float, old: int) -> str:
    i = int(np.argmax(~np.isclose(found_p, right_p, rtol=1e-3)))
    turns = old * angle_p[i] / (2 * np.pi)
    kept, right = found_p[i] / angle_p[i], right_p[i] / angle_p[i]
    return (
        f"pair {i} makes {turns:,.2f} turns in the first context. Yours keeps {kept:.3f} of its angle, not {right:.3f}."
    )


check_slowed_angles = Exercise(
    2,
    _in_llama31,
    {
        f"factor={factor:g}, old={old:,}, {pairs} pairs": (_angles_of(pairs), factor, old)
        for pairs, factor, old in ((64, 8.0, 8192), (32, 32.0, 8192), (64, 4.0, 2048))
    },
    "These are Llama 3.1's angles: with them, your lines are that model.",
    {
        "Return one angle for each of the": lambda angle_p, factor, old: angle_p[:8],
        "A pair of one turn or less has seen a slice of its angles: what does it keep?": lambda angle_p, *_: angle_p,
        "Four turns or more: such a pair has seen every angle. What stays as it is?": (
            lambda angle_p, factor, old: angle_p / factor
        ),
        "Which pairs are slowed, the fast ones or the slow ones? And slowed, or made faster?": [
            lambda angle_p, factor, old: angle_p + angle_p / factor - _slowed(angle_p, factor, old),
            lambda angle_p, factor, old: _slowed(angle_p, 1 / factor, old),
            partial(_slowed, low=4.0, high=1.0),
        ],
        "Between one turn and four the share runs along a straight line: from what to what?": [
            partial(_slowed, high=1.0001),
            partial(_slowed, low=3.9999),
            lambda angle_p, factor, old: angle_p * np.where(np.arange(len(angle_p)) < 29, 1, 1 / factor),
        ],
        "In what is the line straight: in the number of turns, and is it the share that runs along it?": [
            partial(_slowed, along=lambda turns_p: 1 / turns_p),
            partial(_slowed, along=np.log),
            partial(_slowed, along=np.floor),
            _new_turns_on_a_line,
        ],
        "How many radians has one turn?": [partial(_slowed, turn=1.0), partial(_slowed, turn=np.pi)],
        "Does your line end at one turn and at four?": partial(_slowed, clip=(-np.inf, np.inf)),
        "Is one model's factor, first context or number of pairs written into your answer?": [
            lambda angle_p, factor, old: _slowed(angle_p, 8, old),
            lambda angle_p, factor, old: _slowed(angle_p, factor, 8192),
        ],
        "Return angles, in radians per token.": [
            lambda *given: 2 * np.pi / _slowed(*given),
            lambda angle_p, *given: _slowed(angle_p, *given) / angle_p,
        ],
    },
    otherwise="Four turns or more: as it is. One or less: 1/factor of it. Between them: a straight line in the turns.",
    ask=_one_for_each,
    told=_first_wrong,
    accepts=lambda got_p, right_p: np.allclose(got_p, right_p, rtol=1e-3, atol=0),
)


def _tiles(
    q_h: Any, tiles: Any, *, old_sum: bool = True, old_mix: bool = True, start: float = -np.inf, top_of: Answer = max
) -> Any:
    """Attend tile by tile, right but for what is given; `top_of(top, scores' maximum)` is the new maximum."""
    top, total, mix_h = start, 0.0, np.zeros(len(q_h))
    with np.errstate(all="ignore"):
        for k_Sh, v_Sh in tiles:
            scores_S = np.asarray(k_Sh, np.float64) @ np.asarray(q_h, np.float64) / np.sqrt(len(q_h))
            new_top = top_of(top, scores_S.max())
            p_S, shrink = np.exp(scores_S - new_top), np.exp(top - new_top) if np.isfinite(top) else 0.0
            total = total * (shrink if old_sum else 1.0) + p_S.sum()
            mix_h = mix_h * (shrink if old_mix else 1.0) + p_S @ np.asarray(v_Sh, np.float64)
            top = new_top
        return mix_h / total


def _openly(q_h: Any, tiles: Any) -> Any:
    k_Sh, v_Sh = (jnp.concatenate(parts) for parts in zip(*tiles, strict=True))
    return jax.nn.softmax(k_Sh @ q_h / len(q_h) ** 0.5) @ v_Sh


def _own_maximum(q_h: Any, tiles: Any) -> Any:
    """Scale old sums rightly, and count new ones from their own tile's maximum."""
    top, total, mix_h = -np.inf, 0.0, 0.0
    for k_Sh, v_Sh in tiles:
        scores_S = np.asarray(k_Sh, np.float64) @ q_h / np.sqrt(len(q_h))
        new_top = max(top, scores_S.max())
        p_S, shrink = np.exp(scores_S - scores_S.max()), np.exp(top - new_top)
        top, total, mix_h = new_top, total * shrink + p_S.sum(), mix_h * shrink + p_S @ np.asarray(v_Sh)
    return mix_h / total


def _best_key(q_h: Any, tiles: Any) -> Any:
    return max(((k_h @ q_h, v_h) for tile in tiles for k_h, v_h in zip(*tile, strict=True)), key=lambda one: one[0])[1]


def _means(q_h: Any, tiles: Any, weight: Answer) -> Any:
    found = [(weight(tile[0]), _tiles(q_h, [tile])) for tile in tiles]
    return sum(times * row_h for times, row_h in found) / sum(times for times, _ in found)


def _two_passes(q_h: Any, tiles: Any) -> Any:
    first, second = itertools.tee(tiles)
    highest = max(float((k_Sh @ q_h).max()) for k_Sh, _ in first) / np.sqrt(len(q_h))
    return _tiles(q_h, second, start=highest)


def _rows_kept(q_h: Any, tiles: Any) -> Any:
    """Keep a maximum, a sum and a row of every tile, and merge them at the end."""
    found = []
    for k_Sh, v_Sh in tiles:
        scores_S = np.asarray(k_Sh, np.float64) @ q_h / np.sqrt(len(q_h))
        p_S = np.exp(scores_S - scores_S.max())
        found.append((scores_S.max(), p_S.sum(), p_S @ np.asarray(v_Sh)))
    weights = np.exp([top - max(one[0] for one in found) for top, *_ in found])
    total, row_h = (sum(w * one[i] for w, one in zip(weights, found, strict=True)) for i in (1, 2))
    return row_h / total


def _scores_kept(q_h: Any, tiles: Any) -> Any:
    tiles, scores = iter(tiles), []

    def noted() -> Iterator[Any]:
        for k_Sh, v_Sh in tiles:
            scores.append(np.asarray(k_Sh @ q_h))
            yield k_Sh, v_Sh

    return _tiles(q_h, noted())


def _last_keys(q_h: Any, tiles: Any) -> Any:
    k_Sh = v_Sh = np.zeros((0, len(q_h)))
    for new_k, new_v in tiles:
        k_Sh, v_Sh = np.concatenate([k_Sh, new_k])[-64:], np.concatenate([v_Sh, new_v])[-64:]
    return _tiles(q_h, [(k_Sh, v_Sh)])


def _long_tiles(h: int, keys: int) -> Iterator[tuple[Any, Any]]:
    for i in range(8):
        k_Sh, v_Sh = jax.random.normal(jax.random.key(i), (2, keys, h))
        yield k_Sh, v_Sh


def _keeps_little(answer: Answer) -> None:
    """Ask for eight long tiles and for eight wide ones; the first two warm the answer up.

    So long and so wide that a tile's scores, or its row, are more than what JAX keeps of a loop that it traces anew.
    """
    for q_h, keys in ((_Q_h, 32_768), (jnp.ones(32_768) / 32_768, 16)):
        held: list[int] = []

        def measured(h: int = len(q_h), keys: int = keys, held: list[int] = held) -> Iterator[tuple[Any, Any]]:
            for tile in _long_tiles(h, keys):
                held.append(sum(array.nbytes for array in jax.live_arrays()) + tracemalloc.get_traced_memory()[0])
                yield tile

        tracemalloc.start()
        try:
            found_h = answer(q_h, measured())
        finally:
            tracemalloc.stop()
        assert np.allclose(found_h, _openly(q_h, _long_tiles(len(q_h), keys)), rtol=1e-3, atol=1e-4), (
            f"Eight tiles of {keys:,} keys, {len(q_h):,} numbers in each, are not plain attention of all. Does the row "
            "know every key that came, and is the size of a head, or of a tile, written into your answer?"
        )
        kept = (held[-1] - held[2]) / (len(held) - 3)
        assert kept < 100_000, (
            f"the numbers are right, but with each tile of {keys:,} keys of {len(q_h):,} numbers {kept:,.0f} more "
            "bytes stay in memory: scores, rows or whole tiles. What has the next tile to know of all before it?"
        )


def _row(answer: Answer, q_h: Any, tiles: list[Any]) -> Any:
    found_h = answer(q_h, iter(tiles))
    assert getattr(found_h, "shape", None) == q_h.shape, "Return one row, as long as a value."
    return found_h


_Q_h, _K_Sh, _V_Sh = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8,), (23, 8), (23, 8)]))
_K_Sh = _K_Sh * np.sign(_K_Sh @ _Q_h)[:, None] + _Q_h  # so that all scores have one sign, which the case chooses
_K_Sh = _K_Sh[np.argsort(_K_Sh @ _Q_h)]  # so that with a positive one every tile brings a new maximum
_AS_A_MILLION = (
    "Scores may be as large as a million: nothing may be raised to the power of such a number before the maximum of "
    "all keys so far is taken off."
)

check_attend_in_tiles = Exercise(
    3,
    _openly,
    {
        name: (scale * _Q_h, [(_K_Sh[a:b], _V_Sh[a:b]) for a, b in itertools.pairwise(edges)])
        for name, scale, edges in (
            ("All keys in one tile", 1.0, (0, 23)),
            ("Three tiles, each with a new maximum", 1.0, (0, 10, 20, 23)),
            ("Two tiles, the maximum in the first", -1.0, (0, 4, 23)),
            ("Three tiles, scores of a million", 2e5, (0, 10, 20, 23)),
            ("Two tiles, scores of minus a million", -2e5, (0, 4, 23)),
        )
    },
    "This is FlashAttention's forward pass, for one query.",
    {
        "Return one row, as long as a value.": lambda q_h, tiles: 0.0,
        "It must be plain attention: scores over the root of h, and a softmax of all of them.": [
            lambda q_h, tiles: _tiles(q_h * np.sqrt(len(q_h)), tiles),
            _best_key,
            lambda q_h, tiles: _tiles(q_h, list(tiles)[:-1] or [(np.zeros((1, 8)), np.zeros((1, 8)))]),
        ],
        "What must happen to the old sum, and to the old mix, when a new maximum comes?": [
            partial(_tiles, old_sum=False),
            partial(_tiles, old_mix=False),
            partial(_tiles, old_sum=False, old_mix=False),
        ],
        "Every tile weighs the same in yours, or as much as it is long. What should a tile weigh?": [
            partial(_means, weight=lambda k_Sh: 1),
            partial(_means, weight=len),
        ],
        "Right as long as every tile brings a new maximum. What is taken off where it does not?": _own_maximum,
        _AS_A_MILLION: [
            partial(_tiles, top_of=lambda top, new: new if top == -np.inf else top),
            lambda q_h, tiles: _tiles(q_h, tiles, start=0.0, top_of=lambda top, new: 0.0),
        ],
        "The maximum so far begins below every score, however negative, and stays where a later tile has only smaller "
        "ones.": [
            partial(_tiles, start=-1e5),
            partial(_tiles, start=0.0),
            partial(_tiles, top_of=lambda top, new: new),
        ],
    },
    {
        _keeps_little: {
            "every key that came": _last_keys,
            "written into your answer": lambda q_h, tiles: _tiles(q_h * np.sqrt(len(q_h) / 8), tiles),
            "stay in memory": [_openly, _two_passes, _rows_kept, _scores_kept],
        }
    },
    otherwise="Carry the largest score so far, a sum and a mix. When a larger score comes, what becomes of the two?",
    ask=_row,
    told=lambda got_h, right_h, *_: f"your row begins with {got_h[0]:.3f}, plain attention's with {right_h[0]:.3f}.",
    rtol=1e-4,
)
