"""One loss with rematerialisation and without, and proofs that compare what both compute.

Two programs that compute the same in another order differ by rounding. Two bounds excuse a difference: a fraction of
the value itself, by its type, and what the value does when every input moves by its last bit. A gradient that is
zero in truth, such as that of a bias before a normalisation, is nothing but rounding: only the second judges it.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.common.checks import few
from jaxmem.verify.both_ways import TOLERANCE, BothWays, name_of, norms, values_of
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
    actual, expected = (float(values_of(way.results.loss)) for way in (both.rematerialised, both.plain))
    seen = f"{actual:.6g} and {expected:.6g}"
    if not np.isfinite(expected):
        return Proof(Title.LOSS, None, f"{seen}: without rematerialisation it is not finite either")
    if not _repeats(both):
        return Proof(Title.LOSS, None, f"{seen}: {_OTHER_NUMBERS}")
    for ways in _precisions(both):
        if _differences(ways, "loss", 0, ways.tolerance):
            got, want = (float(values_of(way.results.loss)) for way in (ways.rematerialised, ways.plain))
            where = "" if ways is both else f"; {_how_asked(ways, both)} {got:.8g} and {want:.8g}"
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
        name = name_of(path)
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
    for ways in _precisions(both):
        if not (proof := _compared_gradients(ways)).holds:
            where = "" if ways is both else f" ({_how_asked(ways, both)})"
            return dataclasses.replace(proof, seen=proof.seen + where)
    seen = _compared_gradients(both).seen + _unseen(both)
    if both.moved is None:
        return Proof(Title.GRADIENTS, True, seen)
    if dead := both.moved.without_gradient(or_a_layer=False):
        seen = f"nothing to compare at {few(dead)}: zero in both, and with all parameters moved"
        return Proof(Title.GRADIENTS, None, f"{seen}. Give parameters and a batch that make every layer work")
    return Proof(Title.GRADIENTS, True, f"{seen}; with all parameters moved {_compared_gradients(both.moved).seen}")


def _compared_gradients(both: BothWays) -> Proof:
    lost, off, judged, zero, rounding, not_finite = [], [], 0, 0, 0, 0
    largest = 0.0
    actual, expected = (jax.tree.leaves_with_path(way.results.gradients) for way in (both.rematerialised, both.plain))
    for i, ((path, got), (_, want)) in enumerate(zip(actual, expected, strict=True)):
        if want.dtype == jax.dtypes.float0:
            continue
        name, got, want = name_of(path), values_of(got), values_of(want)
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
        got.dtype == want.dtype and np.array_equal(values_of(got), values_of(want), equal_nan=True)
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
        pairs = [(values_of(got), values_of(want)) for got, want in known]
        error = sum(np.nansum(np.abs(got - want) ** 2) for got, want in pairs)
        size = sum(np.nansum(np.abs(want) ** 2) for _, want in pairs)
        if error > both.tolerance**2 * size:
            return False
    return True


def _precisions(both: BothWays) -> list[BothWays]:
    """Return both ways as they are, in float32 where 16 bits hide small terms, and moved where gradients are zero."""
    moved = () if both.moved is None else (both.moved, both.moved.in_float32)
    return [ways for ways in (both, both.in_float32, *moved) if ways is not None]


def _how_asked(ways: BothWays, both: BothWays) -> str:
    return "in float32" if ways is both.in_float32 else "with all parameters moved"


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
        values_of(jax.tree.leaves(getattr(way.results, part))[leaf]) for way in (both.rematerialised, both.plain)
    )

    def beyond_rounding(axes: int) -> list[_Difference]:
        error, size = norms(np.asarray(got - want), axes), norms(want, axes)
        off = ~(error <= tolerance * size)  # so written, a NaN is off
        if off.any():
            noise = norms(np.asarray(values_of(jax.tree.leaves(getattr(both.rounded, part))[leaf]) - want), axes)
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
