"""Whether a program draws fresh random numbers in every step and every layer: judged by the numbers that it drew."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from llamem.verify.runs import Draw

_CONSTANT = (
    "numbers that are the same in every step: their key was made (or a counter drawn from) while tracing, or does not "
    "depend on the step's. Pass the step's key as an argument, and derive every key from it."
)
_SHARED = (
    "{n} of {total} draws of shape {shape} in one loop are copies: one key is closed over, broadcast or repeated, and "
    "layers drop the same units. Split the key, and pass one to every layer with its weights."
)
_TWICE = (
    "{n} of {total} draws of shape {shape} are copies: several draws use one key, and layers drop the same units. "
    "Split the key, or jax.random.fold_in(key, i)."
)


def draw_faults(this_step: Sequence[Draw], other_step: Sequence[Draw]) -> list[str]:
    """What is wrong with the numbers drawn in two steps that have different keys, in words."""
    found = []
    now, then = _by_place(this_step), _by_place(other_step)
    constant = {place for place in now if now[place] == then.get(place)}
    if constant:
        found.append(_CONSTANT)
    alike = defaultdict(list)
    for draw in this_step:
        if _tells_apart(draw):
            alike[draw.shape, draw.dtype].append(draw)
    for (shape, _), draws in alike.items():
        times = Counter(draw.digest for draw in draws)
        if copies := sum(n for n in times.values() if n > 1):
            in_one_loop = max(Counter((draw.place, draw.digest) for draw in draws).values()) > 1
            words = _SHARED if in_one_loop else _TWICE
            found.append(words.format(n=copies, total=len(draws), shape=list(shape)))
    return found


def _by_place(draws: Sequence[Draw]) -> dict[int, set[tuple[int, ...]]]:
    places = defaultdict(set)
    for draw in draws:
        if _tells_apart(draw):
            places[draw.place].add(draw.digest)
    return places


def _tells_apart(draw: Draw) -> bool:
    # A few bits are often equal by chance.
    return int(np.prod(draw.shape)) * jnp.dtype(draw.dtype).itemsize >= 4
