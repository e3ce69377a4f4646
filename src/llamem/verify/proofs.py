"""The proofs that make up `verify_remat`. Each takes `BothWays` and can be used alone, in a test for instance."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from llamem.memory.compiling import matmul_flops, moved_to_host
from llamem.memory.jaxprs import CHOICES, DRAWS, FUNCTIONS, equations
from llamem.memory.residuals import saved_residuals
from llamem.verify.case import BothWays, Proof, Title
from llamem.verify.closeness import Row, differing_rows
from llamem.verify.parameters import parameter_faults
from llamem.verify.placement import find_checkpoints, layers_left_out, offloads, placements
from llamem.verify.randomness import draw_faults


def checkpoints_are_there(both: BothWays) -> Proof:
    """A checkpoint reaches the traced program, and most of the layers that are alike; `seen` counts those left out."""
    there = len(list(find_checkpoints(both.traced.jaxpr)))
    extra = there - len(list(find_checkpoints(both.plain.jaxpr)))
    covered, left_out = layers_left_out(both.traced.jaxpr)
    seen, cause = f"{there} of them with {both.remat!r}", ""
    if left_out > 1:  # one alone is the last of unrolled layers
        seen += f"; {covered} layers are under one, and {left_out} with the same products are not"
    if there and extra <= 0:
        seen += f", and {there - extra} with {both.baseline!r}"
        cause = "The layer is checkpointed whatever the flag says: there is no plain program to compare with."
    elif extra <= 0:
        reasons = ["The flag does not reach the layer: filtered by a caller, or the model is in eval mode."]
        cause = " ".join(reasons + placements(both.traced.jaxpr))
    elif left_out > covered:
        cause = "The flag reaches some of the layers only. If that is meant, waive it."
    return Proof(Title.CHECKPOINTS, not cause, seen, cause)


def options_are_sound(both: BothWays) -> Proof:
    """Policies name what is there, options do what they say, and nothing with a side effect runs twice."""
    wrong = both.faults
    return Proof(Title.OPTIONS, not wrong, " ".join(wrong) or "nothing odd")


def loss_is_the_same(both: BothWays) -> Proof:
    """The loss is that without, within the tolerance of its type and what rounding does to it."""
    found, expected = (_values(way[0]) for way in (both.found, both.expected))
    seen = f"{float(found):.6g} and {float(expected):.6g}"
    if not np.isfinite(expected).all():
        return Proof(Title.LOSS, None, f"{seen}: without rematerialisation it is not finite either", "")
    off = differing_rows(found, expected, both.tolerance, lambda: [_values(way[0]) for way in both.rounded])
    cause = "Dropout drawn anew, state updated twice, or another computation altogether." if off else ""
    return Proof(Title.LOSS, not off, seen, cause)


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
        if differing_rows(_values(got), _values(want), tolerance, _leaf_of_each(both, 1, i)):
            off.append(name)
    cause = (
        "State that a layer changes (batch statistics, counts of draws) was lost in the checkpoint or updated twice: "
        "return it from the layer (has_aux=True), or use nnx.remat."
    )
    seen = f"different: {', '.join(off[:3])}" if off else f"{len(found)} arrays"
    return Proof(Title.RESULTS, not off, seen, cause if off else "")


def gradients_are_the_same(both: BothWays) -> Proof:
    """Every parameter has the gradient that it has without, each layer of it; one that is not zero is not zero here."""
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
        rows = differing_rows(got, want, both.tolerance, _leaf_of_each(both, 2, i))
        lost += [f"{name}{row.index}" for row in rows if row.size and not _at(got, row).any()]
        off += [f"{name}{row.index} {_difference(row)}" for row in rows if not row.size or _at(got, row).any()]
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
    """The layer runs again in the backward pass: executions counted at run time, operations in the traced program."""
    runs, (mine, plain) = both.runs, both.gradients
    products, functions = (count(mine.jaxpr) - count(plain.jaxpr) for count in (matmul_flops, _evaluations))
    more = products > 0 or functions > 0
    seen = (
        f"{runs.forward} runs of checkpointed functions, {runs.again} again; {products:,} more FLOPs of "
        f"products, {functions:,} more evaluations of functions"
    )
    if more and not runs.forward:
        return Proof(
            Title.RUNS,
            None,
            f"{seen}. Not one run was seen: a branch inside a shard_map, or a Pallas kernel, hides them",
        )
    holds = more and runs.again > 0
    cause = "" if holds else "A policy that saves everything, or a checkpoint around what costs nothing."
    return Proof(Title.RUNS, holds, seen, cause)


def choices_are_the_same(both: BothWays) -> Proof | None:
    """Dropout masks, experts and what host functions answer are the same when the layer runs again."""
    runs = both.runs
    if not runs.choices:
        hidden = both.replay.unseen(CHOICES)
        seen = f"{hidden} draws and choices are inside a shard_map, where they are not seen"
        return Proof(Title.CHOICES, None, seen) if hidden else None
    seen = f"{runs.choices} draws and choices made again, {f'others by {runs.changed}' if runs.changed else 'the same'}"
    cause = "The layer asks the host, or state, for something that changes. Pass it as an input of the layer."
    return Proof(Title.CHOICES, not runs.changed, seen, cause if runs.changed else "")


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

    def kept(how: Any) -> int:
        def loss(params: Any) -> Any:
            value = both.loss_fn(params, both.batch, how)
            return value[0] if both.has_aux else value

        # Those of the parameters alone: what the batch needs is an argument anyway.
        return saved_residuals(loss, both.params).bytes

    mine, plain = both.reports
    less = kept(both.baseline) - kept(both.remat)
    fell = both.devices * (plain.parts["temporaries"] - mine.parts["temporaries"])
    # Compilers recompute cheap residuals by themselves, so that less falls than was kept.
    holds = less > 0 and fell > 0.1 * less
    seen = f"residuals less by {less:,} bytes, temporaries on {mine.chip.name} by {fell:,}"
    if 0 < less < 2**20 and not holds:
        return Proof(
            Title.MEMORY, None, f"{seen}: below 1 MiB a compiler's own workspace decides. Judge with larger shapes"
        )
    cause = ""
    if not holds:
        places = " ".join(placements(both.traced.jaxpr))
        cause = places or "The policy saves as much as no policy, or what it drops is not at the peak."
    return Proof(Title.MEMORY, holds, seen, cause)


def offloaded_bytes_arrive(both: BothWays) -> Proof | None:
    """What a policy offloads lies in the host's memory in the chip's compiled program."""
    asked = moved_to_host(both.gradients[0].jaxpr)
    if not asked and not offloads(both.traced.jaxpr):
        return None
    mine, _ = both.reports
    seen = f"{asked:,} bytes offloaded, {mine.host_bytes:,} on the host of {mine.chip.name}"
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
    """The random numbers that the loss drew, here and in another step, differ from step to step and layer to layer."""
    this_step, other_step = both.draws
    if wrong := draw_faults(this_step, other_step):
        return Proof(Title.RANDOMNESS, False, " ".join(wrong))
    if hidden := both.replay.unseen(DRAWS):
        return Proof(Title.RANDOMNESS, None, f"{hidden} draws are inside a shard_map, where they are not seen")
    if idle := both.replay.places(DRAWS) - {draw.place for draw in this_step}:
        return Proof(Title.RANDOMNESS, None, f"{len(idle)} draws did not run with this batch: in a branch not taken")
    return Proof(Title.RANDOMNESS, True, f"{len(this_step)} draws, none twice" if this_step else "nothing is drawn")


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


PROOFS: tuple[Callable[[BothWays], Proof | None], ...] = (
    checkpoints_are_there,
    options_are_sound,
    loss_is_the_same,
    results_are_the_same,
    gradients_are_the_same,
    layer_runs_again,
    choices_are_the_same,
    compiler_leaves_them,
    memory_falls,
    offloaded_bytes_arrive,
    randomness_is_fresh,
    parameters_are_sound,
    evaluation_is_untouched,
)


def _identical(got: Any, want: Any) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return bool(np.array_equal(_values(got), _values(want), equal_nan=True))


def _values(array: Any) -> np.ndarray:
    """On the host, wide enough to compare: keys as the numbers they are made of."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array, np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)


def _leaf_of_each(both: BothWays, part: int, i: int) -> Callable[[], list[np.ndarray]]:
    """Leaf `i` of the results (part 1) or gradients (2) of the runs whose inputs were moved by rounding."""
    return lambda: [_values(jax.tree.leaves(way[part])[i]) for way in both.rounded]


def _at(values: np.ndarray, row: Row) -> np.ndarray:
    return values[row.place]


def _difference(row: Row) -> str:
    return f"by {row.error:.1e} of {row.size:.3g}" if row.size else f"is {row.error:.1e}, and zero without"


def _evaluations(jaxpr: jex_core.Jaxpr) -> int:
    """How many values of functions a program computes, loops multiplied out: what runs again without any product."""
    return sum(
        times * eqn.outvars[0].aval.size  # pyrefly: ignore[missing-attribute]
        for eqn, times in equations(jaxpr)
        if eqn.primitive.name in FUNCTIONS
    )
