"""What JAX keeps from the forward pass for the backward pass: every residual, its bytes and the line that made it."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxmem.common.printing import Shown, Table, size_text
from jaxmem.tracing.arguments import shape_of
from jaxmem.tracing.jaxprs import given_name, inner_program, same_value_before, source_of


@dataclasses.dataclass(frozen=True)
class Residual:
    """One array kept for the backward pass.

    `operation` is the primitive or `checkpoint_name` that produced it, `source` the line (`file.py:12`), `argument` the
    path of the argument that it simply is, or "": an argument is alive anyway and costs nothing more.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    operation: str
    source: str
    argument: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Residuals(Shown):
    """All residuals of a function, largest first; printed as a table. `bytes` counts those that are no arguments."""

    rows: tuple[Residual, ...]

    @property
    def bytes(self) -> int:
        """What is kept beyond the arguments."""
        return sum(row.bytes for row in self.rows if not row.argument)

    @property
    def argument_bytes(self) -> int:
        """What is kept and is an argument anyway."""
        return sum(row.bytes for row in self.rows if row.argument)

    def parts_shown(self) -> Iterable[str | Table]:
        """Return both totals, and a row for each residual."""
        yield f"{size_text(self.bytes)} kept, and {size_text(self.argument_bytes)} that are arguments"
        rows = [
            (
                f"{row.dtype}[{','.join(map(str, row.shape))}]",
                size_text(row.bytes),
                f"argument {row.argument}" if row.argument else row.operation,
                row.source,
            )
            for row in self.rows
        ]
        yield Table(("array", "size", "made by", "line"), rows)


def saved_residuals(fn: Callable[..., Any], *args: Any) -> Residuals:
    """Find what `jax.grad` of `fn` at `args` keeps from forward to backward; nothing is computed.

    `args`: pytrees of arrays or `jax.ShapeDtypeStruct`. It is JAX's choice, before the compiler's: XLA may recompute a
    cheap one, and a `scan` stacks those of all its iterations. Where `jax.ad_checkpoint.print_saved_residuals` says
    "output of scan", this says which line of the loop's body.
    """
    shapes = jax.tree.map(shape_of, args)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(shapes)]
    closed, (_, backward) = jax.make_jaxpr(lambda *args: jax.vjp(fn, *args), return_shape=True)(*shapes)
    jaxpr = closed.jaxpr
    kept = jaxpr.outvars[len(jaxpr.outvars) - len(jax.tree.leaves(backward)) :]
    rows: dict[Any, Residual] = {}
    for var in kept:
        if isinstance(var, jex_core.Literal) or var in rows:
            continue
        shape, dtype = tuple(var.aval.shape), var.aval.dtype
        array = shape, str(dtype), math.prod(shape) * dtype.itemsize
        if var in jaxpr.invars:
            rows[var] = Residual(*array, "", "", argument=paths[jaxpr.invars.index(var)])
        else:
            rows[var] = Residual(*array, *_producer(jaxpr, var))
    return Residuals(tuple(sorted(rows.values(), key=lambda row: -row.bytes)))


def _producer(jaxpr: jex_core.Jaxpr, var: Any) -> tuple[str, str]:
    """Return what made a value, and on which line, down through loops, calls and checkpoints."""
    eqn = _maker(jaxpr, var)
    while eqn is not None and (before := same_value_before(jaxpr, eqn, var)) is not None:
        jaxpr, var = before
        eqn = _maker(jaxpr, var)
    if eqn is None:
        return ("constant" if var in jaxpr.constvars else "input of the loop or call"), ""
    return _made_by(eqn, var), source_of(eqn)


def _maker(jaxpr: jex_core.Jaxpr, var: Any) -> jex_core.JaxprEqn | None:
    return next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)


def _made_by(eqn: jex_core.JaxprEqn, var: Any) -> str:
    if (name := given_name(eqn)) is not None:
        return f"named {name!r}"
    inner = inner_program(eqn)
    if inner is None:
        return eqn.primitive.name
    is_constant = isinstance(inner.outvars[eqn.outvars.index(var)], jex_core.Literal)
    return "constant" if is_constant else "the loop's input of each iteration"
