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

from jaxmem.tracing.jaxprs import (
    DRAWS,
    Branches,
    Call,
    OnDevices,
    Scan,
    While,
    computed_again,
    control_flow,
    equations,
    inner_jaxprs,
    source_of,
    vmaps_around,
)

_SAME_EVERYWHERE = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")
_SMALL = 4096  # entries
_FEW = 2**16  # numbers: a remainder of so many comes again within a run


@dataclasses.dataclass(frozen=True, eq=False)
class TracedValue:
    """What is known of a value: what feeds it, and of small integers and keys their numbers.

    `drawn`: "numbers" if made of random numbers and constants alone, "mask" if of comparisons too, else "".
    """

    fed: frozenset[Hashable] = frozenset()
    numbers: Any = None
    drawn: str = ""

    @property
    def identity(self) -> Hashable:
        """What is equal for equal values, as far as they are known."""
        return self if self.numbers is None else (np.shape(self.numbers), _words(self.numbers).tobytes())


def result_values(eqn: jex_core.JaxprEqn, ins: list[TracedValue]) -> list[TracedValue]:
    """Return what is known of the results of an operation that has no program inside."""
    name, fed = eqn.primitive.name, frozenset().union(*(value.fed for value in ins))
    if name == "axis_index":
        fed |= {("axis", eqn.params["axis_name"])}
    elif name in _SAME_EVERYWHERE:
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        fed -= {("axis", axis) for axis in (axes if isinstance(axes, tuple | list) else (axes,))}
    elif name == "rem" and not ins[1].fed and ins[1].numbers is not None and np.max(ins[1].numbers) <= _FEW:
        # Of a number that moves on, only that it comes again.
        fed = {feed for feed in fed if feed[0] != "leaf"} | {("cycle", int(np.max(ins[1].numbers)))}  # pyrefly: ignore
        fed = frozenset(fed)
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
    return [TracedValue(fed, number, "mask" if drawn and compares else drawn) for number in numbers]


def _is_small(array: Any) -> bool:
    """Return whether an array, or its description, is of integers or keys, and few."""
    dtype = jnp.result_type(array) if isinstance(array, int) else getattr(array, "dtype", jnp.float32)
    kinds = jnp.integer, jnp.bool_, jax.dtypes.prng_key
    addressable = getattr(array, "is_fully_addressable", True)
    return addressable and any(jnp.issubdtype(dtype, kind) for kind in kinds) and np.size(array) <= _SMALL


def given_value(array: Any, fed: frozenset[Hashable] = frozenset()) -> TracedValue:
    """Return what is known of an array at hand: a constant, or an argument."""
    return TracedValue(fed, array if _is_small(array) else None)


def _words(numbers: Any) -> np.ndarray:
    """Return integers as they are, and keys as words along a last axis."""
    is_key = hasattr(numbers, "dtype") and jnp.issubdtype(numbers.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(numbers) if is_key else numbers)


def all_differ(numbers: Any, axis: int = 0) -> bool:
    """Return whether no two rows along an axis are equal; true where they are not known."""
    if numbers is None or not np.ndim(numbers):
        return True
    rows = np.moveaxis(_words(numbers), axis, 0)
    return len(np.unique(rows.reshape(len(rows), -1), axis=0)) == len(rows)


_CONSTANT = (
    "{draw} are the same in every step: their key was made (or a counter drawn from) while tracing, or does not "
    "depend on the step's. Pass the step's key as an argument, and derive every key from it."
)
_STATE = (
    "{draw} are the same in every step: their key comes from state (of nnx.Dropout, for instance) that the loss "
    "takes and does not return moved on. Return it (has_aux=True) and carry it, or pass the step's key."
)
_CYCLE = (
    "{draw} come again: their key is made of nothing that moves on but a remainder, as of step % n. Fold the step "
    "itself into the key."
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
    "have the same. Split the key, and map over the keys too; it may be meant, of one noise for all frames of a video."
)
_DEVICES = (
    "The devices along {axes} draw the same numbers for data of their own{at}: fold jax.lax.axis_index into the key, "
    "or pass each device one."
)
_ONE_MASK = (
    "One mask, drawn before the loop{at}, serves all its layers, which drop the same units. Pass each layer a key, and "
    "draw inside."
)
_MEETS = ("mul", "add", "sub", "div", "select_n", "and", "or")  # where a mask or noise is applied to data


@dataclasses.dataclass(frozen=True)
class _Place:
    """What surrounds an operation. `layers`: loops with weights for each turn; `again`: this is no first run.

    `line`: that of the innermost call, since JAX's own functions inside know none.
    """

    loops: tuple[Hashable, ...] = ()
    layers: frozenset[Hashable] = frozenset()
    vmaps: int = 0
    again: bool = False
    line: str = ""

    def at(self, eqn: jex_core.JaxprEqn) -> str:
        """Return the line of an operation here, in brackets; "" where it is not known."""
        line = source_of(eqn) or self.line
        return f" ({line})" if line else ""


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
        self._weights = {("leaf", i) for i in range(len(jax.tree.leaves(params)))}
        if not any(eqn.primitive.name in DRAWS for eqn, _ in equations(traced.jaxpr)):
            return
        leaves = [
            given_value(leaf, frozenset({("leaf", i)})) for i, leaf in enumerate(jax.tree.leaves((params, batch)))
        ]
        moving = self._leaves_that_move(traced, leaves, self._program(traced, leaves, _Place()))
        stale: dict[str, str] = {}  # the first of each kind is named
        for draw in self.draws:
            if not draw.fed & moving:
                feeds = {kind for kind, _ in draw.fed}  # pyrefly: ignore
                kind = _CYCLE if "cycle" in feeds else _STATE if "leaf" in feeds else _CONSTANT
                stale.setdefault(kind, kind.format(draw=draw.numbers))
        uses = Counter(draw.identity for draw in self.draws)
        first = {draw.identity: draw for draw in reversed(self.draws)}
        faults = [
            *stale.values(),
            *self.faults,
            *(_TWICE.format(draw=first[key].numbers, n=n) for key, n in uses.items() if n > 1),
        ]
        self.faults = list(dict.fromkeys(faults or self._misused))

    def _leaves_that_move(
        self, traced: jex_core.ClosedJaxpr, leaves: list[TracedValue], results: list[TracedValue]
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
                leaf.identity == result.identity
                for result, out in zip(results, traced.out_avals, strict=True)
                if (out.shape, out.dtype) == (aval.shape, aval.dtype) and ("leaf", i) in result.fed
            ]
            leaf_moves = not all(own) if ("leaf", i) in self._weights else not any(own)
            moving |= {("leaf", i)} if leaf_moves else set()
        return moving

    def _program(self, program: jex_core.ClosedJaxpr, args: Sequence[TracedValue], place: _Place) -> list[TracedValue]:
        known = dict(zip(program.jaxpr.constvars, map(given_value, program.consts), strict=True))
        known |= dict(zip(program.jaxpr.invars, args, strict=True))

        def look(var: Any) -> TracedValue:
            return given_value(var.val) if isinstance(var, jex_core.Literal) else known[var]

        for eqn in program.jaxpr.eqns:
            around = dataclasses.replace(
                place, again=place.again or computed_again(eqn), vmaps=place.vmaps + vmaps_around(eqn)
            )
            results = self._operation(eqn, [look(var) for var in eqn.invars], around)
            known |= dict(zip(eqn.outvars, results, strict=True))
        return [look(var) for var in program.jaxpr.outvars]

    def _operation(self, eqn: jex_core.JaxprEqn, ins: list[TracedValue], place: _Place) -> list[TracedValue]:
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
                return self._program(flow.body, ins, dataclasses.replace(place, line=source_of(eqn) or place.line))
        if not place.again:
            inside = [inner for program in inner_jaxprs(eqn) for inner, _ in equations(program)]
            self.hidden += sum(inner.primitive.name in DRAWS for inner in inside)
            self._look_at_meeting(eqn, ins, place)
            if eqn.primitive.name in DRAWS:
                self._draw(eqn, ins, place)
        return result_values(eqn, ins)

    def _draw(self, eqn: jex_core.JaxprEqn, ins: list[TracedValue], place: _Place) -> None:
        # Of threefry2x32 two words are a key, and two count; only random_bits knows the axes of its keys.
        words = ins if eqn.primitive.name == "threefry2x32" else ins[:1]
        axes = len(eqn.invars[0].aval.shape) if eqn.primitive.name == "random_bits" else place.vmaps  # pyrefly: ignore
        fed = frozenset().union(*(word.fed for word in words[:2]))
        numbers = f"Random numbers of shape {list(eqn.outvars[-1].aval.shape[axes:])}{place.at(eqn)}"  # pyrefly: ignore
        keys = ins[0].numbers if eqn.primitive.name == "random_bits" else None
        if not fed.issuperset(place.loops) or not all_differ(keys if keys is None else keys.reshape(-1)):
            self.faults.append(_SHARED.format(draw=numbers))
        if place.vmaps > axes:
            self.faults.append(_MAPPED.format(draw=numbers))
        self.draws.append(_Draw(numbers, fed, tuple(word.identity for word in words)))

    def _look_at_meeting(self, eqn: jex_core.JaxprEqn, ins: list[TracedValue], place: _Place) -> None:
        """Find random numbers applied to data that differs where they do not: over devices, or from layer to layer."""
        data = frozenset().union(*(value.fed for value in ins if not value.drawn))
        for drawn in ins if eqn.primitive.name in _MEETS else ():
            missing = data - drawn.fed
            axes = sorted(str(axis) for kind, axis in missing if kind == "axis")  # pyrefly: ignore
            if drawn.drawn and axes:
                self._misused.append(_DEVICES.format(axes=" and ".join(axes), at=place.at(eqn)))
            if drawn.drawn == "mask" and missing & place.layers:
                self._misused.append(_ONE_MASK.format(at=place.at(eqn)))

    def _scan(self, flow: Scan, ins: list[TracedValue], place: _Place) -> list[TracedValue]:
        n = flow.n_consts
        consts, first, xs = ins[:n], ins[n : n + flow.n_carry], ins[n + flow.n_carry :]
        turn = ("loop", next(self._fresh))
        # Of what is not known every turn may have its own.
        own = [{turn} if flow.length == 1 or all_differ(x.numbers) else set() for x in xs]
        first_rows = [None if x.numbers is None or not flow.length else x.numbers[0] for x in xs]
        slices = [TracedValue(x.fed | fed, row, x.drawn) for x, fed, row in zip(xs, own, first_rows, strict=True)]
        layers = {turn} if any(turn in part.fed and part.fed & self._weights for part in slices) else set()
        loops = (*place.loops, turn) if flow.length > 1 else place.loops
        inside = dataclasses.replace(place, loops=loops, layers=place.layers | layers)
        outs = self._loop(flow.body, turn, lambda carry: [*consts, *carry, *slices], first, inside)
        stacked = []
        for out in outs[flow.n_carry :]:
            whole = next((x for x, part in zip(xs, slices, strict=True) if part is out), None)
            copies = out.numbers is not None and flow.length and turn not in out.fed
            numbers = jnp.stack([out.numbers] * flow.length) if copies else None
            stacked.append(whole or TracedValue(out.fed, numbers, out.drawn))
        return [*outs[: flow.n_carry], *stacked]

    def _loop(
        self,
        body: jex_core.ClosedJaxpr,
        turn: Hashable,
        operands: Callable[[Sequence[TracedValue]], Sequence[TracedValue]],
        first: Sequence[TracedValue],
        place: _Place,
    ) -> list[TracedValue]:
        """Return what a loop's body returns. A carried value that it hands on as it came is a constant of the loop."""
        outs = self._program(body, operands(first), dataclasses.replace(place, again=True))
        carry = [
            now if now is out else TracedValue(now.fed | out.fed | {turn}, now.numbers)
            for now, out in zip(first, outs, strict=False)
        ]
        return self._program(body, operands(carry), place)

    def _branches(self, flow: Branches, ins: list[TracedValue], place: _Place) -> list[TracedValue]:
        """Return what any of the branches may. Draws of two branches do not happen in one step, and may share a key."""
        taken, before, keys = [], self.draws, set()
        for branch in flow.branches:
            self.draws = []
            taken.append(self._program(branch, ins[1:], place))
            before = before + [draw for draw in self.draws if draw.identity not in keys]
            keys |= {draw.identity for draw in self.draws}
        self.draws = before
        return [TracedValue(ins[0].fed.union(*(out.fed for out in outs))) for outs in zip(*taken, strict=True)]

    def _on_devices(self, flow: OnDevices, ins: list[TracedValue], place: _Place) -> list[TracedValue]:
        parts = []
        for value, var, spec in zip(ins, flow.body.jaxpr.invars, flow.in_specs, strict=True):
            # Where all rows along a split axis are copies, every device has the same.
            split = [names for dimension, names in enumerate(spec) if names and all_differ(value.numbers, dimension)]
            axes = [axis for names in split for axis in (names if isinstance(names, tuple) else (names,))]
            own = {("axis", axis) for axis in axes if flow.mesh.shape[axis] > 1}
            part = None if value.numbers is None else value.numbers[tuple(map(slice, var.aval.shape))]  # pyrefly: ignore
            parts.append(TracedValue(value.fed | own, part, value.drawn) if any(spec) else value)
        outs = self._program(flow.body, parts, place)
        axes = {("axis", name) for name in flow.mesh.shape}
        return [TracedValue(out.fed - axes, None, out.drawn) for out in outs]
