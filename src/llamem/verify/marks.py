"""Which operations of a traced program are under a checkpoint, and which are computed a second time."""

import dataclasses
import enum
import itertools
from collections.abc import Iterator

from jax.extend import core as jex_core

from llamem.memory.control_flow import Branches, Flow, OnDevices, Scan, While
from llamem.memory.jaxprs import checkpoint_call, computed_again, control_flow, equations


class Traced(enum.Enum):
    """What a traced program computes: a loss alone, or a loss and its gradient."""

    LOSS = "loss"
    GRADIENT = "gradient"


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a program. `place` tells it from every other, `inner` are the programs that it runs.

    `again`: it is computed a second time, in the backward pass. `starts_run`: here a checkpointed function begins to
    run (in a gradient: begins to run again). `fenced`: the compiler could merge what it computes with the first time,
    unless something keeps them apart.
    """

    eqn: jex_core.JaxprEqn
    place: int
    again: bool
    starts_run: bool
    fenced: bool
    flow: Flow | None
    inner: tuple["Block", ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """A program, and its operations in order."""

    program: jex_core.ClosedJaxpr
    steps: tuple[Step, ...]

    def all_steps(self) -> Iterator[Step]:
        """Every operation, those of inner programs included, but for what devices run inside a `shard_map`."""
        for step in self.steps:
            yield step
            for block in step.inner if not isinstance(step.flow, OnDevices) else ():
                yield from block.all_steps()

    def runs_on_devices(self, times: int = 0) -> int:
        """How often checkpointed functions begin to run inside `shard_map`s, on one device, by the lengths of scans.

        `times`: how often this program runs on it; 0 outside. What runs in a branch or in a `while` there is not
        counted: the traced program does not say how often it does.
        """
        total = 0
        for step in self.steps:
            total += times * step.starts_run
            flow = step.flow
            if times and isinstance(flow, While | Branches):
                continue
            inside = max(times, 1) if isinstance(flow, OnDevices) else times
            for block in step.inner:
                total += block.runs_on_devices(inside * (flow.length if isinstance(flow, Scan) else 1))
        return total


def mark(program: jex_core.ClosedJaxpr, traced: Traced) -> Block:
    """Marks every operation of a traced loss, or of a traced gradient."""
    return _Marker(traced).block(program, again=False, under_checkpoint=False)


class _Marker:
    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.places = itertools.count()

    def block(self, program: jex_core.ClosedJaxpr, again: bool, under_checkpoint: bool) -> Block:
        steps: list[Step] = []
        for eqn in program.jaxpr.eqns:
            after_first_time = not (steps[-1].again if steps else again)
            steps.append(self.step(eqn, again or computed_again(eqn), after_first_time, under_checkpoint))
        return Block(program, tuple(steps))

    def step(self, eqn: jex_core.JaxprEqn, again: bool, after_first_time: bool, under_checkpoint: bool) -> Step:
        is_checkpoint = checkpoint_call(eqn) is not None
        runs = is_checkpoint and self._runs_here(eqn)
        if is_checkpoint:
            starts_run = runs and not any(checkpoint_call(inner) for inner in _within(eqn))
        else:
            # With jax_remat3 no checkpoint is left around what is computed a second time, only marks.
            starts_run = self.traced is Traced.GRADIENT and again and after_first_time and not under_checkpoint
        flow = control_flow(eqn)
        programs = () if flow is None else flow.programs
        inner = tuple(self.block(program, again, under_checkpoint or is_checkpoint) for program in programs)
        return Step(eqn, next(self.places), again, starts_run, runs, flow, inner)

    def _runs_here(self, eqn: jex_core.JaxprEqn) -> bool:
        # A gradient's checkpoints hold the backward pass; they run the function again only where JAX marked so, the
        # operations under them or (with jax_remat3, since JAX 0.12) the checkpoint itself.
        return self.traced is Traced.LOSS or any(map(computed_again, (eqn, *_within(eqn))))


def _within(eqn: jex_core.JaxprEqn) -> list[jex_core.JaxprEqn]:
    call = checkpoint_call(eqn)
    return [inner for inner, _ in equations(call.body)] if call else []
