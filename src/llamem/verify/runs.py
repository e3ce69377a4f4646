"""What a checkpointed program does when it runs: its traced form, run again with a host callback at what matters."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from llamem.memory.jaxprs import equations, scan_parts
from llamem.verify.placement import checkpoint_body

# Where a layer decides something: dropout masks, experts, what a host function answers.
_CHOICES = ("top_k", "argmax", "argmin", "sort", "random_bits", "pure_callback")


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


def count_runs(fn: Callable[..., Any], *args: Any) -> Runs:
    """Runs `fn(*args)`, which returns a scalar (or a scalar and more), forward and backward, and counts.

    The count is of this run, on the present device: an operation tells the host each time that it is executed, inside
    loops and taken branches too. What runs inside a while loop or a shard_map is not seen. The gradient is that of the
    first argument.
    """
    loss, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    gradient = jax.make_jaxpr(jax.value_and_grad(fn, has_aux=isinstance(shape, tuple), allow_int=True))(*args)
    return count_traced(loss, gradient, *args)


def count_traced(loss: jex_core.ClosedJaxpr, gradient: jex_core.ClosedJaxpr, *args: Any) -> Runs:
    """`count_runs` of a loss that is traced already, and so are its value and gradient, both with these arguments."""
    seen: Counter[tuple[Hashable, ...]] = Counter()

    def tell(*what: Hashable) -> None:
        seen[what] += 1

    for way, traced in (("forward", loss), ("backward", gradient)):
        jax.block_until_ready(jax.jit(partial(_Replay(way, tell).run, traced))(*jax.tree.leaves(args)))
    jax.effects_barrier()

    first = {what[1:] for what in seen if what[0] == "chosen"}
    again = [what[1:] for what in seen if what[0] == "chosen again"]
    changed = tuple(sorted({str(what[0]) for what in again if what not in first}))
    return Runs(seen["forward",], seen["backward",], sum(seen["chosen again", *what] for what in again), changed)


class _Replay:
    """Evaluates a traced program operation by operation, with callbacks added. Nothing differentiates it any more."""

    def __init__(self, way: str, tell: Callable[..., None]) -> None:
        self.way, self.tell = way, tell
        self.inside = False  # a checkpoint, while its body is traced

    def run(self, program: Any, *args: Any, again: bool = False) -> list[Any]:
        jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def look(var: Any) -> Any:
            return var.val if isinstance(var, jex_core.Literal) else known[var]

        last = again
        for eqn in jaxpr.eqns:
            # With jax_remat3 no checkpoint is left around what is computed a second time.
            second = again or _marked(eqn)
            if second and not last and not self.inside and checkpoint_body(eqn) is None and self.way == "backward":
                jax.debug.callback(partial(self.tell, self.way))
            last = second
            outs = self._apply(jaxpr, eqn, list(map(look, eqn.invars)), second)
            if eqn.primitive.name in _CHOICES and self.way == "backward":
                self._tell_choice(eqn, outs, "chosen again" if second else "chosen")
            known |= dict(zip(eqn.outvars, outs, strict=True))
        return list(map(look, jaxpr.outvars))

    def _apply(self, jaxpr: Any, eqn: Any, values: list[Any], again: bool) -> list[Any]:
        run, name, params = partial(self.run, again=again), eqn.primitive.name, eqn.params
        body = checkpoint_body(eqn)
        if body is not None:
            within = [eqn for eqn, _ in equations(body)]
            if self.way == "forward" or any(map(_marked, within)):
                if all(checkpoint_body(eqn) is None for eqn in within):
                    jax.debug.callback(partial(self.tell, self.way))
                # Without a checkpoint to keep them apart, the compiler would merge this with the forward pass.
                values = list(jax.lax.optimization_barrier(tuple(values)))
            outside, self.inside = self.inside, True
            outs = run(body, *values)
            self.inside = outside
            return outs
        if name == "scan":
            n_consts, n_carry = scan_parts(eqn)
            consts, varying = values[:n_consts], values[n_consts:]

            def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
                outs = run(params["jaxpr"], *consts, *carry, *xs)
                return outs[:n_carry], outs[n_carry:]

            options = {option: params[option] for option in ("length", "reverse", "unroll")}
            carry, ys = jax.lax.scan(step, varying[:n_carry], varying[n_carry:], **options)
            return [*carry, *ys]
        if name == "cond":
            return jax.lax.switch(values[0], [partial(run, branch) for branch in params["branches"]], *values[1:])
        inner = [value for value in params.values() if isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))]
        if name not in ("while", "shard_map", "pallas_call") and len(inner) == 1:
            arguments = len(getattr(inner[0], "jaxpr", inner[0]).invars)
            if arguments == len(values):
                return run(inner[0], *values)
        return _evaluate(jaxpr, eqn, values)

    def _tell_choice(self, eqn: Any, outs: list[Any], how: str) -> None:
        for i, out in enumerate(outs):
            if not jnp.issubdtype(out.dtype, jnp.integer) and eqn.primitive.name != "pure_callback":
                continue
            tell = partial(self._told, how, eqn.primitive.name, i, out.shape)
            jax.debug.callback(tell, _digest(out))

    def _told(self, how: str, name: str, i: int, shape: tuple[int, ...], digest: Any) -> None:
        self.tell(how, name, i, shape, int(digest))


def _evaluate(jaxpr: Any, eqn: Any, values: list[Any]) -> list[Any]:
    given = {var: value for var, value in zip(eqn.invars, values, strict=True) if not isinstance(var, jex_core.Literal)}
    alone = jaxpr.replace(constvars=[], invars=list(given), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
    return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(alone, ()))(*given.values())


def _digest(out: Any) -> Any:
    """One number that tells arrays apart, whatever their size: only it travels to the host."""
    if jnp.issubdtype(out.dtype, jnp.floating):
        out = jax.lax.bitcast_convert_type(out.astype(jnp.float32), jnp.uint32)
    bits = out.astype(jnp.uint32).ravel()
    return jnp.sum((bits + 1) * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)


def _marked(eqn: jex_core.JaxprEqn) -> bool:
    """Whether JAX marked the operation as what a checkpoint computes a second time."""
    return "rematted_computation" in str(eqn.source_info.name_stack)
