"""One loss computed in two ways, with rematerialisation and without: what the proofs of `verify_remat` compare."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from llamem.memory.compiling import compile_report, report_compiled
from llamem.memory.control_flow import OnDevices
from llamem.memory.jaxprs import control_flow, equations
from llamem.memory.report import Report
from llamem.memory.residuals import Residuals, saved_residuals
from llamem.verify.closeness import TOLERANCE, dtype_of, moved_by_rounding
from llamem.verify.keys import Keys
from llamem.verify.policies import option_faults
from llamem.verify.proof import CannotGo, Proof, Title

_SMALL = ("bfloat16", "float16")


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
    step: jax.stages.Lowered | None = None

    def loss(self, how: Any) -> Callable[[Any, Any], Any]:
        """Return the loss as a function of parameters and batch."""

        def loss(params: Any, batch: Any) -> Any:
            # Built anew, for flax: a layer may change only Variables that were made in the trace it runs in.
            params, batch = jax.tree.map(lambda leaf: leaf, (params, batch))
            return self.loss_fn(params, batch, how)

        return loss

    def gradient(self, how: Any) -> Callable[[Any, Any], Any]:
        """Return the loss (and what it returns besides) with its gradients."""
        return jax.value_and_grad(self.loss(how), has_aux=self.has_aux, allow_int=True)

    def residuals(self, how: Any) -> Residuals:
        """Return what the gradient for the parameters keeps from the forward pass."""

        def loss(params: Any) -> Any:
            value = self.loss(how)(params, self.batch)
            return value[0] if self.has_aux else value

        return saved_residuals(loss, self.params)

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
    def coarsest(self) -> str:
        """The floating-point type of fewest bits that the program without computes in."""
        dtypes = {str(getattr(var.aval, "dtype", "")) for eqn, _ in equations(self.plain.jaxpr) for var in eqn.outvars}
        return max(dtypes & set(TOLERANCE), key=lambda dtype: -jnp.finfo(dtype).nmant, default="float32")

    @cached_property
    def in_float32(self) -> "BothWays | None":
        """The same with 16-bit parameters and data in float32, to see what rounding hides; None where that is no help.

        Where the program casts to 16 bits by itself, or cannot be traced with other types, its rounding stays.
        """
        if self.coarsest not in _SMALL:
            return None
        wide = dataclasses.replace(self, params=_widened(self.params), batch=_widened(self.batch))
        try:
            return wide if wide.coarsest not in _SMALL and wide.found else None
        except (CannotGo, TypeError, ValueError, jax.errors.JaxRuntimeError):
            return None

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
            raise CannotGo(Proof(Title.TRACED, False, _first_line(error), cause)) from error

    @cached_property
    def option_faults(self) -> list[str]:
        """What is wrong with the checkpoints' options and policies, in words. Raises CannotGo."""
        return option_faults(self.traced.jaxpr)

    @cached_property
    def keys(self) -> Keys:
        """Where the random keys of the loss with rematerialisation come from. Raises CannotGo."""
        return Keys(self.traced, self.params, self.batch)

    @cached_property
    def expected(self) -> tuple[Any, Any, Any]:
        """Loss, other results and gradients without, computed."""
        return self._computed(self._plain_program, self.params, self.batch)

    @cached_property
    def found(self) -> tuple[Any, Any, Any]:
        """Loss, other results and gradients with rematerialisation, computed. Raises CannotGo."""
        # The plain program goes first, outside the `try`: what that raises is no failure of this one.
        wrong, _ = self.option_faults, self.expected
        try:
            return self._computed(self._program, self.params, self.batch)
        except (TypeError, ValueError, jax.errors.JaxRuntimeError) as error:
            raise CannotGo(Proof(Title.COMPUTED, False, _first_line(error), " ".join(wrong))) from error

    @cached_property
    def rounded(self) -> tuple[Any, Any, Any]:
        """`expected` once more, from parameters and batch whose last bits fell otherwise: what rounding does."""
        moved = moved_by_rounding((self.params, self.batch), jnp.finfo(self.coarsest).nmant)
        return self._computed(self._plain_program, *moved)

    @cached_property
    def devices(self) -> int:
        """Over how many devices the work is spread: a compiled program is that of one of them."""
        arrays = [leaf for leaf in jax.tree.leaves((self.params, self.batch)) if isinstance(leaf, jax.Array)]
        flows = [control_flow(eqn) for eqn, _ in equations(self.traced.jaxpr)]
        of_maps = [flow.mesh.size for flow in flows if isinstance(flow, OnDevices)]
        return max([len(array.sharding.device_set) for array in arrays] + of_maps, default=1)

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

    def _computed(self, program: jax.stages.Compiled, params: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = program(params, batch)
        loss, aux = value if self.has_aux else (value, None)
        return loss, aux, grads


def _widened(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if str(dtype_of(leaf)) in _SMALL else leaf, tree)


def _first_line(error: Exception) -> str:
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
