"""One loss computed in two ways, with rematerialisation and without: what the proofs of `verify_remat` compare."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from llamem.memory.compiling import compile_report
from llamem.memory.report import Report
from llamem.verify.placement import faults
from llamem.verify.runs import Runs, count_traced

_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Proof:
    """One thing to be proved: whether it holds (None: could not be told here), what was seen, and the usual cause."""

    name: str
    holds: bool | None
    seen: str
    cause: str = ""

    def __str__(self) -> str:
        mark = {True: "ok    ", False: "FAILED", None: "      "}[self.holds]
        return f"{mark} {self.name}: {self.seen}" + (f"\n       {self.cause}" if self.cause else "")


class CannotGo(Exception):
    """The rematerialised program cannot be traced or run; `proof` says how it failed, and nothing else can be told."""

    def __init__(self, proof: Proof) -> None:
        super().__init__(str(proof))
        self.proof = proof


@dataclasses.dataclass(frozen=True)
class BothWays:
    """One loss, with rematerialisation and without: arguments as in `verify_remat`. What proofs share is made once."""

    loss_fn: Callable[[Any, Any, Any], Any]
    params: Any
    batch: Any
    with_: Any = "nothing"
    without: Any = None
    target: str = "local"
    evaluate: Callable[[Any, Any, Any], Any] | None = None

    def loss(self, how: Any) -> Callable[[Any, Any], Any]:
        """The loss as a function of parameters and batch."""
        return lambda params, batch: self.loss_fn(params, batch, how)

    def gradient(self, how: Any) -> Callable[[Any, Any], Any]:
        """The loss (and what it returns besides) with its gradients."""
        return jax.value_and_grad(self.loss(how), has_aux=self.has_aux, allow_int=True)

    @cached_property
    def has_aux(self) -> bool:
        """Whether the loss returns a pair: itself, and other results."""
        return isinstance(self._plain[1], tuple)

    @cached_property
    def tolerance(self) -> float:
        """How far results may be apart, relatively: by the coarsest type among parameters and loss."""
        dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(self.params) if jnp.issubdtype(leaf.dtype, jnp.floating)}
        return max(_TOLERANCE.get(dtype, 1e-4) for dtype in {*dtypes, str(self.expected[0].dtype)})

    @cached_property
    def plain(self) -> jex_core.ClosedJaxpr:
        """The loss without, traced."""
        return self._plain[0]

    @cached_property
    def traced(self) -> jex_core.ClosedJaxpr:
        """The loss with rematerialisation, traced. Raises CannotGo."""
        try:
            return jax.make_jaxpr(self.loss(self.with_))(self.params, self.batch)
        except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
            cause = ""
            if isinstance(error, jax.errors.ConcretizationTypeError):
                cause = (
                    "A flag or size became a traced value inside the checkpoint: jax.checkpoint(f, "
                    "static_argnums=...), or close over it."
                )
            raise CannotGo(Proof("it can be traced", False, _told(error), cause)) from error

    @cached_property
    def faults(self) -> list[str]:
        """What is wrong with the checkpoints' places and policies, in words. Raises CannotGo."""
        return faults(self.traced.jaxpr)

    @cached_property
    def expected(self) -> tuple[Any, Any, Any]:
        """Loss, other results and gradients without, computed."""
        return self._computed(self.without)

    @cached_property
    def found(self) -> tuple[Any, Any, Any]:
        """Loss, other results and gradients with rematerialisation, computed. Raises CannotGo."""
        wrong = self.faults
        try:
            return self._computed(self.with_)
        except (TypeError, ValueError, jax.errors.JaxRuntimeError) as error:
            raise CannotGo(Proof("it can be computed", False, _told(error), " ".join(wrong))) from error

    @cached_property
    def devices(self) -> int:
        """Over how many devices the arguments are spread: a compiled program is that of one of them."""
        arrays = [leaf for leaf in jax.tree.leaves((self.params, self.batch)) if isinstance(leaf, jax.Array)]
        return max((len(array.sharding.device_set) for array in arrays), default=1)

    @cached_property
    def runs(self) -> Runs:
        """What the loss with rematerialisation did when it ran."""
        return count_traced(self.traced, self.gradients[0], self.params, self.batch)

    @cached_property
    def reports(self) -> tuple[Report, Report]:
        """What the target's compiler says of the gradients: with rematerialisation, and without."""
        mine, plain = (
            compile_report(self.gradient(how), self.params, self.batch, target=self.target)
            for how in (self.with_, self.without)
        )
        return mine, plain

    @cached_property
    def gradients(self) -> tuple[jex_core.ClosedJaxpr, jex_core.ClosedJaxpr]:
        """The gradients, traced: with rematerialisation, and without."""
        mine, plain = (
            jax.make_jaxpr(self.gradient(how))(self.params, self.batch) for how in (self.with_, self.without)
        )
        return mine, plain

    @cached_property
    def _plain(self) -> tuple[jex_core.ClosedJaxpr, Any]:
        return jax.make_jaxpr(self.loss(self.without), return_shape=True)(self.params, self.batch)

    def _computed(self, how: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.jit(self.gradient(how))(self.params, self.batch)
        loss, aux = value if self.has_aux else (value, None)
        return loss, aux, grads


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"
