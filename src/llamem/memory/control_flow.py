"""How one operation of a traced program runs the programs inside it: a loop, a branch, a call, one per device."""

import dataclasses
import math
from typing import Any

from jax.extend import core as jex_core


@dataclasses.dataclass(frozen=True)
class Scan:
    """A `lax.scan`: its body takes `n_consts` constants, `n_carry` carried values and one slice of each input."""

    body: jex_core.ClosedJaxpr
    n_consts: int
    n_carry: int
    length: int


@dataclasses.dataclass(frozen=True)
class While:
    """A `lax.while_loop`: operands are the constants of the condition, those of the body, and the carried values."""

    condition: jex_core.ClosedJaxpr
    body: jex_core.ClosedJaxpr
    n_condition_consts: int
    n_body_consts: int


@dataclasses.dataclass(frozen=True)
class Branches:
    """A `lax.cond` or `lax.switch`: the first operand chooses the branch, which takes the others."""

    branches: tuple[jex_core.ClosedJaxpr, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """A function called as it stands: jit, a custom derivative, a checkpoint."""

    body: jex_core.ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class OnDevices:
    """A `jax.shard_map`: every device of a mesh runs the body on its parts of the operands."""

    body: jex_core.ClosedJaxpr
    mesh: Any
    axes: tuple[str, ...]  # over which devices run it; none of those that the compiler shares out by itself
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]

    @property
    def devices(self) -> int:
        """How many run it."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)


Flow = Scan | While | Branches | Call | OnDevices
