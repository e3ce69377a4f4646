"""One loss with rematerialisation and without, and proofs that compare what both compute.

Two programs that compute the same in another order differ by rounding. Two bounds excuse a difference: a fraction of
the value itself, by its type, and what the value does when every input moves by its last bit. A gradient that is
zero in truth, such as that of a bias before a normalisation, is nothing but rounding: only the second judges it.
"""

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
from jaxmem.report import Report
from jaxmem.tracing.jaxprs import OnDevices, control_flow, equations
from jaxmem.tracing.residuals import Residuals, saved_residuals
from jaxmem.verify.checkpoints import find_checkpoints


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
        flows = [control_flow(eqn) for eqn, _ in equations(self.rematerialised.traced.jaxpr)]
        of_maps = [flow.mesh.size for flow in flows if isinstance(flow, OnDevices)]
        return max([len(array.sharding.device_set) for array in arrays] + of_maps, default=1)


def dtype_of(leaf: Any) -> Any:
    """Return the type of a leaf; Python's own numbers have JAX's."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


_TIMES_NOISE = 6  # two programs round independently, and one sample of the noise is few
_OTHER_NUMBERS = "the program without gives other numbers, too, when it runs again"


@dataclasses.dataclass(frozen=True)
class _Difference:
    """A row of an array that differs: its place (() for all of it), its error and size by Euclidean norms."""

    place: tuple[int, ...]
    error: float
    size: float
    lost: bool  # all zero where it should not be


def loss_is_the_same(both: BothWays) -> Proof:
    """Check that the loss is that without, within the tolerance of its type and what rounding does to it."""
    actual, expected = (float(_values(way.results.loss)) for way in (both.rematerialised, both.plain))
    seen = f"{actual:.6g} and {expected:.6g}"
    if not np.isfinite(expected):
        return Proof(Title.LOSS, None, f"{seen}: without rematerialisation it is not finite either")
    if not _repeats(both):
        return Proof(Title.LOSS, None, f"{seen}: {_OTHER_NUMBERS}")
    for ways in _precisions(both):
        if _differences(ways, "loss", 0, ways.tolerance):
            got, want = (float(_values(way.results.loss)) for way in (ways.rematerialised, ways.plain))
            where = "" if ways is both else f"; in float32 {got:.8g} and {want:.8g}"
            cause = "Dropout drawn anew, a term left out, state updated twice, or another computation altogether."
            return Proof(Title.LOSS, False, seen + where, cause)
    return Proof(Title.LOSS, True, seen + _unseen(both))


def results_are_the_same(both: BothWays) -> Proof | None:
    """Check that what the loss returns besides is that without: hidden states, statistics updated once, choices."""
    if not both.plain.has_aux:
        return None
    actual, expected = (jax.tree.leaves_with_path(way.results.aux) for way in (both.rematerialised, both.plain))
    if [path for path, _ in actual] != [path for path, _ in expected]:
        seen = f"{len(actual)} arrays instead of {len(expected)}"
        return Proof(Title.RESULTS, False, seen, "A result is lost on its way through the checkpoint.")
    off = []
    for i, ((path, got), (_, want)) in enumerate(zip(actual, expected, strict=True)):
        name = jax.tree_util.keystr(path)
        # Integers are equal or not, and so is what chose them; only rounding excuses another choice.
        tolerance = both.tolerance if jnp.issubdtype(want.dtype, jnp.inexact) else 0.0
        if got.shape != want.shape or got.dtype != want.dtype:
            off.append(f"{name} is {got.dtype}{got.shape}, not {want.dtype}{want.shape}")
        elif _differences(both, "aux", i, tolerance):
            off.append(name)
    cause = (
        "State that a layer changes (batch statistics, counts of draws) was lost in the checkpoint or updated twice: "
        "return it from the layer (has_aux=True), or use nnx.remat."
    )
    seen = f"different: {', '.join(off[:3])}" if off else f"{len(actual)} arrays"
    return Proof(Title.RESULTS, not off, seen, cause if off else "")


def gradients_are_the_same(both: BothWays) -> Proof:
    """Check that every parameter's gradient, each layer of it, is that without; one that is not zero stays so."""
    if not _repeats(both):
        return Proof(Title.GRADIENTS, None, _OTHER_NUMBERS)
    proofs = [_compared_gradients(ways) for ways in _precisions(both)]
    wrong = next((proof for proof in proofs if not proof.holds), None)
    return wrong or dataclasses.replace(proofs[0], seen=proofs[0].seen + _unseen(both))


def _compared_gradients(both: BothWays) -> Proof:
    lost, off, judged, zero, rounding, not_finite = [], [], 0, 0, 0, 0
    largest = 0.0
    actual, expected = (jax.tree.leaves_with_path(way.results.gradients) for way in (both.rematerialised, both.plain))
    for i, ((path, got), (_, want)) in enumerate(zip(actual, expected, strict=True)):
        if want.dtype == jax.dtypes.float0:
            continue
        name, got, want = jax.tree_util.keystr(path), _values(got), _values(want)
        if not np.isfinite(want).all():
            not_finite += 1
            continue
        judged += 1
        zero += not want.any()
        rows = _differences(both, "gradients", i, both.tolerance)
        for row in rows:
            at = name + (f"[{', '.join(map(str, row.place))}]" if row.place else "")
            by = f"by {row.error:.1e} of {row.size:.3g}" if row.size else f"is {row.error:.1e}, and zero without"
            (lost if row.lost else off).append(at if row.lost else f"{at} {by}")
        difference = float(np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0))
        if difference > both.tolerance and not rows:  # zero in truth, as a bias of the keys before a softmax
            rounding += 1
        else:
            largest = max(largest, difference)
    counts = (zero, "zero in both"), (rounding, "nothing but rounding in both"), (not_finite, "not finite even without")
    counted = [f"{count} {words}" for count, words in counts if count]
    seen = ", ".join([f"largest difference {largest:.1e} in {judged} arrays", *counted])
    if lost:
        seen, cause = f"no gradient at {', '.join(lost[:3])}", "A stop_gradient, or weights closed over and not passed."
    elif off:
        seen = "; ".join(off[:3])
        cause = "A custom backward pass without the outer cotangent, or randomness that differs between the passes."
    else:
        return Proof(Title.GRADIENTS, True if judged and not not_finite else None, seen)
    return Proof(Title.GRADIENTS, False, seen, cause)


def evaluation_is_untouched(both: BothWays) -> Proof | None:
    """Check that `evaluate(params, batch, how)` has no checkpoint, and returns the same arrays, a KV cache included."""
    if (evaluate := both.evaluate) is None:
        return None
    ways = [lambda p, b, setting=setting: evaluate(p, b, setting) for setting in (both.remat, both.baseline)]
    traces = [jax.jit(way).trace(both.params, both.batch) for way in ways]
    there = [len(find_checkpoints(traced.jaxpr.jaxpr)) for traced in traces]
    if any(there):
        cause = (
            "The model stays in training mode, or the layer checkpoints whatever the mode: no gradient is taken here."
        )
        return Proof(Title.EVALUATION, False, f"checkpoints in it: {there[0]}, without {there[1]}", cause)
    actual, expected = (jax.tree.leaves(traced.lower().compile()(both.params, both.batch)) for traced in traces)
    same = len(actual) == len(expected) and all(
        got.dtype == want.dtype and np.array_equal(_values(got), _values(want), equal_nan=True)
        for got, want in zip(actual, expected, strict=True)
    )
    cause = "" if same else "A cache or a keyword argument got lost on the way through the checkpoint."
    seen = f"no checkpoint, {len(actual)} arrays {'as' if same else 'not as'} without"
    return Proof(Title.EVALUATION, same, seen, cause)


def _repeats(both: BothWays) -> bool:
    """Return whether the plain program finds the same again; one that asks its host for numbers may not."""
    for part in ("loss", "gradients"):
        leaves = [jax.tree.leaves(getattr(results, part)) for results in (both.repeated, both.plain.results)]
        known = [(got, want) for got, want in zip(*leaves, strict=True) if want.dtype != jax.dtypes.float0]
        pairs = [(_values(got), _values(want)) for got, want in known]
        error = sum(np.nansum(np.abs(got - want) ** 2) for got, want in pairs)
        size = sum(np.nansum(np.abs(want) ** 2) for _, want in pairs)
        if error > both.tolerance**2 * size:
            return False
    return True


def _precisions(both: BothWays) -> list[BothWays]:
    """Return both ways as they are, and in float32 where 16 bits hide small terms."""
    return [both] if both.in_float32 is None else [both, both.in_float32]


def _unseen(both: BothWays) -> str:
    """Return what a comparison could not see, in words."""
    if both.in_float32 is not None:
        return f" (in float32, too: {both.in_float32.tolerance:.0e} would be seen)"
    least = TOLERANCE[both.coarsest]
    coarse = least > TOLERANCE["float32"]
    return f" (what is below {least:.0e} of it is not seen in {both.coarsest})" if coarse else ""


def _differences(both: BothWays, part: str, leaf: int, tolerance: float) -> list[_Difference]:
    """Return the rows along the first axis, such as layers, in which a leaf of the results is not that without.

    Row by row, so that no layer hides another. In a vector every element is a row. An expert or unit inside of a row
    is named where its gradient is all zero and should not be, unless the whole row is lost.
    """
    got, want = (
        _values(jax.tree.leaves(getattr(way.results, part))[leaf]) for way in (both.rematerialised, both.plain)
    )

    def beyond_rounding(axes: int) -> list[_Difference]:
        error, size = _norms(np.asarray(got - want), axes), _norms(want, axes)
        off = ~(error <= tolerance * size)  # so written, a NaN is off
        if off.any():
            noise = _norms(np.asarray(_values(jax.tree.leaves(getattr(both.rounded, part))[leaf]) - want), axes)
            if want.size < 16 * error.size:  # the noise of a few elements may be small by chance: that of all counts
                noise = 2 * np.maximum(noise, np.sqrt(np.mean(noise**2)))
            off &= ~(error <= _TIMES_NOISE * noise)
        places = [tuple(map(int, place)) for place in np.argwhere(off)]
        return [
            _Difference(at, float(error[at]), float(size[at]), bool(size[at] and not got[at].any())) for at in places
        ]

    rows = beyond_rounding(1)
    if want.ndim < 3 or not rows:
        return rows
    whole = {row.place for row in rows if row.lost}
    return [row for row in beyond_rounding(2) if row.lost and row.place[:1] not in whole] or rows


def _norms(values: np.ndarray, axes: int) -> np.ndarray:
    """Return the Euclidean norm of every row along the first `axes` axes."""
    return np.asarray(np.sqrt(np.sum(np.abs(values) ** 2, axis=tuple(range(min(axes, values.ndim), values.ndim)))))


def _values(array: Any) -> np.ndarray:
    """Return a leaf on the host, wide enough to compare: keys as the numbers they are made of."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array, np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)
