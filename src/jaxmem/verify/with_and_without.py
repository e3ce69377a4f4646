"""One loss with rematerialisation and without: what the proofs of `verify_remat` compare, and what a proof says."""

import dataclasses
import enum
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jaxmem.compiling import compile_report, report_compiled
from jaxmem.jaxprs import OnDevices, control_flow, equations
from jaxmem.report import Report
from jaxmem.residuals import Residuals, saved_residuals


class Title(enum.StrEnum):
    """The names of all proofs, as `skip=` takes them."""

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
    DONATION = "donated arguments are given up"
    TRACED = "it can be traced"
    COMPUTED = "it can be computed"


@dataclasses.dataclass(frozen=True)
class Proof:
    """One thing to be proved: whether it holds (None: not proved, `seen` says why), what was seen, the usual cause.

    `skipped`: it was left out because the caller asked for that.
    """

    name: str
    holds: bool | None
    seen: str
    cause: str = ""
    skipped: bool = False

    @property
    def failed(self) -> bool:
        """Whether it does not hold."""
        return self.holds is False

    @property
    def mark(self) -> str:
        """One or two words: ok, FAILED, skipped, not proved."""
        if self.skipped:
            return "skipped"
        return "not proved" if self.holds is None else "ok" if self.holds else "FAILED"

    def __str__(self) -> str:
        lines = [f"{self.mark:<10} {self.name}{': ' if self.seen else ''}{self.seen}", self.cause]
        return f"\n{'':11}".join(line for line in lines if line)


TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}  # relative, for equal results
_SMALL = ("bfloat16", "float16")
FAILURES = (TypeError, ValueError, jax.errors.JAXTypeError, jax.errors.JaxRuntimeError)  # of a program, not of a proof


class Results(NamedTuple):
    """What a loss computes: itself, what it returns besides (None without), and the parameters' gradients."""

    loss: Any
    aux: Any
    gradients: Any


@dataclasses.dataclass(frozen=True)
class Way:
    """A loss computed in one way: traced, differentiated, compiled and run, each once and only if a proof asks."""

    loss_fn: Callable[[Any, Any, Any], Any]
    params: Any
    batch: Any
    how: Any
    chip: str

    def loss(self, params: Any, batch: Any) -> Any:
        """Return the loss, or the pair of it and other results."""
        # Built anew, for flax: a layer may change only Variables that were made in the trace it runs in.
        params, batch = jax.tree.map(lambda leaf: leaf, (params, batch))
        return self.loss_fn(params, batch, self.how)

    @cached_property
    def _traced(self) -> tuple[jex_core.ClosedJaxpr, Any]:
        return jax.make_jaxpr(self.loss, return_shape=True)(self.params, self.batch)

    @cached_property
    def traced(self) -> jex_core.ClosedJaxpr:
        """The loss, traced."""
        return self._traced[0]

    @cached_property
    def has_aux(self) -> bool:
        """Whether the loss returns a pair: itself, and other results."""
        return isinstance(self._traced[1], tuple)

    @cached_property
    def _gradient(self) -> Callable[[Any, Any], Any]:
        return jax.value_and_grad(self.loss, has_aux=self.has_aux, allow_int=True)

    @cached_property
    def _gradient_traced(self) -> jax.stages.Traced:
        return jax.jit(self._gradient, keep_unused=True).trace(self.params, self.batch)

    @cached_property
    def gradient(self) -> jex_core.ClosedJaxpr:
        """The loss with its gradients, traced."""
        return self._gradient_traced.jaxpr

    @cached_property
    def program(self) -> jax.stages.Compiled:
        """The loss with its gradients, compiled for the devices at hand."""
        return self._gradient_traced.lower().compile()

    def run(self, params: Any, batch: Any) -> Results:
        """Return what the program computes of parameters and batch of the same shapes."""
        value, gradients = self.program(params, batch)
        loss, aux = value if self.has_aux else (value, None)
        return Results(loss, aux, gradients)

    @cached_property
    def results(self) -> Results:
        """What the program computes."""
        return self.run(self.params, self.batch)

    @cached_property
    def residuals(self) -> Residuals:
        """What the gradient for the parameters keeps from the forward pass. The batch is an argument anyway."""
        return saved_residuals(lambda params: jax.tree.leaves(self.loss(params, self.batch))[0], self.params)

    @cached_property
    def report(self) -> Report:
        """What the chip's compiler says of the loss with its gradients."""
        if self.chip == "local":
            return report_compiled(self.program, self.gradient)
        return compile_report(self._gradient, self.params, self.batch, chip=self.chip)


@dataclasses.dataclass(frozen=True)
class BothWays:
    """One loss, with rematerialisation and without: arguments as in `verify_remat`."""

    loss_fn: Callable[[Any, Any, Any], Any]
    params: Any
    batch: Any
    remat: Any = "nothing"
    baseline: Any = None
    chip: str = "local"
    evaluate: Callable[[Any, Any, Any], Any] | None = None
    step: jax.stages.Lowered | None = None

    @cached_property
    def mine(self) -> Way:
        """The way with rematerialisation."""
        return Way(self.loss_fn, self.params, self.batch, self.remat, self.chip)

    @cached_property
    def plain(self) -> Way:
        """The way without."""
        return Way(self.loss_fn, self.params, self.batch, self.baseline, self.chip)

    @cached_property
    def coarsest(self) -> str:
        """The floating-point type of fewest bits that the program without computes in."""
        outvars = [var for eqn, _ in equations(self.plain.traced.jaxpr) for var in eqn.outvars]
        dtypes = {str(getattr(var.aval, "dtype", "")) for var in outvars}
        return max(dtypes & set(TOLERANCE), key=lambda dtype: -jnp.finfo(dtype).nmant, default="float32")

    @property
    def tolerance(self) -> float:
        """How far results may be apart, relatively, by the types of parameters and loss: `rounded` excuses the rest."""
        dtypes = {str(dtype_of(leaf)) for leaf in (*jax.tree.leaves(self.params), self.plain.traced.out_avals[0])}
        return max((TOLERANCE[dtype] for dtype in dtypes & set(TOLERANCE)), default=TOLERANCE["float32"])

    @cached_property
    def in_float32(self) -> "BothWays | None":
        """The same with 16-bit parameters and data in float32, to see what rounding hides; None where that is no help.

        Where the program casts to 16 bits by itself, or cannot be traced with other types, its rounding stays.
        """
        if self.coarsest not in _SMALL:
            return None
        params, batch = jax.tree.map(
            lambda leaf: leaf.astype(jnp.float32) if str(dtype_of(leaf)) in _SMALL else leaf, (self.params, self.batch)
        )
        wide = dataclasses.replace(self, params=params, batch=batch)
        try:
            return wide if wide.coarsest not in _SMALL and wide.plain.results and wide.mine.results else None
        except FAILURES:
            return None

    @cached_property
    def rounded(self) -> Results:
        """The plain results once more, from parameters and batch whose last bits fell otherwise: what rounding does."""
        generator, bits = np.random.default_rng(1), jnp.finfo(self.coarsest).nmant

        def moved(leaf: Any) -> Any:
            if not jnp.issubdtype(dtype_of(leaf), jnp.floating):
                return leaf
            # At least one step of the leaf's own type, or nothing would move.
            step = 2.0 ** -min(bits, jnp.finfo(dtype_of(leaf)).nmant)
            factor = 1 + step * generator.choice([-1.0, 1.0], np.shape(leaf))
            if not hasattr(leaf, "dtype"):
                return leaf * float(factor)
            result = (np.asarray(leaf, np.float64) * factor).astype(leaf.dtype)
            # What is on one device without having been put there may go to any other.
            return jax.device_put(result, leaf.sharding) if getattr(leaf, "committed", False) else result

        return self.plain.run(*jax.tree.map(moved, (self.params, self.batch)))

    @cached_property
    def repeated(self) -> Results:
        """The plain results once more, from the same parameters and batch."""
        return self.plain.run(self.params, self.batch)

    @cached_property
    def devices(self) -> int:
        """Over how many devices the work is spread: a compiled program is that of one of them."""
        arrays = [leaf for leaf in jax.tree.leaves((self.params, self.batch)) if isinstance(leaf, jax.Array)]
        flows = [control_flow(eqn) for eqn, _ in equations(self.mine.traced.jaxpr)]
        of_maps = [flow.mesh.size for flow in flows if isinstance(flow, OnDevices)]
        return max([len(array.sharding.device_set) for array in arrays] + of_maps, default=1)


def dtype_of(leaf: Any) -> Any:
    """Return the type of a leaf; Python's own numbers have JAX's."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
