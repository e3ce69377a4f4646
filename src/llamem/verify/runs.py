"""What a checkpointed program does when it runs: its traced form, run again with a host callback at what matters."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from llamem.memory.control_flow import Branches, OnDevices, Scan, While
from llamem.memory.jaxprs import CHOICES, DRAWS, equations, evaluate, inner_jaxprs
from llamem.verify.marks import Block, Step, Traced, mark


@dataclasses.dataclass(frozen=True)
class Runs:
    """What was seen at run time of the functions under a checkpoint.

    `forward` and `again`: how often they ran in the forward pass, and again in the backward pass, all layers counted.
    `choices`: the random draws, sorts and choices of experts that were made again; `changed`: the kinds of those that
    then came out otherwise than in the forward pass.
    """

    forward: int
    again: int
    choices: int
    changed: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random numbers drawn with one key, once: at which place of the program, their shape, type and a digest."""

    place: int
    shape: tuple[int, ...]
    dtype: str
    digest: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a layer decided, once: which kind of operation, which of its outputs, its shape and a digest."""

    kind: str
    output: int
    shape: tuple[int, ...]
    digest: tuple[int, ...]


@dataclasses.dataclass
class Log:
    """What the callbacks of one execution told."""

    runs: int = 0
    draws: list[Draw] = dataclasses.field(default_factory=list)
    chosen: list[Choice] = dataclasses.field(default_factory=list)
    chosen_again: list[Choice] = dataclasses.field(default_factory=list)


def count_runs(fn: Callable[..., Any], *args: Any) -> Runs:
    """Runs `fn(*args)`, which returns a scalar (or a scalar and more), forward and backward, and counts.

    The count is of this run, on the present device: an operation tells the host each time that it is executed, inside
    loops and taken branches too. Inside a shard_map runs are counted as traced, on one device:
    callbacks there can block devices that wait for each other. What a Pallas kernel runs is not seen. The gradient is
    that of the first argument.
    """
    loss, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    gradient = jax.make_jaxpr(jax.value_and_grad(fn, has_aux=isinstance(shape, tuple), allow_int=True))(*args)
    return runs_of(Replay(loss, Traced.LOSS).run(*args), Replay(gradient, Traced.GRADIENT).run(*args))


def runs_of(loss: Log, gradient: Log) -> Runs:
    """Counts what a loss and its gradient told."""
    first, again = set(gradient.chosen), gradient.chosen_again
    changed = sorted({choice.kind for choice in again if choice not in first})
    return Runs(loss.runs, gradient.runs, len(again), tuple(changed))


class Replay:
    """A traced loss, or a traced gradient, that can be run with a callback at every operation that matters."""

    def __init__(self, program: jex_core.ClosedJaxpr, traced: Traced) -> None:
        self.block = mark(program, traced)
        self.traced = traced
        self._log = Log()

    def run(self, *args: Any) -> Log:
        """Runs the program with these arguments, and returns what it told."""
        self._log = Log()
        jax.block_until_ready(self._compiled(*jax.tree.leaves(args)))
        jax.effects_barrier()
        self._log.runs += self.block.runs_on_devices()
        return self._log

    def unseen(self, primitives: Sequence[str]) -> int:
        """How many of these operations are in programs run in a way not known here (shard_map), so that none tells."""
        hidden = [step.eqn for step in self.block.all_steps() if step.flow is None or isinstance(step.flow, OnDevices)]
        inside = [eqn for outer in hidden for inner in inner_jaxprs(outer) for eqn, _ in equations(inner)]
        return sum(eqn.primitive.name in primitives for eqn in inside)

    def places(self, primitives: Sequence[str]) -> set[int]:
        """Where in the program these operations stand, except where they are computed a second time."""
        steps = self.block.all_steps()
        return {step.place for step in steps if step.eqn.primitive.name in primitives and not step.again}

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        # It runs once or twice, so it is compiled quickly rather than well.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(partial(self._block, self.block), compiler_options=options)

    def _block(self, block: Block, *args: Any) -> list[Any]:
        jaxpr = block.program.jaxpr
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*block.program.consts, *args), strict=True))

        def look(var: Any) -> Any:
            return var.val if isinstance(var, jex_core.Literal) else known[var]

        for step in block.steps:
            outs = self._step(step, jaxpr, [look(var) for var in step.eqn.invars])
            known |= dict(zip(step.eqn.outvars, outs, strict=True))
        return [look(var) for var in jaxpr.outvars]

    def _step(self, step: Step, jaxpr: jex_core.Jaxpr, values: list[Any]) -> list[Any]:
        if step.starts_run:
            jax.debug.callback(self._ran)
        if step.fenced and values:
            # Without a checkpoint to keep them apart, the compiler would merge this with the first time.
            values = list(jax.lax.optimization_barrier(tuple(values)))
        seen = step.inner and not isinstance(step.flow, OnDevices)
        outs = self._flow(step, values) if seen else evaluate(step.eqn, jaxpr, values)
        name = step.eqn.primitive.name
        if self.traced is Traced.LOSS and name in DRAWS and not step.again:
            self._tell_draw(step, values, outs)
        elif self.traced is Traced.GRADIENT and name in CHOICES:
            self._tell_choices(step, outs)
        return outs

    def _flow(self, step: Step, values: list[Any]) -> list[Any]:
        flow, inner = step.flow, [partial(self._block, block) for block in step.inner]
        if isinstance(flow, Scan):
            return self._scan(flow, inner[0], values)
        if isinstance(flow, While):
            n = flow.n_condition_consts
            m = n + flow.n_body_consts
            condition, body = inner
            return jax.lax.while_loop(
                lambda carry: condition(*values[:n], *carry)[0], lambda carry: body(*values[n:m], *carry), values[m:]
            )
        if isinstance(flow, Branches):
            return jax.lax.switch(values[0], inner, *values[1:])
        return inner[0](*values)

    def _scan(self, flow: Scan, body: Callable[..., list[Any]], values: list[Any]) -> list[Any]:
        consts, varying = values[: flow.n_consts], values[flow.n_consts :]

        def iteration(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = body(*consts, *carry, *xs)
            return outs[: flow.n_carry], outs[flow.n_carry :]

        options = {"length": flow.length, "reverse": flow.reverse, "unroll": flow.unroll}
        carry, ys = jax.lax.scan(iteration, varying[: flow.n_carry], varying[flow.n_carry :], **options)
        return [*carry, *ys]

    def _ran(self) -> None:
        self._log.runs += 1

    def _tell_draw(self, step: Step, values: list[Any], outs: list[Any]) -> None:
        bits = outs[-1]
        # vmap draws with many keys at once: one row for each.
        keys = values[0].shape if step.eqn.primitive.name == "random_bits" else ()
        rows = bits.reshape(-1, *bits.shape[len(keys) :])
        told = partial(self._drew, step.place, rows.shape[1:], str(bits.dtype))
        jax.debug.callback(told, jax.vmap(_digest)(rows))

    def _drew(self, place: int, shape: tuple[int, ...], dtype: str, digests: Any) -> None:
        self._log.draws += [Draw(place, shape, dtype, tuple(map(int, digest))) for digest in digests]

    def _tell_choices(self, step: Step, outs: list[Any]) -> None:
        kind = step.eqn.primitive.name
        for i, out in enumerate(outs):
            if jnp.issubdtype(out.dtype, jnp.integer) or kind == "pure_callback":
                jax.debug.callback(partial(self._chose, step.again, kind, i, out.shape), _digest(out))

    def _chose(self, again: bool, kind: str, output: int, shape: tuple[int, ...], digest: Any) -> None:
        log = self._log.chosen_again if again else self._log.chosen
        log.append(Choice(kind, output, shape, tuple(map(int, digest))))


def _digest(out: Any) -> Any:
    """Two numbers that tell arrays apart, whatever their size: only they travel to the host."""
    if jnp.issubdtype(out.dtype, jnp.floating):
        out = jax.lax.bitcast_convert_type(out.astype(jnp.float32), jnp.uint32)
    bits = out.astype(jnp.uint32).ravel() + 1
    i = jnp.arange(bits.size, dtype=jnp.uint32)
    weights = jnp.stack([2 * i + 1, (i + 7919) * jnp.uint32(2654435761) | 1])
    mixed = jnp.stack([bits, bits ^ (bits >> 15)])
    return jnp.sum(mixed * weights, axis=1, dtype=jnp.uint32)
