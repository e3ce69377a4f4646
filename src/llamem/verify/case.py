"""One loss computed in two ways, with rematerialisation and without: what the proofs of `verify_remat` compare."""

import dataclasses
import enum
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from llamem.memory.compiling import compile_report, report_compiled
from llamem.memory.control_flow import OnDevices
from llamem.memory.jaxprs import DRAWS, control_flow, equations
from llamem.memory.report import Report
from llamem.verify.closeness import TOLERANCE, dtype_of, moved_by_rounding
from llamem.verify.marks import Traced
from llamem.verify.placement import faults
from llamem.verify.runs import Draw, Log, Replay, Runs, runs_of


class Title(enum.StrEnum):
    """What each proof says; also how it is waived."""

    CHECKPOINTS = "checkpoints reach the program"
    OPTIONS = "policies and options mean what they say"
    LOSS = "the loss is the same"
    RESULTS = "all other results are the same"
    GRADIENTS = "every gradient is the same"
    RUNS = "the layer runs again in the backward pass"
    CHOICES = "it draws and chooses the same again"
    COMPILER = "the compiler leaves them"
    MEMORY = "memory falls"
    OFFLOAD = "offloaded bytes arrive on the host"
    RANDOMNESS = "random numbers are fresh"
    PARAMETERS = "parameters are what they seem"
    EVALUATION = "evaluation is untouched"
    TRACED = "it can be traced"
    COMPUTED = "it can be computed"


@dataclasses.dataclass(frozen=True)
class Proof:
    """One thing to be proved: whether it holds (None: not proved, `seen` says why), what was seen, the usual cause.

    `waived` is the reason given for accepting a failure, or "".
    """

    name: str
    holds: bool | None
    seen: str
    cause: str = ""
    waived: str = ""

    @property
    def failed(self) -> bool:
        """Whether it does not hold, and nobody gave a reason to accept that."""
        return self.holds is False and not self.waived

    @property
    def mark(self) -> str:
        """One or two words: ok, FAILED, waived, not proved."""
        if self.holds is False:
            return "waived" if self.waived else "FAILED"
        return "ok" if self.holds else "not proved"

    def __str__(self) -> str:
        lines = [
            f"{self.mark:<10} {self.name}: {self.seen}",
            self.cause,
            f"waived: {self.waived}" if self.waived else "",
        ]
        return f"\n{'':11}".join(line for line in lines if line)


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
    remat: Any = "nothing"
    baseline: Any = None
    chip: str = "local"
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
        dtypes = [dtype_of(leaf) for leaf in (*jax.tree.leaves(self.params), self.plain.out_avals[0])]
        return max(TOLERANCE.get(str(dtype), 1e-4) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))

    @cached_property
    def plain(self) -> jex_core.ClosedJaxpr:
        """The loss without, traced."""
        return self._plain[0]

    @cached_property
    def traced(self) -> jex_core.ClosedJaxpr:
        """The loss with rematerialisation, traced. Raises CannotGo."""
        try:
            return jax.make_jaxpr(self.loss(self.remat))(self.params, self.batch)
        except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
            cause = ""
            if isinstance(error, jax.errors.ConcretizationTypeError):
                cause = (
                    "A flag or size became a traced value inside the checkpoint: jax.checkpoint(f, "
                    "static_argnums=...), or close over it."
                )
            raise CannotGo(Proof(Title.TRACED, False, _told(error), cause)) from error

    @cached_property
    def faults(self) -> list[str]:
        """What is wrong with the checkpoints' places and policies, in words. Raises CannotGo."""
        return faults(self.traced.jaxpr)

    @cached_property
    def expected(self) -> tuple[Any, Any, Any]:
        """Loss, other results and gradients without, computed."""
        return self._computed(self._plain_program, self.params, self.batch)

    @cached_property
    def found(self) -> tuple[Any, Any, Any]:
        """Loss, other results and gradients with rematerialisation, computed. Raises CannotGo."""
        # The plain program goes first, outside the `try`: what that raises is no failure of this one.
        wrong, _ = self.faults, self.expected
        try:
            return self._computed(self._program, self.params, self.batch)
        except (TypeError, ValueError, jax.errors.JaxRuntimeError) as error:
            raise CannotGo(Proof(Title.COMPUTED, False, _told(error), " ".join(wrong))) from error

    @cached_property
    def rounded(self) -> list[tuple[Any, Any, Any]]:
        """`expected` twice more, from parameters and batch whose last bits fell otherwise: what rounding does."""
        dtypes = {getattr(var.aval, "dtype", None) for eqn, _ in equations(self.plain.jaxpr) for var in eqn.outvars}
        bits = min((jnp.finfo(dtype).nmant for dtype in dtypes if str(dtype) in TOLERANCE), default=23)
        moved = (moved_by_rounding((self.params, self.batch), seed, bits) for seed in (1, 2))
        return [self._computed(self._plain_program, *arguments) for arguments in moved]

    @cached_property
    def devices(self) -> int:
        """Over how many devices the work is spread: a compiled program is that of one of them."""
        arrays = [leaf for leaf in jax.tree.leaves((self.params, self.batch)) if isinstance(leaf, jax.Array)]
        flows = [control_flow(eqn) for eqn, _ in equations(self.traced.jaxpr)]
        of_maps = [flow.mesh.size for flow in flows if isinstance(flow, OnDevices)]
        return max([len(array.sharding.device_set) for array in arrays] + of_maps, default=1)

    @cached_property
    def runs(self) -> Runs:
        """What the loss with rematerialisation did when it ran."""
        return runs_of(self._log, Replay(self.gradients[0], Traced.GRADIENT).run(self.params, self.batch))

    @cached_property
    def replay(self) -> Replay:
        """The loss with rematerialisation, run with callbacks."""
        return Replay(self.traced, Traced.LOSS)

    @cached_property
    def draws(self) -> tuple[list[Draw], list[Draw]]:
        """The random numbers that the loss draws in this step, and in another, with other keys and counters."""
        if not any(eqn.primitive.name in DRAWS for eqn, _ in equations(self.traced.jaxpr)):
            return [], []
        return self._log.draws, self.replay.run(*jax.tree.map(_of_next_step, (self.params, self.batch))).draws

    @cached_property
    def reports(self) -> tuple[Report, Report]:
        """What the chip's compiler says of the gradients: with rematerialisation, and without."""
        if self.chip == "local":
            mine, plain = self.gradients
            return report_compiled(self._program, mine), report_compiled(self._plain_program, plain)
        mine, plain = (
            compile_report(self.gradient(how), self.params, self.batch, chip=self.chip)
            for how in (self.remat, self.baseline)
        )
        return mine, plain

    @cached_property
    def gradients(self) -> tuple[jex_core.ClosedJaxpr, jex_core.ClosedJaxpr]:
        """The gradients, traced: with rematerialisation, and without."""
        return self._trace.jaxpr, self._plain_trace.jaxpr

    @cached_property
    def _plain(self) -> tuple[jex_core.ClosedJaxpr, Any]:
        return jax.make_jaxpr(self.loss(self.baseline), return_shape=True)(self.params, self.batch)

    @cached_property
    def _trace(self) -> jax.stages.Traced:
        return jax.jit(self.gradient(self.remat), keep_unused=True).trace(self.params, self.batch)

    @cached_property
    def _plain_trace(self) -> jax.stages.Traced:
        return jax.jit(self.gradient(self.baseline), keep_unused=True).trace(self.params, self.batch)

    @cached_property
    def _program(self) -> jax.stages.Compiled:
        return self._trace.lower().compile()

    @cached_property
    def _plain_program(self) -> jax.stages.Compiled:
        return self._plain_trace.lower().compile()

    @cached_property
    def _log(self) -> Log:
        return self.replay.run(self.params, self.batch)

    def _computed(self, program: jax.stages.Compiled, params: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = program(params, batch)
        loss, aux = value if self.has_aux else (value, None)
        return loss, aux, grads


def _of_next_step(leaf: Any) -> Any:
    """What a leaf could be in another step: keys, seeds and counters are others; of data, only integers change."""
    dtype = dtype_of(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(leaf) + 1, impl=jax.random.key_impl(leaf))
    return leaf + 1 if jnp.issubdtype(dtype, jnp.integer) else leaf


def _told(error: Exception) -> str:
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
