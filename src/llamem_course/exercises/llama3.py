"""Checks of notebook 06's exercises: a block's weights, Llama 3.1's angles, and attention in tiles."""

import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.llama import rope_tables
from llamem.llama.config import LlamaConfig, RopeScaling
from llamem_course.exercises import grade


def check_weights_of_a_block(fn: Callable[..., Any]) -> None:
    """Exercise 1: how many numbers one block has, from its sizes."""

    def body() -> str:
        for sizes in ((4096, 32, 8, 128, 14_336), (2048, 32, 8, 64, 8192), (48, 6, 2, 10, 100), (24, 4, 4, 6, 7)):
            D, H, K, h, F = sizes
            norms, query, key, matrix = 2 * D, D * H * h, D * K * h, D * F
            right = norms + 2 * query + 2 * key + 3 * matrix
            found = fn(*sizes)
            assert np.ndim(found) == 0 and found is not None, "Return one number, the sum over all nine arrays."
            asked = {
                right - norms: "Each half of a block begins with a norm. How many numbers has its scale?",
                right - D: "How many norms are there in a block?",
                right - norms + 2: "A norm's scale is not one number. What does it multiply?",
                right + 2 * (query - key): "How many heads have keys and values, in grouped-query attention?",
                right - key: "Which two projections have K heads?",
                right - query: "What brings the heads' results back to the stream, and which size has it?",
                right - matrix: "How many matrices has SwiGLU? One passes through silu, one does not, one leads back.",
                right + 2 * (D * D - query): "H heads of h channels need not be D channels together.",
                right + D * D - query: "Is one of wq and wo square in yours? Which axes has wo, which leads back?",
                norms + query + h * h + 2 * key + 3 * matrix: "Which axes has the matrix that leads back, wo?",
            }
            if found != right:
                hint = asked.get(found, "Write down the axes of all nine arrays, then multiply, then add.")
                raise AssertionError(
                    f"D={D:,}, H={H}, K={K}, h={h}, F={F:,}: yours is {found:,}, the block has {right:,}. {hint}"
                )
        return "Times the layers, plus the tables and a last norm: that is the number on the model card."

    grade(1, body)


def check_slowed_angles(fn: Callable[..., Any]) -> None:
    """Exercise 2: Llama 3.1's angles from Llama 3's, against the package's."""

    def body() -> str:
        for name, factor, old in (("llama3.1-8b", 8.0, 8192), ("llama3.2-1b", 32.0, 8192), ("llama3.1-8b", 4.0, 2048)):
            config = LlamaConfig.from_name(name, rope_scaling=None)
            angle_p = _angles(config)
            right_p = _angles(config.replace(rope_scaling=RopeScaling(factor=factor, original_max_seq_len=old)))
            found_p = np.asarray(fn(jnp.asarray(angle_p), factor, old), np.float64)
            assert found_p.shape == angle_p.shape, f"Return one angle for each of the {len(angle_p)} pairs."
            wrong_p = ~np.isclose(found_p, right_p, rtol=1e-3)
            turns_p, share_p = old * angle_p / (2 * np.pi), found_p / angle_p
            for pairs_p, rule in (
                (turns_p >= 4, "four or more, so it stays as it is"),
                (turns_p <= 1, "one or less, so it keeps 1/factor of its angle"),
                (wrong_p, "between one and four, so it keeps a share on the straight line from 1/factor to 1"),
            ):
                for i in np.flatnonzero(pairs_p & wrong_p)[:1]:
                    raise AssertionError(
                        f"factor={factor:g}, old={old:,}, {len(angle_p)} pairs: pair {i} makes {turns_p[i]:,.2f} turns "
                        f"in the first context, {rule}. Yours keeps {share_p[i]:.3f} of its angle."
                    )
        return "These are Llama 3.1's angles: with them, your lines are that model."

    grade(2, body)


def _angles(config: LlamaConfig) -> np.ndarray:
    """Return the angle of each pair for one token, in radians."""
    cos, sin = rope_tables(config, jnp.array([1]))
    return np.arctan2(sin[0], cos[0])


def check_attend_in_tiles(fn: Callable[..., Any]) -> None:
    """Exercise 3: one query's attention over tiles of keys and values that come one at a time."""
    keys = jax.random.split(jax.random.key(0), 3)
    q_h = jax.random.normal(keys[0], (8,))
    k_Sh, v_Sh = (jax.random.normal(key, (23, 8)) for key in keys[1:])
    k_Sh = k_Sh * np.sign(k_Sh @ q_h)[:, None] + q_h  # so that all scores have one sign, which `scale` chooses
    k_Sh = k_Sh[np.argsort(k_Sh @ q_h)]  # so that with a positive one every tile brings a new maximum

    def body() -> str:
        for scale, sizes, hint in (
            (1.0, (23,), "with all keys in one tile it must be plain attention: scores over the root of h, softmax"),
            (1.0, (10, 10, 3), "three tiles do not give what one gives. What must happen to the old sums, and to the "
             "old mix, when a new maximum comes? And is the last tile as long as the others?"),
            (-1.0, (4, 19), "right as long as every tile brings a new maximum. What is taken off where it does not?"),
            (2e5, (10, 10, 3), "scores may be as large as a million: nothing may be raised to the power of "
             "such a number before the maximum of all keys so far is taken off"),
            (-2e5, (4, 19), "the maximum so far begins below every score, however negative, and stays where a later "
             "tile has only smaller ones"),
        ):  # fmt: skip
            scaled_h, edges = scale * q_h, [0, *np.cumsum(sizes)]
            given = [(k_Sh[a:b], v_Sh[a:b]) for a, b in itertools.pairwise(edges)]
            found = fn(scaled_h, iter(given))
            assert getattr(found, "shape", None) == (8,), "Return one row, as long as a value."
            right = _plain(scaled_h, k_Sh, v_Sh)
            assert np.allclose(found, right, rtol=1e-4, atol=1e-5), f"Tiles of {sizes} keys: {hint}."
        for q, keys, enough in ((q_h, 8192, 8192), (jnp.ones(4096) / 4096, 16, 4096)):
            found, kept = _long_run(fn, q, keys)
            right = _plain(q, *(jnp.concatenate(parts) for parts in zip(*_long_tiles(len(q), keys), strict=True)))
            assert np.allclose(found, right, rtol=1e-3, atol=1e-4), (
                f"Eight tiles of {keys:,} keys, {len(q):,} numbers in each, are not plain attention of all. Does the "
                "row know every key that came, and is the size of a head, or of a tile, written into your answer?"
            )
            assert kept < enough, (
                f"the numbers are right, but with each tile of {keys:,} keys of {len(q):,} numbers {kept:,.0f} more "
                "bytes stay in memory: scores, rows or whole tiles. What has the next tile to know of all that came "
                "before it?"
            )
        return "This is FlashAttention's forward pass, for one query."

    grade(3, body)


def _plain(q_h: Any, k_Sh: Any, v_Sh: Any) -> Any:
    return jax.nn.softmax(k_Sh @ q_h / len(q_h) ** 0.5) @ v_Sh


def _long_tiles(h: int, keys: int) -> Iterator[tuple[Any, Any]]:
    for i in range(8):
        k_Sh, v_Sh = jax.random.normal(jax.random.key(i), (2, keys, h))
        yield k_Sh, v_Sh


def _long_run(fn: Callable[..., Any], q_h: Any, keys: int) -> tuple[Any, float]:
    """Return an answer over eight tiles, and the bytes, JAX's and NumPy's, by which it grows with one.

    The first two tiles warm it up.
    """
    held: list[int] = []

    def measured() -> Iterator[tuple[Any, Any]]:
        for tile in _long_tiles(len(q_h), keys):
            held.append(sum(array.nbytes for array in jax.live_arrays()) + tracemalloc.get_traced_memory()[0])
            yield tile

    tracemalloc.start()
    try:
        found = fn(q_h, measured())
    finally:
        tracemalloc.stop()
    return found, (held[-1] - held[2]) / (len(held) - 3)
