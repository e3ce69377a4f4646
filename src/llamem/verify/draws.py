"""Random draws of a program, and what is wrong with the keys that they were made with."""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

_CONSTANT = (
    "Numbers that are the same in every step: their key was made (or a counter drawn from) while tracing, or does not "
    "depend on the step's. Pass the step's key as an argument, and derive every key from it."
)
_STATE = (
    "Numbers that are the same in every step: their key comes from state (of nnx.Dropout, for instance) that the loss "
    "takes and does not return moved on. Return it (has_aux=True) and carry it, or pass the step's key."
)
_SHARED = (
    "{draw} are copies: one key is closed over by a loop, broadcast or repeated, and layers drop the same units. Split "
    "the key, and pass one to every layer with its weights."
)
_TWICE = (
    "{n} draws use one key, and are copies: {draw}, for instance, and layers drop the same units. Split the key, or "
    "jax.random.fold_in(key, i)."
)
_MAPPED = (
    "{draw} are copies along an axis of jax.vmap: the key is not mapped (in_axes=None), and examples, tokens or heads "
    "drop the same units. Split the key, and map over the keys too."
)


@dataclasses.dataclass(frozen=True)
class TracedValue:
    """What is known of a value.

    `number`: equal for equal values. `fed`: what it depends on. `repeats`: for each axis "", or "some" or "all" where
    rows along it are copies. `drawn`: it was made of random numbers and constants alone. `mask`: of comparisons, too.
    """

    number: int
    fed: frozenset[Hashable] = frozenset()
    repeats: tuple[str, ...] = ()
    drawn: bool = False
    mask: bool = False
    constant: bool = False


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers drawn at one place of the program: their key, shape, the loops around, the branches taken."""

    key: TracedValue
    shape: tuple[int, ...]
    loops: tuple[int, ...]
    branches: tuple[tuple[int, int], ...]
    vmaps: int

    def __str__(self) -> str:
        return f"Random numbers of shape {list(self.shape)}"


def draw_faults(all_draws: Sequence[Draw], moving: set[Hashable]) -> list[str]:
    """Return what is wrong with the keys of these draws, in words; `moving`: what is another in the next step."""
    found = [
        _STATE if any(isinstance(atom, tuple) and atom[0] == "leaf" for atom in draw.key.fed) else _CONSTANT
        for draw in all_draws
        if not draw.key.fed & moving
    ]
    for draw in all_draws:
        if any(("loop", loop) not in draw.key.fed for loop in draw.loops) or any(draw.key.repeats):
            found.append(_SHARED.format(draw=draw))
        if draw.vmaps > 0:
            found.append(_MAPPED.format(draw=draw))
    for _, alike in itertools.groupby(sorted(all_draws, key=_key_number), _key_number):
        draws = list(alike)
        if any(_both_run(a, b) for a, b in itertools.combinations(draws, 2)):
            found.append(_TWICE.format(draw=draws[0], n=len(draws)))
    return list(dict.fromkeys(found))


def _key_number(draw: Draw) -> int:
    return draw.key.number


def _both_run(a: Draw, b: Draw) -> bool:
    """Return whether two draws can happen in one step: not where they are in different branches of one choice."""
    of_a = dict(a.branches)
    return all(of_a.get(place, branch) == branch for place, branch in b.branches)
