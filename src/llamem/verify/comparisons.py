"""Proofs that compare what both ways compute: loss, other results, gradients, and the model at evaluation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem.verify.both_ways import BothWays
from llamem.verify.closeness import TOLERANCE, DifferingRow, differing_rows
from llamem.verify.placement import find_checkpoints
from llamem.verify.proof import Proof, Title


def loss_is_the_same(both: BothWays) -> Proof:
    """Check that the loss is that without, within the tolerance of its type and what rounding does to it."""
    found, expected = (float(_values(way[0])) for way in (both.found, both.expected))
    seen = f"{found:.6g} and {expected:.6g}"
    if not np.isfinite(expected):
        return Proof(Title.LOSS, None, f"{seen}: without rematerialisation it is not finite either")
    for way in _ways(both):
        got, want = (_values(result[0]) for result in (way.found, way.expected))
        if differing_rows(got, want, way.tolerance, lambda way=way: _values(way.rounded[0])):
            where = "" if way is both else f"; in float32 {float(got):.8g} and {float(want):.8g}"
            cause = "Dropout drawn anew, a term left out, state updated twice, or another computation altogether."
            return Proof(Title.LOSS, False, seen + where, cause)
    return Proof(Title.LOSS, True, seen + _unseen(both))


def results_are_the_same(both: BothWays) -> Proof | None:
    """Check that what the loss returns besides is that without: hidden states, statistics updated once, choices."""
    if not both.has_aux:
        return None
    found, expected = (jax.tree.leaves_with_path(way[1]) for way in (both.found, both.expected))
    if [path for path, _ in found] != [path for path, _ in expected]:
        seen = f"{len(found)} arrays instead of {len(expected)}"
        return Proof(Title.RESULTS, False, seen, "A result is lost on its way through the checkpoint.")
    off = []
    for i, ((path, got), (_, want)) in enumerate(zip(found, expected, strict=True)):
        name = jax.tree_util.keystr(path)
        if got.shape != want.shape or got.dtype != want.dtype:
            off.append(f"{name} is {got.dtype}{got.shape}, not {want.dtype}{want.shape}")
            continue
        # Integers are equal or not, and so is what chose them; only rounding excuses another choice.
        tolerance = both.tolerance if jnp.issubdtype(want.dtype, jnp.inexact) else 0.0
        if differing_rows(_values(got), _values(want), tolerance, _leaf_moved(both, 1, i)):
            off.append(name)
    cause = (
        "State that a layer changes (batch statistics, counts of draws) was lost in the checkpoint or updated twice: "
        "return it from the layer (has_aux=True), or use nnx.remat."
    )
    seen = f"different: {', '.join(off[:3])}" if off else f"{len(found)} arrays"
    return Proof(Title.RESULTS, not off, seen, cause if off else "")


def gradients_are_the_same(both: BothWays) -> Proof:
    """Check that every parameter's gradient, each layer of it, is that without; one that is not zero stays so."""
    proofs = [_compared_gradients(way) for way in _ways(both)]
    wrong = next((proof for proof in proofs if not proof.holds), None)
    return wrong or dataclasses.replace(proofs[0], seen=proofs[0].seen + _unseen(both))


def _compared_gradients(both: BothWays) -> Proof:
    lost, off, judged, zero, rounding, not_finite = [], [], 0, 0, 0, 0
    largest = 0.0
    found, expected = (jax.tree.leaves_with_path(way[2]) for way in (both.found, both.expected))
    for i, ((path, got), (_, want)) in enumerate(zip(found, expected, strict=True)):
        if want.dtype == jax.dtypes.float0:
            continue
        name, got, want = jax.tree_util.keystr(path), _values(got), _values(want)
        if not np.isfinite(want).all():
            not_finite += 1
            continue
        judged += 1
        zero += not want.any()
        rows = differing_rows(got, want, both.tolerance, _leaf_moved(both, 2, i))
        lost += [f"{name}{row.index}" for row in rows if row.size and not got[row.place].any()]
        off += [f"{name}{row.index} {_difference(row)}" for row in rows if not row.size or got[row.place].any()]
        difference = float(np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0))
        if difference > both.tolerance and not rows:  # zero in truth, as a bias of the keys before a softmax
            rounding += 1
        else:
            largest = max(largest, difference)
    counted = [f"{zero} zero in both"] * bool(zero) + [f"{rounding} nothing but rounding in both"] * bool(rounding)
    counted += [f"{not_finite} not finite even without"] * bool(not_finite)
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
    if both.evaluate is None:
        return None
    evaluate = both.evaluate
    ways = [lambda p, b, how=how: evaluate(p, b, how) for how in (both.remat, both.baseline)]
    traces = [jax.jit(way).trace(both.params, both.batch) for way in ways]
    there = [len(list(find_checkpoints(traced.jaxpr.jaxpr))) for traced in traces]
    if any(there):
        cause = (
            "The model stays in training mode, or the layer checkpoints whatever the mode: no gradient is taken here."
        )
        return Proof(Title.EVALUATION, False, f"checkpoints in it: {there[0]}, without {there[1]}", cause)
    found, expected = (jax.tree.leaves(traced.lower().compile()(both.params, both.batch)) for traced in traces)
    same = len(found) == len(expected) and all(map(_identical, found, expected))
    cause = "" if same else "A cache or a keyword argument got lost on the way through the checkpoint."
    return Proof(
        Title.EVALUATION, same, f"no checkpoint, {len(found)} arrays {'as' if same else 'not as'} without", cause
    )


def _ways(both: BothWays) -> list[BothWays]:
    """Return them as they are, and in float32 where 16 bits hide small terms."""
    return [both, both.in_float32] if both.in_float32 is not None else [both]


def _unseen(both: BothWays) -> str:
    """Return what a comparison could not see, in words."""
    if both.in_float32 is not None:
        return f" (in float32, too: {TOLERANCE['float32']:.0e} would be seen)"
    coarse = TOLERANCE[both.coarsest] > TOLERANCE["float32"]
    return f" (what is below {TOLERANCE[both.coarsest]:.0e} of it is not seen in {both.coarsest})" if coarse else ""


def _identical(got: Any, want: Any) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return bool(np.array_equal(_values(got), _values(want), equal_nan=True))


def _values(array: Any) -> np.ndarray:
    """Return a leaf on the host, wide enough to compare: keys as the numbers they are made of."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array, np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)


def _leaf_moved(both: BothWays, part: int, i: int) -> Callable[[], np.ndarray]:
    """Return leaf `i` of the results (part 1) or gradients (2) of the run whose inputs were moved by rounding."""
    return lambda: _values(jax.tree.leaves(both.rounded[part])[i])


def _difference(row: DifferingRow) -> str:
    return f"by {row.error:.1e} of {row.size:.3g}" if row.size else f"is {row.error:.1e}, and zero without"
