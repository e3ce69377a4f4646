"""What JAX keeps from the forward pass for the backward pass: every residual, its bytes and the line that made it."""

import dataclasses
import functools
import math
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from llamem.memory.jaxprs import given_name, inner_jaxprs
from llamem.memory.show import html_table, line_of_source

_LIBRARIES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])


@dataclasses.dataclass(frozen=True)
class Residual:
    """One array kept for the backward pass.

    `operation` is the primitive or `checkpoint_name` that produced it, `source` the line (`file.py:12`), `argument` the
    path of the argument that it simply is, or "": an argument is alive anyway and costs nothing more.
    """

    shape: tuple[int, ...]
    dtype: str
    operation: str
    source: str
    argument: str = ""

    @property
    def bytes(self) -> int:
        """Its size."""
        words = 8 if self.dtype.startswith("key<") else np.dtype(self.dtype).itemsize  # a key is two 32-bit words
        return math.prod(self.shape) * words

    def __str__(self) -> str:
        origin = f"argument {self.argument}" if self.argument else f"{self.operation}  {self.source}"
        return f"{_size(self.bytes):>10}  {self.dtype}[{','.join(map(str, self.shape))}]  {origin}"


@dataclasses.dataclass(frozen=True)
class Residuals:
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

    def __str__(self) -> str:
        total = f"{_size(self.bytes):>10}  kept, and {_size(self.argument_bytes)} that are arguments"
        return "\n".join([total, *map(str, self.rows)])

    def _repr_html_(self) -> str:
        head = f"<p><b>{_size(self.bytes)}</b> kept, and {_size(self.argument_bytes)} that are arguments</p>"
        rows = [
            (_size(row.bytes), f"{row.dtype}{list(row.shape)}", row.argument or row.operation, row.source)
            for row in self.rows
        ]
        return head + html_table(("size", "array", "made by", "line"), rows)


def saved_residuals(fn: Callable[..., Any], *args: Any) -> Residuals:
    """What `jax.grad` of `fn` at `args` keeps from forward to backward; nothing is computed.

    `args`: pytrees of arrays or `jax.ShapeDtypeStruct`. It is JAX's choice, before the compiler's: XLA may recompute a
    cheap one, and a `scan` stacks those of all its iterations. Where `jax.ad_checkpoint.print_saved_residuals` says
    "output of scan", this says which line of the loop's body.
    """
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), _dtype(a)), args)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(shapes)]
    closed, (_, backward) = jax.make_jaxpr(lambda *args: jax.vjp(fn, *args), return_shape=True)(*shapes)
    jaxpr = closed.jaxpr
    kept = jaxpr.outvars[len(jaxpr.outvars) - len(jax.tree.leaves(backward)) :]
    rows: dict[Any, Residual] = {}
    for var in kept:
        if isinstance(var, jex_core.Literal) or var in rows:
            continue
        shape, dtype = tuple(var.aval.shape), str(var.aval.dtype)
        if var in jaxpr.invars:
            rows[var] = Residual(shape, dtype, "", "", argument=paths[jaxpr.invars.index(var)])
        else:
            rows[var] = Residual(shape, dtype, *_producer(jaxpr, var))
    return Residuals(tuple(sorted(rows.values(), key=lambda row: -row.bytes)))


def _size(n_bytes: int) -> str:
    exponent = min(max(n_bytes, 1).bit_length() - 1, 39) // 10
    return f"{n_bytes} B" if exponent == 0 else f"{n_bytes / 2 ** (10 * exponent):.2f} {'KMG'[exponent - 1]}iB"


def _producer(jaxpr: jex_core.Jaxpr, var: Any) -> tuple[str, str]:
    # Into loops, calls and checkpoints, down to the equation that computed the value.
    eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
    if eqn is None:
        return ("constant" if var in jaxpr.constvars else "input of the loop or call"), ""
    if (name := given_name(eqn)) is not None:
        return f"named {name!r}", _source(eqn)
    inner = [p for p in inner_jaxprs(eqn) if len(p.outvars) == len(eqn.outvars)]
    if not inner:
        # Casting to the same precision is how JAX marks a residual; what it casts is the answer.
        if eqn.primitive.name == "reduce_precision" and isinstance(eqn.invars[0], jex_core.Var):
            return _producer(jaxpr, eqn.invars[0])
        return eqn.primitive.name, _source(eqn)
    inside = inner[0].outvars[eqn.outvars.index(var)]
    if isinstance(inside, jex_core.Literal):
        return "constant", _source(eqn)
    if inside in inner[0].invars and len(inner[0].invars) == len(eqn.invars):
        outside = eqn.invars[inner[0].invars.index(inside)]
        if eqn.primitive.name != "scan" and not isinstance(outside, jex_core.Literal):
            return _producer(jaxpr, outside)
        return "the loop's input of each iteration", _source(eqn)
    return _producer(inner[0], inside)


def _source(eqn: Any) -> str:
    frames = getattr(eqn.source_info.traceback, "frames", ())
    for frame in frames:
        if not _is_library(frame.file_name):
            return line_of_source(frame.file_name, frame.line_num)
    return ""


@functools.cache
def _is_library(file: str) -> bool:
    own = str(Path(__file__))
    return file == own or file.startswith(_LIBRARIES) or file.startswith("<frozen")


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
