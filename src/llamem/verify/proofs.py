"""The proofs that make up `verify_remat`. Each takes `BothWays` and can be used alone, in a test for instance."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from llamem.memory.compiling import matmul_flops, moved_to_host
from llamem.memory.jaxprs import equations
from llamem.memory.residuals import saved_residuals
from llamem.verify.case import BothWays, Proof
from llamem.verify.keys import key_faults
from llamem.verify.placement import find_checkpoints, offloads, placements

_FUNCTIONS = {"tanh", "sin", "cos", "exp", "log", "logistic", "erf", "rsqrt", "sqrt", "max", "integer_pow", "div"}


def checkpoints_are_there(both: BothWays) -> Proof:
    """A checkpoint reaches the traced program."""
    there = len(list(find_checkpoints(both.traced.jaxpr)))
    extra = there - len(list(find_checkpoints(both.plain.jaxpr)))
    cause = ""
    if extra <= 0:
        reasons = ["The flag does not reach the layer: filtered by a caller, or the model is in eval mode."]
        cause = " ".join(reasons + placements(both.traced.jaxpr))
    return Proof("checkpoints reach the program", extra > 0, f"{there} of them with {both.with_!r}", cause)


def options_are_sound(both: BothWays) -> Proof:
    """Policies name what is there, options do what they say, and nothing with a side effect runs twice."""
    wrong = both.faults
    return Proof("policies and options mean what they say", not wrong, _first(wrong, "nothing odd"))


def loss_is_the_same(both: BothWays) -> Proof:
    """The loss is that without, within the tolerance of its type."""
    found, expected = float(both.found[0]), float(both.expected[0])
    close = abs(found - expected) <= both.tolerance * abs(expected) + 1e-30
    cause = "" if close else "Dropout drawn anew, state updated twice, or another computation altogether."
    return Proof("the loss is the same", bool(close), f"{found:.6g} and {expected:.6g}", cause)


def results_are_the_same(both: BothWays) -> Proof | None:
    """What the loss returns besides is that without: hidden states, statistics and counts updated once, choices."""
    if not both.has_aux:
        return None
    name, tolerance = "all other results are the same", both.tolerance
    found, expected = (jax.tree.leaves_with_path(way[1]) for way in (both.found, both.expected))
    if [path for path, _ in found] != [path for path, _ in expected]:
        seen = f"{len(found)} arrays instead of {len(expected)}"
        return Proof(name, False, seen, "A result is lost on its way through the checkpoint.")
    off = []
    for (path, got), (_, want) in zip(found, expected, strict=True):
        if got.shape != want.shape or got.dtype != want.dtype:
            off.append(f"{jax.tree_util.keystr(path)} is {got.dtype}{got.shape}, not {want.dtype}{want.shape}")
        elif not _alike(got, want, tolerance):
            off.append(jax.tree_util.keystr(path))
    cause = (
        "State that a layer changes (batch statistics, counts of draws) was lost in the checkpoint or updated twice: "
        "return it from the layer (has_aux=True), or use nnx.remat."
    )
    seen = f"different: {', '.join(off[:3])}" if off else f"{len(found)} arrays"
    return Proof(name, not off, seen, cause if off else "")


def gradients_are_the_same(both: BothWays) -> Proof:
    """Every parameter has the gradient that it has without; one that is not zero there is not zero here."""
    tolerance = both.tolerance
    lost, off, zero, worst = [], [], [], 0.0
    wanted = jax.tree.leaves_with_path(both.expected[2])
    for (path, want), got in zip(wanted, jax.tree.leaves(both.found[2]), strict=True):
        if want.dtype == jax.dtypes.float0:
            continue
        name = jax.tree_util.keystr(path)
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        size = np.linalg.norm(want)
        if not size:  # an expert without a token, a layer that is not used
            zero.append(name)
            if np.linalg.norm(got):
                off.append(f"{name}, which has none without")
            continue
        lost += [f"{name}{row}" for row in _lost_rows(got, want)]
        error = np.linalg.norm(got - want) / size
        worst = max(worst, error)
        if not error <= tolerance:
            off.append(f"{name} by {error:.1e}, norms {np.linalg.norm(got):.3g} and {size:.3g}")
    seen = f"largest difference {worst:.1e}" + (f", {len(zero)} zero in both" if zero else "")
    cause = ""
    if lost:
        seen, cause = f"no gradient at {', '.join(lost[:3])}", "A stop_gradient, or weights closed over and not passed."
    elif off:
        seen = f"{'; '.join(off[:3])}"
        cause = "A custom backward pass without the outer cotangent, or randomness that differs between the passes."
    return Proof("every gradient is the same", not (lost or off), seen, cause)


def layer_runs_again(both: BothWays) -> Proof:
    """The layer runs again in the backward pass: executions counted at run time, operations in the traced program."""
    runs, (mine, plain) = both.runs, both.gradients
    products, functions = (count(mine.jaxpr) - count(plain.jaxpr) for count in (matmul_flops, _elements))
    more = products > 0 or functions > 0
    # Inside a while loop or a shard_map executions are not seen, so that the program alone must do.
    unseen = not runs.forward and more
    seen = (
        f"{runs.forward} runs of checkpointed functions, {runs.again} again; {products:,} more FLOPs of "
        f"products, {functions:,} more elements of functions"
    )
    holds = more and (unseen or runs.again > 0)
    cause = "" if holds else "A policy that saves everything, or a checkpoint around what costs nothing."
    return Proof("the layer runs again in the backward pass", holds, seen, cause)


def choices_are_the_same(both: BothWays) -> Proof | None:
    """Dropout masks, experts and what host functions answer are the same when the layer runs again."""
    runs = both.runs
    if not runs.choices:
        return None
    seen = f"{runs.choices} draws and choices made again, {f'others by {runs.changed}' if runs.changed else 'the same'}"
    cause = "The layer asks the host, or state, for something that changes. Pass it as an input of the layer."
    return Proof("it draws and chooses the same again", not runs.changed, seen, cause if runs.changed else "")


def compiler_leaves_them(both: BothWays) -> Proof:
    """The compiler has not merged the second computation with the first."""
    mine, plain = both.reports
    again, left = mine.matmul_flops - plain.matmul_flops, None
    if mine.compiled_matmul_flops is not None and plain.compiled_matmul_flops is not None:
        left = both.devices * (mine.compiled_matmul_flops - plain.compiled_matmul_flops)
    undone = left is not None and again > 0 and left < 0.5 * again
    seen = "not counted in this compiler's program" if left is None else f"{left:,} of them in the compiled program"
    cause = (
        f"The program asked for them, and the compiler of {mine.target.name} merged both computations: checkpoints "
        "outside a loop on a CPU, or prevent_cse=False. Scan over the layers, or judge on a TPU or GPU."
        if undone
        else ""
    )
    return Proof("the compiler leaves them", None if left is None or again <= 0 else not undone, seen, cause)


def memory_falls(both: BothWays) -> Proof:
    """Residuals are fewer, and the target's temporaries fall with them."""

    def kept(how: Any) -> int:
        def loss(params: Any) -> Any:
            value = both.loss_fn(params, both.batch, how)
            return value[0] if both.has_aux else value

        # Those of the parameters alone: what the batch needs is an argument anyway.
        return saved_residuals(loss, both.params).bytes

    mine, plain = both.reports
    less = kept(both.without) - kept(both.with_)
    fell = both.devices * (plain.parts["temporaries"] - mine.parts["temporaries"])
    # Compilers recompute cheap residuals by themselves, so that less falls than was kept.
    holds = less > 0 and fell > 0.1 * less
    if 0 < less < 2**20 and not holds:
        holds = None  # so small that a compiler's own workspace covers it
    seen = f"residuals less by {less:,} bytes, temporaries on {mine.target.name} by {fell:,}"
    cause = ""
    if holds is False:
        places = " ".join(placements(both.traced.jaxpr))
        cause = places or "The policy saves as much as no policy, or what it drops is not at the peak."
    return Proof("memory falls", holds, seen, cause)


def offloaded_bytes_arrive(both: BothWays) -> Proof | None:
    """What a policy offloads lies in the host's memory in the target's compiled program."""
    asked = moved_to_host(both.gradients[0].jaxpr)
    if not asked and not offloads(both.traced.jaxpr):
        return None
    mine, _ = both.reports
    seen = f"{asked:,} bytes offloaded, {mine.host_bytes:,} on the host of {mine.target.name}"
    if asked and mine.target.platform == "cpu":
        return Proof("offloaded bytes arrive on the host", None, f"{seen}: a CPU's memory is the host's", "")
    arrived = asked > 0 and mine.host_bytes >= 0.9 * asked / both.devices
    cause = ""
    if not arrived:
        cause = (
            "The compiler kept them on the device. Offload what enters the layer, named inside it."
            if asked
            else "The program does not ask for the host: a name that nobody gives, or a place other than 'pinned_host'."
        )
    return Proof("offloaded bytes arrive on the host", arrived, seen, cause)


def randomness_is_fresh(both: BothWays) -> Proof:
    """Random numbers differ from step to step and from layer to layer."""
    wrong = key_faults(both.traced)
    return Proof("random numbers are fresh", not wrong, _first(wrong, "no key used twice"))


def parameters_are_sound(both: BothWays) -> Proof:
    """Stacked layers differ from one another, and no weight is there twice."""
    wrong = list(_parameter_faults(both.params))
    return Proof("parameters are what they seem", not wrong, _first(wrong, "layers differ, nothing is double"))


def evaluation_is_untouched(both: BothWays) -> Proof | None:
    """`evaluate(params, batch, how)` has no checkpoint, and returns the same arrays, a KV cache included."""
    if both.evaluate is None:
        return None
    name, evaluate = "evaluation is untouched", both.evaluate
    ways = [lambda p, b, how=how: evaluate(p, b, how) for how in (both.with_, both.without)]
    traced, plain = (jax.make_jaxpr(way)(both.params, both.batch) for way in ways)
    there = len(list(find_checkpoints(traced.jaxpr))) - len(list(find_checkpoints(plain.jaxpr)))
    if there > 0:
        cause = (
            "The model stays in training mode, or the layer checkpoints whatever the mode: no gradient is taken here."
        )
        return Proof(name, False, f"checkpoints in it: {there}", cause)
    found, expected = (jax.tree.leaves(jax.jit(way)(both.params, both.batch)) for way in ways)
    same = len(found) == len(expected) and all(map(lambda a, b: _alike(a, b, 0.0), found, expected))
    cause = "" if same else "A cache or a keyword argument got lost on the way through the checkpoint."
    return Proof(name, same, f"no checkpoint, {len(found)} arrays {'as' if same else 'not as'} without", cause)


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


def _first(faults: list[str], otherwise: str) -> str:
    return " ".join(faults) if faults else otherwise


def _alike(got: Any, want: Any, tolerance: float) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if not jnp.issubdtype(got.dtype, jnp.inexact):
        return bool(jnp.array_equal(got, want))
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return bool(np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want))


def _lost_rows(got: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """Where a gradient is zero and should not be: everywhere, or in some layers (or experts) of a stacked array."""
    if not got.any():
        yield ""
    elif got.ndim > 2:
        for i in range(len(got)):
            if want[i].any() and not got[i].any():
                yield f"[{i}]"


def _elements(jaxpr: jex_core.Jaxpr) -> int:
    """How many values of functions a program computes, loops multiplied out: what runs again without any product."""
    return sum(
        times * eqn.outvars[0].aval.size  # pyrefly: ignore[missing-attribute]
        for eqn, times in equations(jaxpr)
        if eqn.primitive.name in _FUNCTIONS
    )


def _parameter_faults(params: Any) -> Iterator[str]:
    alike, double = [], []
    large: dict[Any, str] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        if not hasattr(leaf, "ndim") or leaf.ndim < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        name, values = jax.tree_util.keystr(path), np.asarray(leaf)
        if not np.ptp(values):
            continue  # zeros and ones may well be alike
        if leaf.ndim > 2 and len(values) > 1 and (values == values[:1]).all():
            alike.append(name)
        same = values.shape, values.tobytes()
        if same in large:
            double.append(f"{name} and {large[same]}")
        large[same] = name
    if alike:
        yield (
            f"all layers are identical in {', '.join(alike)}: made by a vmap that did not split the key "
            "(nnx.split_rngs), they begin as one layer."
        )
    if double:
        yield f"equal: {', '.join(double)}. A tied weight was split in two, and each gets half of the gradient."
