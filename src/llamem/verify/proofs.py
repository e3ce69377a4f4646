"""The proofs that make up `verify_remat`. Each takes `BothWays`; None where a program gives no occasion for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from llamem.memory.compiling import moved_to_host
from llamem.memory.hlo import aliased_arguments, optimised_text
from llamem.memory.jaxprs import CHOICES, DRAWS, equations, host_function
from llamem.memory.residuals import Residuals
from llamem.memory.show import size_text
from llamem.verify.both_ways import BothWays
from llamem.verify.closeness import TOLERANCE, DifferingRow, differing_rows
from llamem.verify.parameters import parameter_faults
from llamem.verify.placement import (
    find_checkpoints,
    large_results,
    layers_left_out,
    offloads,
    placements,
    stacks_left_out,
    without_products,
    work_again,
)
from llamem.verify.proof import Proof, Title


def checkpoints_are_there(both: BothWays) -> Proof:
    """A checkpoint reaches the traced program, and most layers of each kind; `seen` counts those left out."""
    there = len(list(find_checkpoints(both.traced.jaxpr)))
    extra = there - len(list(find_checkpoints(both.plain.jaxpr)))
    covered, left_out = layers_left_out(both.traced.jaxpr)
    forgotten = stacks_left_out(both.gradients[0].jaxpr, both.params) if extra > 0 else 0
    seen, cause = f"{there} of them with {both.remat!r}", ""
    if left_out > 1:  # one alone is the last of unrolled layers
        seen += f"; {covered} layers are under one, and {left_out} with the same products are not"
    if there and extra <= 0:
        seen += f", and {there - extra} with {both.baseline!r}"
        cause = "The layer is checkpointed whatever the flag says: there is no plain program to compare with."
    elif extra <= 0:
        reasons = ["The flag does not reach the layer: filtered by a caller, or the model is in eval mode."]
        cause = " ".join(reasons + placements(both.traced.jaxpr))
    elif left_out > covered or forgotten:
        seen += f"; {forgotten} layers of a stack have none" if forgotten else ""
        cause = "The flag reaches some of the layers only. If that is meant, skip this proof."
    return Proof(Title.CHECKPOINTS, not cause, seen, cause)


def options_are_sound(both: BothWays) -> Proof:
    """Policies name what is there, options do what they say, and nothing with a side effect runs twice."""
    wrong = both.option_faults
    return Proof(Title.OPTIONS, not wrong, " ".join(wrong) or "nothing odd")


def loss_is_the_same(both: BothWays) -> Proof:
    """The loss is that without, within the tolerance of its type and what rounding does to it."""
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
    """What the loss returns besides is that without: hidden states, statistics and counts updated once, choices."""
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
    """Every parameter has the gradient that it has without, each layer of it; one that is not zero is not zero here."""
    proofs = [_compared_gradients(way) for way in _ways(both)]
    wrong = next((proof for proof in proofs if not proof.holds), None)
    return wrong or dataclasses.replace(proofs[0], seen=proofs[0].seen + _unseen(both))


def _compared_gradients(both: BothWays) -> Proof:
    lost, off, judged, zero, not_finite = [], [], 0, 0, 0
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
        largest = max(largest, float(np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0)))
    counted = [f"{zero} zero in both"] * bool(zero) + [f"{not_finite} not finite even without"] * bool(not_finite)
    seen = ", ".join([f"largest difference {largest:.1e} in {judged} arrays", *counted])
    if lost:
        seen, cause = f"no gradient at {', '.join(lost[:3])}", "A stop_gradient, or weights closed over and not passed."
    elif off:
        seen = "; ".join(off[:3])
        cause = "A custom backward pass without the outer cotangent, or randomness that differs between the passes."
    else:
        return Proof(Title.GRADIENTS, True if judged and not not_finite else None, seen)
    return Proof(Title.GRADIENTS, False, seen, cause)


def layer_runs_again(both: BothWays) -> Proof:
    """The layer runs again in the backward pass: what JAX marked so in the traced gradient, and not without."""
    (products, values), (products_without, values_without) = (work_again(way.jaxpr) for way in both.gradients)
    products, values = products - products_without, values - values_without
    seen = f"{products:,} products and {values:,} values of other operations are computed again"
    holds = products > 0 or values > 0
    cause = "" if holds else "A policy that saves everything, or a checkpoint around what costs nothing."
    return Proof(Title.RUNS, holds, seen, cause)


def choices_are_the_same(both: BothWays) -> Proof | None:
    """Dropout masks, experts and what host functions answer are the same when the layer runs again."""
    inside = [eqn for one in find_checkpoints(both.traced.jaxpr) if not one.outer for eqn, _ in equations(one.body)]
    asked = [_answers_the_same(eqn) for eqn in inside if host_function(eqn) is not None]
    drawn = sum(eqn.primitive.name in DRAWS for eqn in inside)
    chosen = [eqn for eqn in inside if eqn.primitive.name in CHOICES]
    if not (asked or drawn or chosen):
        return None
    if False in asked:
        cause = "The layer asks the host for something that changes. Pass it as an input of the layer."
        return Proof(Title.CHOICES, False, "a function on the host answers the same question in two ways", cause)
    if None in asked:
        return Proof(Title.CHOICES, None, "a function on the host could not be asked twice, with zeros")
    coarse = {str(var.aval.dtype) for eqn in chosen for var in eqn.invars if hasattr(var.aval, "dtype")}
    if coarse & {"bfloat16", "float16"}:
        seen = f"{len(chosen)} choices among numbers of 16 bits are made again, and rounding may choose otherwise"
        return Proof(Title.CHOICES, None, f"{seen}. Choose in float32, or save what is chosen")
    counts = {"draws": drawn, "choices": len(chosen), "questions to the host": len(asked)}
    seen = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return Proof(Title.CHOICES, True, f"{seen}, of what enters the layer")


def compiler_leaves_them(both: BothWays) -> Proof:
    """The compiler has not merged the second computation with the first."""
    mine, plain = both.reports
    again = mine.matmul_flops - plain.matmul_flops
    if again <= 0:
        return Proof(Title.COMPILER, None, "no matrix product is computed again, and only those are counted")
    if mine.compiled_matmul_flops is None or plain.compiled_matmul_flops is None:
        return Proof(Title.COMPILER, None, f"products cannot be counted in the program for {mine.chip.name}")
    left = both.devices * (mine.compiled_matmul_flops - plain.compiled_matmul_flops)
    undone = left < 0.5 * again
    cause = (
        f"The program asked for them, and the compiler of {mine.chip.name} merged both computations: checkpoints "
        "outside a loop on a CPU, or prevent_cse=False. Scan over the layers, or judge on a TPU or GPU."
        if undone
        else ""
    )
    return Proof(Title.COMPILER, not undone, f"{left:,} FLOPs of {again:,} in the compiled program", cause)


def memory_falls(both: BothWays) -> Proof:
    """Residuals are fewer, and the chip's temporaries fall with them."""
    mine, plain = both.reports
    # Those of the parameters alone: what the batch needs is an argument anyway.
    kept, kept_without = both.residuals(both.remat), both.residuals(both.baseline)
    less = kept_without.bytes - kept.bytes
    fell = both.devices * (plain.parts["temporaries"] - mine.parts["temporaries"])
    seen = f"residuals less by {less:,} bytes, temporaries on {mine.chip.name} by {fell:,}"
    wrong = _kept_for_nothing(both, kept, kept_without)
    if less <= 0 or wrong:
        why = wrong or "The policy saves as much as no policy, or the checkpoint is around what costs nothing."
        return Proof(Title.MEMORY, False, seen, " ".join([*placements(both.traced.jaxpr), why]))
    # Compilers recompute cheap residuals by themselves, so that less falls than was kept.
    if fell > 0.1 * less:
        return Proof(Title.MEMORY, True, seen)
    if less < 2**20:
        seen += ": below 1 MiB a compiler's own workspace decides. Judge with larger shapes"
        return Proof(Title.MEMORY, None, seen)
    if why := placements(both.traced.jaxpr):
        return Proof(Title.MEMORY, False, seen, " ".join(why))
    seen += ": the peak lies elsewhere, or arrays so small live in on-chip memory. Judge with larger shapes"
    return Proof(Title.MEMORY, None, seen)


def _kept_for_nothing(both: BothWays, kept: Residuals, kept_without: Residuals) -> str:
    """Why far more is kept than has to be; "" where nothing is odd."""
    if kept_without.bytes - kept.bytes < 0.25 * kept_without.bytes and without_products(both.traced.jaxpr):
        largest = kept.rows[0]
        name = f"{largest.dtype}{list(largest.shape)} of {largest.operation} in {largest.source}"
        return f"The checkpoint is not where the memory is: {name} is kept still, for instance."
    without = {row.shape[1:] for row in kept_without.rows}
    for row in kept.rows:
        if len(row.shape) > 2 and row.shape[0] == row.shape[1] > 1 and row.shape[1:] not in without:
            return f"The loop carries an array with an entry for each turn, and each turn keeps all: {list(row.shape)}."
    if handed_out := large_results(both.traced.jaxpr):
        return f"What leaves a checkpoint is kept: its layers hand out {size_text(handed_out)} beside their result."
    return ""


def offloaded_bytes_arrive(both: BothWays) -> Proof | None:
    """What a policy offloads lies in the host's memory in the compiled program, and is read back where it was written.

    The second by the text of a GPU's program, whose notes on slices are compared with their indices.
    """
    asked = moved_to_host(both.gradients[0].jaxpr)
    if not asked and not offloads(both.traced.jaxpr):
        return None
    mine, _ = both.reports
    seen = f"{asked:,} bytes offloaded, {mine.host_bytes:,} on the host of {mine.chip.name}"
    if wrong := [warning for warning in mine.warnings if warning.startswith("WRONG NUMBERS")]:
        return Proof(Title.OFFLOAD, False, seen, " ".join(wrong))
    if asked and mine.chip.platform == "cpu":
        return Proof(Title.OFFLOAD, None, f"{seen}: a CPU's memory is the host's", "")
    arrived = asked > 0 and mine.host_bytes >= 0.9 * asked / both.devices
    cause = ""
    if not arrived:
        cause = (
            "The compiler kept them on the device. Offload what enters the layer, named inside it."
            if asked
            else "The program does not ask for the host: a name that nobody gives, or a place other than 'pinned_host'."
        )
    return Proof(Title.OFFLOAD, arrived, seen, cause)


def randomness_is_fresh(both: BothWays) -> Proof:
    """Every draw has a key of its own, fed by the step's key and by the number or inputs of the layer it is in."""
    keys = both.keys
    if wrong := keys.faults():
        return Proof(Title.RANDOMNESS, False, " ".join(wrong))
    if keys.hidden:
        return Proof(Title.RANDOMNESS, None, f"{keys.hidden} draws are where their keys cannot be followed")
    seen = f"{len(keys.draws)} draws in the program, each with a key of its own" if keys.draws else "nothing is drawn"
    return Proof(Title.RANDOMNESS, True, seen)


def parameters_are_sound(both: BothWays) -> Proof:
    """Stacked layers differ from one another, and no weight that is trained is there twice."""
    wrong = parameter_faults(both.params, lambda: both.expected[2])
    return Proof(Title.PARAMETERS, not wrong, " ".join(wrong) or "layers differ, nothing is double")


def evaluation_is_untouched(both: BothWays) -> Proof | None:
    """`evaluate(params, batch, how)` has no checkpoint, and returns the same arrays, a KV cache included."""
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


def donation_is_used(both: BothWays) -> Proof | None:
    """Each argument that the training step donates shares its memory with a result, in the compiled program."""
    if both.step is None:
        return None
    donated = [leaf for leaf in jax.tree.leaves(both.step.args_info) if leaf.donated]
    given_up = [shape.sizes for shape in aliased_arguments(optimised_text(both.step.compile()))]
    seen = f"{len(given_up)} of {len(donated)} arrays"
    if donated and len(given_up) >= len(donated):
        return Proof(Title.DONATION, True, seen)
    left = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in donated if tuple(leaf.shape) not in given_up]
    cause = (
        f"No result takes the memory of {', '.join(left[:3]) or 'the others'}: return the new value of each donated "
        "argument, in its shape, type and sharding."
        if donated
        else "The step was lowered without donate_argnums."
    )
    return Proof(Title.DONATION, False, seen, cause)


PROOFS: dict[Title, Callable[[BothWays], Proof | None]] = {
    Title.CHECKPOINTS: checkpoints_are_there,
    Title.OPTIONS: options_are_sound,
    Title.LOSS: loss_is_the_same,
    Title.RESULTS: results_are_the_same,
    Title.GRADIENTS: gradients_are_the_same,
    Title.RUNS: layer_runs_again,
    Title.CHOICES: choices_are_the_same,
    Title.COMPILER: compiler_leaves_them,
    Title.MEMORY: memory_falls,
    Title.OFFLOAD: offloaded_bytes_arrive,
    Title.RANDOMNESS: randomness_is_fresh,
    Title.PARAMETERS: parameters_are_sound,
    Title.EVALUATION: evaluation_is_untouched,
    Title.DONATION: donation_is_used,
}


def _ways(both: BothWays) -> list[BothWays]:
    """As it is, and in float32 where 16 bits hide small terms."""
    return [both, both.in_float32] if both.in_float32 is not None else [both]


def _unseen(both: BothWays) -> str:
    """What a comparison could not see, in words."""
    if both.in_float32 is not None:
        return f" (in float32, too: {TOLERANCE['float32']:.0e} would be seen)"
    coarse = TOLERANCE[both.coarsest] > TOLERANCE["float32"]
    return f" (what is below {TOLERANCE[both.coarsest]:.0e} of it is not seen in {both.coarsest})" if coarse else ""


def _answers_the_same(eqn: jex_core.JaxprEqn) -> bool | None:
    """Whether a function on the host answers twice alike, asked with zeros; None where it cannot be asked so."""
    ask: Any = host_function(eqn)
    try:
        first, second = (
            ask(*(np.zeros(var.aval.shape, var.aval.dtype) for var in eqn.invars))  # pyrefly: ignore[missing-attribute]
            for _ in range(2)
        )
        return all(
            np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True) for a, b in zip(first, second, strict=True)
        )
    except Exception:  # what users' functions raise is theirs
        return None


def _identical(got: Any, want: Any) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return bool(np.array_equal(_values(got), _values(want), equal_nan=True))


def _values(array: Any) -> np.ndarray:
    """On the host, wide enough to compare: keys as the numbers they are made of."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array, np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)


def _leaf_moved(both: BothWays, part: int, i: int) -> Callable[[], np.ndarray]:
    """Leaf `i` of the results (part 1) or gradients (2) of the run whose inputs were moved by rounding."""
    return lambda: _values(jax.tree.leaves(both.rounded[part])[i])


def _difference(row: DifferingRow) -> str:
    return f"by {row.error:.1e} of {row.size:.3g}" if row.size else f"is {row.error:.1e}, and zero without"
