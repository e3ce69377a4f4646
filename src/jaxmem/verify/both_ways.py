"""One loss with rematerialisation and without: traced, compiled and run, as given and with parameters moved."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jaxmem.compiling import compile_report, report_compiled
from jaxmem.report import Report
from jaxmem.tracing.jaxprs import OnDevices, control_flow, equations, outputs_computed
from jaxmem.tracing.residuals import Residuals, saved_residuals
from jaxmem.verify.checkpoints import Operation, find_checkpoints

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
    setting: Any
    chip: str

    def loss(self, params: Any, batch: Any) -> Any:
        """Return the loss, or the pair of it and other results."""
        # Built anew, for flax: a layer may change only Variables that were made in the trace it runs in.
        params, batch = jax.tree.map(lambda leaf: leaf, (params, batch))
        return self.loss_fn(params, batch, self.setting)

    @cached_property
    def _traced(self) -> tuple[jex_core.ClosedJaxpr, Any]:
        return jax.make_jaxpr(self.loss, return_shape=True)(self.params, self.batch)

    @cached_property
    def traced(self) -> jex_core.ClosedJaxpr:
        """The loss, traced."""
        return self._traced[0]

    @cached_property
    def checkpoints(self) -> list[Operation]:
        """The checkpoints in the traced loss."""
        return find_checkpoints(self.traced.jaxpr)

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

    def at(self, params: Any) -> "Way":
        """Return the same program with other parameters of the same shapes: it is not compiled again."""
        other = dataclasses.replace(self, params=params)
        vars(other).update(_traced=self._traced, program=self.program)
        return other

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
    def rematerialised(self) -> Way:
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
            return wide if wide.coarsest not in _SMALL and wide.plain.results and wide.rematerialised.results else None
        except FAILURES:
            return None

    def without_gradient(self, *, or_a_layer: bool) -> tuple[str, ...]:
        """Return the parameters whose gradient the plain program computes, and finds to be zero; `or_a_layer` of it.

        That of a frozen parameter is a constant, and not computed.
        """
        gradients = jax.tree.leaves_with_path(self.plain.results.gradients)
        computed = outputs_computed(self.plain.gradient)[-len(gradients) :]
        names = []
        for (path, gradient), is_computed in zip(gradients, computed, strict=True):
            if is_computed and gradient.dtype != jax.dtypes.float0:
                layers = norms(values_of(gradient), 1 if or_a_layer and gradient.ndim > 2 else 0)
                names += [] if layers.all() else [name_of(path)]
        return tuple(names)

    @cached_property
    def moved(self) -> "BothWays | None":
        """The same with all parameters moved, where some have no gradient as they are; None where all have one.

        Layers that begin as the identity, by norms, gates or adapters of zeros, hide whatever is wrong inside them.
        """
        if not self.without_gradient(or_a_layer=True):
            return None
        generator = np.random.default_rng(2)

        def moved(leaf: Any) -> Any:
            if not jnp.issubdtype(dtype_of(leaf), jnp.floating):
                return leaf
            values = np.asarray(leaf, np.float64)
            step = 0.1 * max(float(np.sqrt(np.mean(values**2))) if values.size else 0.0, 0.1)
            return _like(leaf, values + step * generator.normal(size=np.shape(leaf)))

        params = jax.tree.map(moved, self.params)
        other = dataclasses.replace(self, params=params)
        vars(other).update(plain=self.plain.at(params), rematerialised=self.rematerialised.at(params))
        return other

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
            return _like(leaf, np.asarray(leaf, np.float64) * factor)

        return self.plain.run(*jax.tree.map(moved, (self.params, self.batch)))

    @cached_property
    def repeated(self) -> Results:
        """The plain results once more, from the same parameters and batch."""
        return self.plain.run(self.params, self.batch)

    @cached_property
    def devices(self) -> int:
        """Over how many devices the work is spread: a compiled program is that of one of them."""
        arrays = [leaf for leaf in jax.tree.leaves((self.params, self.batch)) if isinstance(leaf, jax.Array)]
        flows = [control_flow(eqn) for eqn, _ in equations(self.rematerialised.traced.jaxpr)]
        of_maps = [flow.mesh.size for flow in flows if isinstance(flow, OnDevices)]
        return max([len(array.sharding.device_set) for array in arrays] + of_maps, default=1)


def _like(leaf: Any, values: Any) -> Any:
    """Return float64 values in the type and place of a leaf of the same shape."""
    if not hasattr(leaf, "dtype"):
        return float(values)
    result = np.asarray(values).astype(leaf.dtype)
    # What is on one device without having been put there may go to any other.
    return jax.device_put(result, leaf.sharding) if getattr(leaf, "committed", False) else result


def name_of(path: Any) -> str:
    """Return what a leaf is called in messages."""
    return jax.tree_util.keystr(path) or "the only array"


def dtype_of(leaf: Any) -> Any:
    """Return the type of a leaf; Python's own numbers have JAX's."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def norms(values: np.ndarray, axes: int) -> np.ndarray:
    """Return the Euclidean norm of every row along the first `axes` axes."""
    return np.asarray(np.sqrt(np.sum(np.abs(values) ** 2, axis=tuple(range(min(axes, values.ndim), values.ndim)))))


def values_of(array: Any) -> np.ndarray:
    """Return a leaf on the host, wide enough to compare: keys as the numbers they are made of."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array, np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)
