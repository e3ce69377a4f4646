"""Follows random keys through a traced program: what feeds the key of each draw, and which draws share one.

Every value gets a number, equal for equal computations of equal operands, and the set of what it depends on: leaves of
parameters and batch, iterations of loops, axes of a mesh. Nothing is computed, and nothing compiled.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from llamem.memory.control_flow import Branches, OnDevices, Scan, While
from llamem.memory.jaxprs import DRAWS, computed_again, control_flow, equations, inner_jaxprs, vmaps_around
from llamem.verify.draws import Draw, TracedValue, draw_faults
from llamem.verify.repeats import repeats_of_array, repeats_of_result

_MEETS = ("mul", "add", "sub", "div", "select_n", "and", "or")  # where a mask or noise is applied to data
_SAME_EVERYWHERE = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")
_PARAMETER = ("a parameter",)


@dataclasses.dataclass(frozen=True)
class _Where:
    """What surrounds an operation. `layers`: the loops whose iterations have weights of their own."""

    loops: tuple[int, ...] = ()
    layers: frozenset[int] = frozenset()
    branches: tuple[tuple[int, int], ...] = ()
    vmaps: int = 0
    again: bool = False


class Keys:
    """All draws of a traced loss of parameters and batch. `hidden`: how many stand where they cannot be followed."""

    def __init__(self, traced: jex_core.ClosedJaxpr, params: Any, batch: Any) -> None:
        self.draws: list[Draw] = []
        self._meetings: list[str] = []
        self.hidden = 0
        self._numbers: dict[Hashable, int] = {}
        self._fresh = itertools.count()
        self._recording = True
        self._leaves = jax.tree.leaves((params, batch))
        self._n_params = len(jax.tree.leaves(params))
        given = [self._leaf(i, leaf) for i, leaf in enumerate(self._leaves)]
        self._moving = self._leaves_that_move(traced.out_avals, given, self._program(traced, given, _Where()))

    def _leaf(self, i: int, leaf: Any) -> TracedValue:
        dtype = jnp.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype
        fed: set[Hashable] = {_PARAMETER} if i < self._n_params else set()
        if not jnp.issubdtype(dtype, jnp.inexact):
            return TracedValue(self._number("leaf", i), frozenset({*fed, ("leaf", i)}), repeats_of_array(leaf))
        return TracedValue(self._number("leaf", i), frozenset(fed), ("",) * np.ndim(leaf))

    def faults(self) -> list[str]:
        """Return what is wrong with the keys of the draws, in words."""
        return draw_faults(self.draws, self._moving) or list(dict.fromkeys(self._meetings))

    def _leaves_that_move(
        self, avals: Sequence[Any], given: list[TracedValue], results: list[TracedValue]
    ) -> set[Hashable]:
        """Return the leaves of integers and keys that are others in the next step.

        Those of the batch, unless the loss returns them as they are; of the parameters only those that come back
        changed, such as a counter of draws.
        """
        moving: set[Hashable] = set()
        returned = {value.number for value in results}
        for i, (leaf, value) in enumerate(zip(self._leaves, given, strict=True)):
            own = np.shape(leaf), jnp.result_type(leaf)
            changed = any(
                (aval.shape, aval.dtype) == own and ("leaf", i) in out.fed and out.number != value.number
                for aval, out in zip(avals, results, strict=True)
            )
            if changed if i < self._n_params else value.number not in returned:
                moving.add(("leaf", i))
        return moving

    def _number(self, *what: Hashable) -> int:
        return self._numbers.setdefault(what, next(self._fresh))

    def _program(self, program: jex_core.ClosedJaxpr, args: Sequence[TracedValue], where: _Where) -> list[TracedValue]:
        jaxpr = program.jaxpr
        known = dict(zip(jaxpr.constvars, map(self._constant, program.consts), strict=True))
        known |= dict(zip(jaxpr.invars, args, strict=True))

        def look(var: Any) -> TracedValue:
            return self._constant(var.val) if isinstance(var, jex_core.Literal) else known[var]

        for eqn in jaxpr.eqns:
            ins = [look(var) for var in eqn.invars]
            around = dataclasses.replace(
                where, again=where.again or computed_again(eqn), vmaps=where.vmaps + vmaps_around(eqn)
            )
            known |= dict(zip(eqn.outvars, self._operation(eqn, ins, around), strict=True))
        return [look(var) for var in jaxpr.outvars]

    def _constant(self, array: Any) -> TracedValue:
        if jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key):
            number = self._number("key", np.asarray(jax.random.key_data(array)).tobytes())
        elif np.size(array) <= 4096:
            number = self._number("constant", str(jnp.result_type(array)), np.shape(array), np.asarray(array).tobytes())
        else:
            number = next(self._fresh)
        return TracedValue(number, repeats=repeats_of_array(array), constant=True)

    def _operation(self, eqn: jex_core.JaxprEqn, ins: list[TracedValue], where: _Where) -> list[TracedValue]:
        flow = control_flow(eqn)
        if isinstance(flow, Scan):
            return self._scan(flow, ins, where)
        if isinstance(flow, While):
            return self._while(flow, ins, where)
        if isinstance(flow, Branches):
            return self._branches(flow, ins, where)
        if isinstance(flow, OnDevices):
            return self._on_devices(flow, eqn, ins, where)
        if flow is not None:
            return self._program(flow.programs[0], ins, where)
        if self._recording:
            inside = [inner for program in inner_jaxprs(eqn) for inner, _ in equations(program)]
            self.hidden += sum(inner.primitive.name in DRAWS for inner in inside)
            self._look_at_meeting(eqn, ins, where)
        if eqn.primitive.name in DRAWS and self._recording and not where.again:
            self._draw(eqn, ins, where)
        return [self._result(eqn, i, ins) for i in range(len(eqn.outvars))]

    def _draw(self, eqn: jex_core.JaxprEqn, ins: list[TracedValue], where: _Where) -> None:
        key = ins[0]
        if eqn.primitive.name == "threefry2x32":  # two words of a key, two of counters
            key = TracedValue(self._number("words", *(value.number for value in ins)), ins[0].fed | ins[1].fed)
        shape = tuple(eqn.outvars[-1].aval.shape)  # pyrefly: ignore[missing-attribute]
        axes = len(key.repeats) if eqn.primitive.name == "random_bits" else where.vmaps
        self.draws.append(Draw(key, shape[len(key.repeats) :], where.loops, where.branches, where.vmaps - axes))

    def _look_at_meeting(self, eqn: jex_core.JaxprEqn, ins: list[TracedValue], where: _Where) -> None:
        """Find random numbers applied to data that differs where they do not: over devices, or from layer to layer."""
        if eqn.primitive.name not in _MEETS:
            return
        data = [value.fed for value in ins if not value.drawn and not value.constant]
        for drawn in (value for value in ins if value.drawn) if data else ():
            missing = frozenset().union(*data) - drawn.fed
            axes = sorted(str(atom[1]) for atom in missing if isinstance(atom, tuple) and atom[0] == "axis")
            if axes:
                self._meetings.append(
                    f"The devices along {' and '.join(axes)} draw the same numbers for data of their own: fold "
                    "jax.lax.axis_index into the key, or pass each device one."
                )
            if drawn.mask and any(("loop", loop) in missing for loop in where.layers):
                self._meetings.append(
                    "One mask, drawn before the loop, serves all its layers, which drop the same units. Pass each "
                    "layer a key, and draw inside."
                )

    def _result(self, eqn: jex_core.JaxprEqn, i: int, ins: list[TracedValue]) -> TracedValue:
        aval: Any = eqn.outvars[i].aval
        fed: frozenset[Hashable] = frozenset().union(*(value.fed for value in ins))
        name = eqn.primitive.name
        if name == "axis_index":
            fed |= {("axis", eqn.params["axis_name"])}
        elif name in _SAME_EVERYWHERE:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            axes = axes if isinstance(axes, tuple | list) else (axes,)
            fed -= {("axis", axis) for axis in axes}
        dtype = getattr(aval, "dtype", np.dtype(bool))
        if jnp.issubdtype(dtype, jnp.inexact):
            number = next(self._fresh)
        else:
            number = self._number(name, str(eqn.params), i, *(value.number for value in ins))
        rest = [value for value in ins if not value.constant]
        drawn = name in DRAWS or (bool(rest) and all(value.drawn for value in rest))
        mask = drawn and (np.dtype(bool) == dtype or any(value.mask for value in ins))
        repeats = repeats_of_result(eqn, aval, [(value.number, value.repeats) for value in ins])
        return TracedValue(number, fed, repeats, drawn, mask, constant=not rest and name not in (*DRAWS, "axis_index"))

    def _scan(self, flow: Scan, ins: list[TracedValue], where: _Where) -> list[TracedValue]:
        consts, carry, xs = (
            ins[: flow.n_consts],
            ins[flow.n_consts : flow.n_consts + flow.n_carry],
            ins[flow.n_consts + flow.n_carry :],
        )
        loop = next(self._fresh)
        slices = [
            dataclasses.replace(
                x,
                number=self._number("row", x.number),
                fed=x.fed | ({("loop", loop)} if not x.repeats[0] or flow.length == 1 else set()),
                repeats=x.repeats[1:],
                constant=False,
            )
            for x in xs
        ]
        layers = {loop} if any(_PARAMETER in x.fed and not x.repeats[0] for x in xs) else set()
        inside = self._inside(where, loop if flow.length > 1 else None, layers)
        outs = self._loop(flow.body, [*consts], carry, slices, loop, inside)
        whole = {part.number: x.number for part, x in zip(slices, xs, strict=True)}
        stacked = [
            dataclasses.replace(
                out,
                number=whole.get(out.number, next(self._fresh)),
                repeats=("" if ("loop", loop) in out.fed else "all", *out.repeats),
            )
            for out in outs[flow.n_carry :]
        ]
        return [self._leaving(out, loop) for out in (*outs[: flow.n_carry], *stacked)]

    def _while(self, flow: While, ins: list[TracedValue], where: _Where) -> list[TracedValue]:
        n, m = flow.n_condition_consts, flow.n_condition_consts + flow.n_body_consts
        loop = next(self._fresh)
        outs = self._loop(flow.body, ins[n:m], ins[m:], [], loop, self._inside(where, loop, set()))
        self._program(flow.condition, [*ins[:n], *outs], self._inside(where, loop, set()))
        return [self._leaving(out, loop) for out in outs]

    def _leaving(self, value: TracedValue, loop: int) -> TracedValue:
        return dataclasses.replace(value, fed=value.fed - {("loop", loop)})

    def _inside(self, where: _Where, loop: int | None, layers: set[int]) -> _Where:
        loops = where.loops if loop is None else (*where.loops, loop)
        return dataclasses.replace(where, loops=loops, layers=where.layers | layers)

    def _loop(
        self,
        body: jex_core.ClosedJaxpr,
        consts: list[TracedValue],
        first: list[TracedValue],
        slices: list[TracedValue],
        loop: int,
        where: _Where,
    ) -> list[TracedValue]:
        """Return what a loop's body returns. A carried value that it hands on as it came is a constant of the loop."""
        recording, self._recording = self._recording, False
        turn = frozenset({("loop", loop)})
        carry = [
            TracedValue(self._number("carry", loop, i), value.fed | turn, value.repeats)
            for i, value in enumerate(first)
        ]
        outs = self._program(body, [*consts, *carry, *slices], where)
        carry = [
            before if out.number == now.number else dataclasses.replace(now, fed=now.fed | out.fed)
            for before, now, out in zip(first, carry, outs, strict=False)
        ]
        self._recording = recording
        return self._program(body, [*consts, *carry, *slices], where)

    def _branches(self, flow: Branches, ins: list[TracedValue], where: _Where) -> list[TracedValue]:
        choice, place = ins[0], next(self._fresh)
        taken = [
            self._program(branch, ins[1:], dataclasses.replace(where, branches=(*where.branches, (place, i))))
            for i, branch in enumerate(flow.branches)
        ]
        results = []
        for outs in zip(*taken, strict=True):
            fed = choice.fed.union(*(out.fed for out in outs))
            results.append(TracedValue(next(self._fresh), fed, tuple("" for _ in outs[0].repeats)))
        return results

    def _on_devices(
        self, flow: OnDevices, eqn: jex_core.JaxprEqn, ins: list[TracedValue], where: _Where
    ) -> list[TracedValue]:
        parts = []
        for value, spec in zip(ins, flow.in_specs, strict=True):
            # Where all rows along a split axis are copies, every device has the same.
            over = [axes for axes, repeats in zip(spec, value.repeats, strict=False) if axes and not repeats]
            names = [axis for axes in over for axis in (axes if isinstance(axes, tuple) else (axes,))]
            several = [axis for axis in names if flow.mesh.shape[axis] > 1]
            fed = value.fed | {("axis", axis) for axis in several}
            number = self._number("part", value.number, *several) if several else value.number
            parts.append(dataclasses.replace(value, number=number, fed=fed))
        outs = self._program(flow.body, parts, where)
        axes = {("axis", axis) for axis in flow.mesh.shape}
        return [dataclasses.replace(out, number=next(self._fresh), fed=out.fed - axes) for out in outs]
