"""Random numbers of a traced program: with which key each is drawn, and what that key depends on.

One walk through the program marks every value with what feeds it: leaves of parameters and batch, turns of loops, axes
of a mesh. Small integers and keys are computed on the way, of a loop in its first turn and of a mesh on its first
device, so that equal keys are seen to be equal, however they were made. Nothing else is computed.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from llamem.memory.control_flow import Branches, Call, OnDevices, Scan, While
from llamem.memory.jaxprs import DRAWS, computed_again, control_flow, equations, inner_jaxprs, vmaps_around

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
_DEVICES = (
    "The devices along {axes} draw the same numbers for data of their own: fold jax.lax.axis_index into the key, or "
    "pass each device one."
)
_ONE_MASK = (
    "One mask, drawn before the loop, serves all its layers, which drop the same units. Pass each layer a key, and "
    "draw inside."
)
_MEETS = ("mul", "add", "sub", "div", "select_n", "and", "or")  # where a mask or noise is applied to data
_SAME_EVERYWHERE = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")
_SMALL = 4096  # entries


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    """What is known of a value: what feeds it, and of small integers and keys their numbers.

    `drawn`: "numbers" if made of random numbers and constants alone, "mask" if of comparisons too, else "".
    """

    fed: frozenset[Hashable] = frozenset()
    numbers: Any = None
    drawn: str = ""

    def equals(self, other: "_Value") -> bool:
        """Return whether they are known to be equal."""
        return self is other or (self.numbers is not None and _identity(self) == _identity(other))


@dataclasses.dataclass(frozen=True)
class _Place:
    """What surrounds an operation. `layers`: the loops whose turns have weights of their own."""

    loops: tuple[Hashable, ...] = ()
    layers: frozenset[Hashable] = frozenset()
    vmaps: int = 0
    again: bool = False


class _Draw(NamedTuple):
    """Random numbers drawn at one place; `identity`: equal for equal keys."""

    numbers: str
    fed: frozenset[Hashable]
    identity: Hashable


class Keys:
    """All draws of a traced loss of parameters and batch.

    `draws`: with what each is drawn; `hidden`: how many stand where they cannot be followed; `faults`: what is wrong
    with their keys, in words.
    """

    def __init__(self, traced: jex_core.ClosedJaxpr, params: Any, batch: Any) -> None:
        self.draws: list[_Draw] = []
        self.hidden = 0
        self.faults: list[str] = []
        self._misused: list[str] = []
        self._fresh = itertools.count()
        self._recording = True
        self._weights = {("leaf", i) for i in range(len(jax.tree.leaves(params)))}
        if not any(eqn.primitive.name in DRAWS for eqn, _ in equations(traced.jaxpr)):
            return
        leaves = [
            _Value(frozenset({("leaf", i)}), leaf if _is_small(leaf) else None)
            for i, leaf in enumerate(jax.tree.leaves((params, batch)))
        ]
        moving = self._leaves_that_move(traced, leaves, self._program(traced, leaves, _Place()))
        stale = [draw.fed for draw in self.draws if not draw.fed & moving]
        uses = Counter(draw.identity for draw in self.draws)
        first = {draw.identity: draw for draw in reversed(self.draws)}
        found = [
            *(_STATE if any(kind == "leaf" for kind, _ in fed) else _CONSTANT for fed in stale),  # pyrefly: ignore
            *self.faults,
            *(_TWICE.format(draw=first[key].numbers, n=n) for key, n in uses.items() if n > 1),
        ]
        self.faults = list(dict.fromkeys(found or self._misused))

    def _leaves_that_move(
        self, traced: jex_core.ClosedJaxpr, leaves: list[_Value], results: list[_Value]
    ) -> set[Hashable]:
        """Return the integers and keys that are others in the next step.

        Those of the batch, unless the loss returns them as they are; of the parameters only those that come back
        changed, such as a counter of draws.
        """
        moving: set[Hashable] = set()
        for i, (leaf, aval) in enumerate(zip(leaves, traced.in_avals, strict=True)):
            if jnp.issubdtype(aval.dtype, jnp.inexact):
                continue
            own = [
                leaf.equals(result)
                for result, out in zip(results, traced.out_avals, strict=True)
                if (out.shape, out.dtype) == (aval.shape, aval.dtype) and ("leaf", i) in result.fed
            ]
            leaf_moves = not all(own) if ("leaf", i) in self._weights else not any(own)
            moving |= {("leaf", i)} if leaf_moves else set()
        return moving

    def _program(self, program: jex_core.ClosedJaxpr, args: Sequence[_Value], place: _Place) -> list[_Value]:
        known = dict(zip(program.jaxpr.constvars, map(_constant, program.consts), strict=True))
        known |= dict(zip(program.jaxpr.invars, args, strict=True))

        def look(var: Any) -> _Value:
            return _constant(var.val) if isinstance(var, jex_core.Literal) else known[var]

        for eqn in program.jaxpr.eqns:
            around = dataclasses.replace(
                place, again=place.again or computed_again(eqn), vmaps=place.vmaps + vmaps_around(eqn)
            )
            results = self._operation(eqn, [look(var) for var in eqn.invars], around)
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [look(var) for var in program.jaxpr.outvars]

    def _operation(self, eqn: jex_core.JaxprEqn, ins: list[_Value], place: _Place) -> list[_Value]:
        match control_flow(eqn):
            case Scan() as flow:
                return self._scan(flow, ins, place)
            case While() as flow:
                n, m = flow.n_condition_consts, flow.n_condition_consts + flow.n_body_consts
                turn = ("loop", next(self._fresh))
                inside = dataclasses.replace(place, loops=(*place.loops, turn))
                outs = self._loop(flow.body, turn, lambda carry: [*ins[n:m], *carry], ins[m:], inside)
                self._program(flow.condition, [*ins[:n], *outs], inside)
                return outs
            case Branches() as flow:
                return self._branches(flow, ins, place)
            case OnDevices() as flow:
                return self._on_devices(flow, ins, place)
            case Call() as flow:
                return self._program(flow.body, ins, place)
        if self._recording and not place.again:
            inside = [inner for program in inner_jaxprs(eqn) for inner, _ in equations(program)]
            self.hidden += sum(inner.primitive.name in DRAWS for inner in inside)
            self._look_at_meeting(eqn, ins, place)
            if eqn.primitive.name in DRAWS:
                self._draw(eqn, ins, place)
        return _results(eqn, ins)

    def _draw(self, eqn: jex_core.JaxprEqn, ins: list[_Value], place: _Place) -> None:
        # Of threefry2x32 two words are a key, and two count; only random_bits knows the axes of its keys.
        words = ins if eqn.primitive.name == "threefry2x32" else ins[:1]
        axes = len(eqn.invars[0].aval.shape) if eqn.primitive.name == "random_bits" else place.vmaps  # pyrefly: ignore
        fed = frozenset().union(*(word.fed for word in words[:2]))
        numbers = f"Random numbers of shape {list(eqn.outvars[-1].aval.shape[axes:])}"  # pyrefly: ignore
        copies = eqn.primitive.name == "random_bits" and not _all_differ(ins[0].numbers)
        if copies or not fed.issuperset(place.loops):
            self.faults.append(_SHARED.format(draw=numbers))
        if place.vmaps > axes:
            self.faults.append(_MAPPED.format(draw=numbers))
        self.draws.append(_Draw(numbers, fed, tuple(map(_identity, words))))

    def _look_at_meeting(self, eqn: jex_core.JaxprEqn, ins: list[_Value], place: _Place) -> None:
        """Find random numbers applied to data that differs where they do not: over devices, or from layer to layer."""
        data = frozenset().union(*(value.fed for value in ins if not value.drawn))
        for drawn in ins if eqn.primitive.name in _MEETS else ():
            missing = data - drawn.fed
            axes = sorted(str(axis) for kind, axis in missing if kind == "axis")  # pyrefly: ignore
            if drawn.drawn and axes:
                self._misused.append(_DEVICES.format(axes=" and ".join(axes)))
            if drawn.drawn == "mask" and missing & place.layers:
                self._misused.append(_ONE_MASK)

    def _scan(self, flow: Scan, ins: list[_Value], place: _Place) -> list[_Value]:
        n = flow.n_consts
        consts, first, xs = ins[:n], ins[n : n + flow.n_carry], ins[n + flow.n_carry :]
        turn = ("loop", next(self._fresh))
        slices = []
        for x in xs:
            # Of what is not known every turn may have its own.
            own = {turn} if flow.length == 1 or _all_differ(x.numbers, axis=0) else set()
            slices.append(_Value(x.fed | own, x.numbers[0] if x.numbers is not None and flow.length else None, x.drawn))
        layers = {turn} if any(turn in part.fed and part.fed & self._weights for part in slices) else set()
        loops = (*place.loops, turn) if flow.length > 1 else place.loops
        inside = dataclasses.replace(place, loops=loops, layers=place.layers | layers)
        outs = self._loop(flow.body, turn, lambda carry: [*consts, *carry, *slices], first, inside)
        stacked = []
        for out in outs[flow.n_carry :]:
            whole = next((x for x, part in zip(xs, slices, strict=True) if part is out), None)
            same = out.numbers is not None and turn not in out.fed
            stacked.append(
                whole or _Value(out.fed, jnp.stack([out.numbers] * flow.length) if same else None, out.drawn)
            )
        return [*outs[: flow.n_carry], *stacked]

    def _loop(
        self,
        body: jex_core.ClosedJaxpr,
        turn: Hashable,
        operands: Callable[[Sequence[_Value]], Sequence[_Value]],
        first: Sequence[_Value],
        place: _Place,
    ) -> list[_Value]:
        """Return what a loop's body returns. A carried value that it hands on as it came is a constant of the loop."""
        recording, self._recording = self._recording, False
        outs = self._program(body, operands(first), place)
        self._recording = recording
        carry = [
            now if now is out else _Value(now.fed | out.fed | {turn}, now.numbers)
            for now, out in zip(first, outs, strict=False)
        ]
        return self._program(body, operands(carry), place)

    def _branches(self, flow: Branches, ins: list[_Value], place: _Place) -> list[_Value]:
        """Return what any of the branches may. Draws of two branches do not happen in one step, and may share a key."""
        taken, before, keys = [], self.draws, set()
        for branch in flow.branches:
            self.draws = []
            taken.append(self._program(branch, ins[1:], place))
            before = before + [draw for draw in self.draws if draw.identity not in keys]
            keys |= {draw.identity for draw in self.draws}
        self.draws = before
        return [_Value(ins[0].fed.union(*(out.fed for out in outs))) for outs in zip(*taken, strict=True)]

    def _on_devices(self, flow: OnDevices, ins: list[_Value], place: _Place) -> list[_Value]:
        parts = []
        for value, var, spec in zip(ins, flow.body.jaxpr.invars, flow.in_specs, strict=True):
            own = set()
            for dimension, names in enumerate(spec):
                # Where all rows along a split axis are copies, every device has the same.
                if names and _all_differ(value.numbers, dimension):
                    names = names if isinstance(names, tuple) else (names,)
                    own |= {("axis", name) for name in names if flow.mesh.shape[name] > 1}
            one = None if value.numbers is None else value.numbers[tuple(map(slice, var.aval.shape))]
            parts.append(_Value(value.fed | own, one, value.drawn) if own else value)
        outs = self._program(flow.body, parts, place)
        axes = {("axis", name) for name in flow.mesh.shape}
        return [_Value(out.fed - axes, None, out.drawn) for out in outs]


def _results(eqn: jex_core.JaxprEqn, ins: list[_Value]) -> list[_Value]:
    """Return what is known of the results of an operation that has no program inside."""
    name, fed = eqn.primitive.name, frozenset().union(*(value.fed for value in ins))
    if name == "axis_index":
        fed |= {("axis", eqn.params["axis_name"])}
    elif name in _SAME_EVERYWHERE:
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        fed -= {("axis", axis) for axis in (axes if isinstance(axes, tuple | list) else (axes,))}
    numbers: list[Any] = [None] * len(eqn.outvars)
    avals: list[Any] = [var.aval for var in eqn.outvars]
    # No callbacks, kernels and calls, which are the user's.
    if all(map(_is_small, avals)) and all(value.numbers is not None for value in ins) and "call" not in name:
        try:
            results = eqn.primitive.bind(*(value.numbers for value in ins), **eqn.params)
            numbers = list(results) if eqn.primitive.multiple_results else [results]
        except Exception:  # what only means something inside of the program, such as the index of a device
            pass
    others = [value.drawn for value in ins if value.fed or value.drawn]
    drawn = "numbers" if name in DRAWS or (others and all(others)) else ""
    compares = "mask" in others or name in ("lt", "le", "gt", "ge", "eq", "ne")
    return [_Value(fed, number, "mask" if drawn and compares else drawn) for number in numbers]


def _is_small(array: Any) -> bool:
    """Return whether an array, or its description, is of integers or keys, and few."""
    dtype = jnp.result_type(array) if isinstance(array, int) else getattr(array, "dtype", jnp.float32)
    kinds = jnp.integer, jnp.bool_, jax.dtypes.prng_key
    here = getattr(array, "is_fully_addressable", True)
    return here and any(jnp.issubdtype(dtype, kind) for kind in kinds) and np.size(array) <= _SMALL


def _constant(array: Any) -> _Value:
    return _Value(numbers=array if _is_small(array) else None)


def _words(numbers: Any) -> np.ndarray:
    """Return integers as they are, and keys as words along a last axis."""
    is_key = hasattr(numbers, "dtype") and jnp.issubdtype(numbers.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(numbers) if is_key else numbers)


def _identity(value: _Value) -> Hashable:
    """Return what is equal for equal values, as far as they are known."""
    if value.numbers is None:
        return id(value)
    words = _words(value.numbers)
    return words.shape, words.tobytes()


def _all_differ(numbers: Any, axis: int | None = None) -> bool:
    """Return whether no two rows along an axis, or no two keys of an array of keys, are equal; true if not known."""
    if numbers is None or not np.ndim(numbers):
        return True
    words = _words(numbers)
    rows = (
        words.reshape(-1, words.shape[-1])
        if axis is None
        else np.moveaxis(words, axis, 0).reshape(words.shape[axis], -1)
    )
    return len(np.unique(rows, axis=0)) == len(rows)
