"""The proofs that make up `verify_remat`. Each takes `BothWays`; None where a program gives no occasion for it.

Among them are parameters that are not what they seem: stacked layers that begin as one, tied weights that were split.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jaxmem.common.checks import few
from jaxmem.common.printing import size_text
from jaxmem.compiling import moved_to_host
from jaxmem.reading.hlo import aliased_arguments, optimised_text
from jaxmem.tracing.flops import matmul_flops_again
from jaxmem.tracing.jaxprs import CHOICES, DRAWS, Scan, control_flow, equations, host_function, policy_arguments
from jaxmem.verify.both_ways import BothWays, dtype_of
from jaxmem.verify.checkpoints import (
    large_results,
    layers_left_out,
    operations,
    option_faults,
    placements,
    products_of,
    stacks_left_out,
    work_again,
)
from jaxmem.verify.comparisons import (
    Proof,
    Title,
    evaluation_is_untouched,
    gradients_are_the_same,
    loss_is_the_same,
    results_are_the_same,
)
from jaxmem.verify.random_keys import Keys

_IDENTICAL = (
    "layers are identical in {names}: made by a vmap that did not split the key (nnx.split_rngs), or copied, they "
    "begin as one layer."
)
_SOME_IDENTICAL = (
    "cannot tell: some rows are identical in {names}. So they should be where layers were copied to make a model "
    "deeper, or experts made of one; after a vmap that did not split the key (nnx.split_rngs) they should not."
)
_SPLIT = "equal: {names}. A tied weight was split in two, and each gets half of the gradient."


def parameter_faults(params: Any, gradients: Callable[[], Any], program: jex_core.Jaxpr) -> tuple[list[str], list[str]]:
    """Return what is wrong with parameters, and what may be meant so, in words.

    `gradients` makes theirs, where two leaves are equal; `program` is the traced loss, which tells what its layers are.
    Only what looks random is judged: zeros, ones, identities and tables may well be alike. Of two equal leaves both
    must have a gradient: a frozen copy, such as a target network that starts as the model, is no fault. Layers that
    are all identical are a fault; some of them, or the experts of a layer, may have been copied on purpose.
    """
    identical, some, split = [], [], []
    taken_row_by_row = _stacks_in(program)
    equal: dict[tuple[Any, bytes], list[tuple[str, int]]] = defaultdict(list)
    in_lists: Counter[str] = Counter()
    for place, (path, leaf) in enumerate(jax.tree.leaves_with_path(params)):
        if np.ndim(leaf) < 2 or not jnp.issubdtype(dtype_of(leaf), jnp.floating):
            continue
        name, values = jax.tree_util.keystr(path), np.asarray(leaf)
        rows = Counter(row.tobytes() for row in values if values.ndim > 2 and _looks_random(row))
        if twins := sum(times for times in rows.values() if times > 1):
            all_layers = rows.most_common(1)[0][1] == len(values) and values.shape in taken_row_by_row
            (identical if all_layers else some).append(f"{name} ({twins} of {len(values)})")
        if _looks_random(values):
            equal[values.shape, values.tobytes()].append((name, place))
            in_lists[_without_numbers(name)] += 1
    for leaves in equal.values():
        grads = jax.tree.leaves(gradients()) if len(leaves) > 1 else []
        trained = [name for name, place in leaves if grads and np.any(np.asarray(grads[place]))]
        kinds = {_without_numbers(name) for name in trained}
        if len(trained) > 1 and len(kinds) == 1:  # names that differ by a number alone are layers of a list
            all_layers = len(trained) == in_lists[kinds.pop()]
            (identical if all_layers else some).append(" and ".join(trained))
        elif len(trained) > 1:
            split.append(" and ".join(trained))
    wrong = [_IDENTICAL.format(names=few(identical))] if identical else []
    wrong += [_SPLIT.format(names=few(split))] if split else []
    return wrong, [_SOME_IDENTICAL.format(names=few(some))] if some else []


def _stacks_in(program: jex_core.Jaxpr) -> set[tuple[int, ...]]:
    """Return the shapes of arrays whose rows a program takes one by one: by a loop, of groups or not, or by slices."""
    stacks = set()
    for eqn, _ in equations(program):
        shapes = [getattr(var.aval, "shape", ()) for var in eqn.invars]
        if isinstance(flow := control_flow(eqn), Scan):
            stacked = shapes[flow.n_consts + flow.n_carry :]
            stacks |= {*stacked, *((shape[0] * shape[1], *shape[2:]) for shape in stacked if len(shape) > 1)}
        elif eqn.primitive.name in ("slice", "dynamic_slice"):
            stacks |= {shapes[0]} if eqn.outvars[0].aval.shape == (1, *shapes[0][1:]) else set()  # pyrefly: ignore
    return stacks


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _looks_random(values: np.ndarray) -> bool:
    # Drawn numbers are nearly all different, as far as their type can tell; tables and identities repeat a few.
    some = np.asarray(values.ravel()[:4096], np.float32)
    possible = {1: 16, 2: 256}.get(values.dtype.itemsize, some.size)
    return len(np.unique(some)) > min(some.size // 2, possible)


_NO_CHECKPOINT = "No checkpoint reaches the program."


def checkpoints_are_there(both: BothWays) -> Proof:
    """Check that checkpoints reach the traced program, and over half of each kind of layer; `seen` counts the rest."""
    there = len(both.rematerialised.checkpoints)
    extra = there - len(both.plain.checkpoints)
    covered, left_out = layers_left_out(both.rematerialised.traced.jaxpr)
    forgotten = stacks_left_out(both.rematerialised.gradient.jaxpr, both.params) if extra > 0 else 0
    seen, cause = f"{there} of them with {both.remat!r}", ""
    if left_out > 1:  # one alone is the last of unrolled layers
        seen += f"; {covered} layers are under one, and {left_out} with the same products are not"
    if there and extra <= 0:
        seen += f", and {there - extra} with {both.baseline!r}"
        cause = "The layer is checkpointed whatever the flag says: there is no plain program to compare with."
    elif extra <= 0:
        cause = "The flag does not reach the layer: filtered by a caller, or the model is in eval mode."
        with_flag, without = (
            sum(eqn.primitive.name == "scan" for eqn, _ in equations(way.traced.jaxpr))
            for way in (both.rematerialised, both.plain)
        )
        if with_flag > without:
            cause = (
                "The flag adds a loop and no checkpoint, and the loop keeps the residuals of every iteration. If it "
                "accumulates microbatches, take the gradient inside the loop; if it runs layers, checkpoint its body."
            )
    elif (left_out > 1 and left_out >= covered) or forgotten:
        seen += f"; {forgotten} layers of a stack have none" if forgotten else ""
        cause = "The flag reaches some of the layers only. " + _if_meant(Title.CHECKPOINTS)
    return Proof(Title.CHECKPOINTS, not cause, seen, cause)


def options_are_sound(both: BothWays) -> Proof:
    """Check that policies name what is there, options do what they say, and nothing with a side effect runs twice."""
    wrong = option_faults(both.rematerialised.traced.jaxpr, lambda: both.rematerialised.gradient.jaxpr)
    return Proof(Title.OPTIONS, not wrong, " ".join(wrong) or "nothing odd")


def layer_runs_again(both: BothWays) -> Proof:
    """Check that the layer runs again in the backward pass, as JAX marks it in the traced gradient, and not without."""
    (products, values), (products_without, values_without) = (
        work_again(way.jaxpr) for way in (both.rematerialised.gradient, both.plain.gradient)
    )
    products, values = products - products_without, values - values_without
    seen = f"{products:,} products and {values:,} values of other operations are computed again"
    holds = products > 0 or values > 0
    cause = "" if holds else "A policy that saves everything, or a checkpoint around what costs nothing."
    if not holds and not both.rematerialised.checkpoints:
        cause = _NO_CHECKPOINT
    return Proof(Title.RUNS, holds, seen, cause)


def choices_are_the_same(both: BothWays) -> Proof | None:
    """Check that dropout masks, experts and what host functions answer are the same when the layer runs again."""
    inside = [operation.eqn for operation in operations(both.rematerialised.traced.jaxpr) if operation.under]
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
    """Check that the compiler has not merged the second computation with the first.

    A compiled program has no marks: what it computes again is its products less those of the plain one. That tells
    only where the traced programs differ by what checkpoints compute again, and by nothing else.
    """
    report, plain = both.rematerialised.report, both.plain.report
    again = matmul_flops_again(both.rematerialised.gradient.jaxpr) - matmul_flops_again(both.plain.gradient.jaxpr)
    if again <= 0:
        return Proof(Title.COMPILER, None, "no matrix product is computed again, and only those are counted")
    more = report.matmul_flops - plain.matmul_flops
    if abs(more - again) > 0.1 * again:
        seen = f"cannot tell: {again:,} FLOPs are computed again, but the two ways differ by {more:,}"
        return Proof(Title.COMPILER, None, f"{seen}. They differ in more than checkpoints: make them alike otherwise")
    if report.compiled_matmul_flops is None or plain.compiled_matmul_flops is None:
        return Proof(Title.COMPILER, None, f"products cannot be counted in the program for {report.chip.name}")
    left = both.devices * (report.compiled_matmul_flops - plain.compiled_matmul_flops)
    undone = left < 0.5 * again
    cause = (
        f"The program asked for them, and the compiler of {report.chip.name} merged both computations: checkpoints "
        "outside a loop on a CPU, or prevent_cse=False. Scan over the layers, or judge on a TPU or GPU."
        if undone
        else ""
    )
    return Proof(Title.COMPILER, not undone, f"{left:,} FLOPs of {again:,} in the compiled program", cause)


def memory_falls(both: BothWays) -> Proof:
    """Check that residuals are fewer, and the chip's temporaries fall with them."""
    report, plain = both.rematerialised.report, both.plain.report
    less = both.plain.residuals.bytes - both.rematerialised.residuals.bytes
    fell = both.devices * (plain.parts["temporaries"] - report.parts["temporaries"])
    seen = f"residuals less by {less:,} bytes, temporaries on {report.chip.name} by {fell:,}"
    if less <= 0 and not both.rematerialised.checkpoints:
        return Proof(Title.MEMORY, False, seen, _NO_CHECKPOINT)
    wrong = _kept_for_nothing(both)
    if less <= 0 or wrong:
        why = wrong or "The policy saves as much as no policy, or the checkpoint is around what costs nothing."
        return Proof(Title.MEMORY, False, seen, " ".join([*placements(both.rematerialised.traced.jaxpr), why]))
    # Compilers recompute cheap residuals by themselves, so that less falls than was kept.
    if fell > 0.1 * less:
        return Proof(Title.MEMORY, True, seen)
    if less < 2**20:
        seen += ": below 1 MiB a compiler's own workspace decides. Judge with larger shapes"
        return Proof(Title.MEMORY, None, seen)
    if why := placements(both.rematerialised.traced.jaxpr):
        return Proof(Title.MEMORY, False, seen, " ".join(why))
    seen += ": the peak lies elsewhere, or arrays so small live in on-chip memory. Judge with larger shapes"
    return Proof(Title.MEMORY, None, seen)


def _kept_for_nothing(both: BothWays) -> str:
    """Return why far more is kept than has to be; "" where nothing is odd."""
    jaxpr, kept, without = both.rematerialised.traced.jaxpr, both.rematerialised.residuals, both.plain.residuals
    made = [row for row in kept.rows if not row.argument]
    around_products = any(products_of(checkpoint.call.body) for checkpoint in both.rematerialised.checkpoints)
    if kept.bytes > 0.75 * without.bytes and products_of(jaxpr) and not around_products:
        name = f"{made[0].dtype}{list(made[0].shape)} of {made[0].operation} in {made[0].source}"
        return f"The checkpoint is not where the memory is: {name} is kept still, for instance."
    for row in made:
        entries = row.shape[1:]
        each_turn = len(entries) > 1 and row.shape[0] == entries[0] > 1 and 2 * row.bytes > kept.bytes
        if each_turn and not any(other.shape[1:][-len(entries) :] == entries for other in without.rows):
            return f"The loop carries an array with an entry for each turn, and each turn keeps all: {list(row.shape)}."
    handed_out = large_results(jaxpr)
    if 2 * handed_out > kept.bytes:
        return f"What leaves a checkpoint is kept: its layers hand out {size_text(handed_out)} beside their result."
    return ""


def offloaded_bytes_arrive(both: BothWays) -> Proof | None:
    """Check that what a policy offloads lies on the host in the compiled program."""
    asked = moved_to_host(both.rematerialised.gradient.jaxpr)
    policies = [policy_arguments(checkpoint.call.policy) for checkpoint in both.rematerialised.checkpoints]
    if not asked and not any("offload_dst" in arguments for arguments in policies):
        return None
    report = both.rematerialised.report
    seen = f"{asked:,} bytes offloaded, {report.host_bytes:,} on the host of {report.chip.name}"
    if report.chip.platform == "cpu":
        return Proof(Title.OFFLOAD, None, f"{seen}: cannot tell, a CPU's memory is the host's")
    arrived = asked > 0 and report.host_bytes >= 0.9 * asked / both.devices
    cause = ""
    if not arrived:
        cause = (
            "The compiler kept them on the device. Offload what enters the layer, named inside it."
            if asked
            else "The program does not ask for the host: a name that nobody gives, or a place other than 'pinned_host'."
        )
    return Proof(Title.OFFLOAD, arrived, seen, cause)


def randomness_is_fresh(both: BothWays) -> Proof:
    """Check that every draw has its own key, fed by the step's key and by its layer's number or inputs."""
    keys = Keys(both.rematerialised.traced, both.params, both.batch)
    if keys.faults:
        return Proof(Title.RANDOMNESS, False, " ".join(keys.faults), _if_meant(Title.RANDOMNESS))
    if keys.hidden:
        return Proof(Title.RANDOMNESS, None, f"{keys.hidden} draws are where their keys cannot be followed")
    seen = (
        f"{len(keys.draws)} draws in the program, each with a key of its own"
        if keys.draws
        else "nothing is drawn by JAX"
    )
    return Proof(Title.RANDOMNESS, True, seen)


def parameters_are_sound(both: BothWays) -> Proof:
    """Check that stacked layers differ from one another, and no weight that is trained is there twice."""
    wrong, unsure = parameter_faults(both.params, lambda: both.plain.results.gradients, both.plain.traced.jaxpr)
    if wrong:
        return Proof(Title.PARAMETERS, False, " ".join(wrong + unsure), _if_meant(Title.PARAMETERS))
    if unsure:
        return Proof(Title.PARAMETERS, None, " ".join(unsure))
    return Proof(Title.PARAMETERS, True, "layers differ, nothing is double")


def donation_is_used(both: BothWays) -> Proof | None:
    """Check that each argument that the step donates shares its memory with a result, in the compiled program."""
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


IF_MEANT = "If that is meant, leave this proof out"


def _if_meant(title: Title) -> str:
    return f'{IF_MEANT}: skip=["{title}"].'


def _answers_the_same(eqn: jex_core.JaxprEqn) -> bool | None:
    """Return whether a function on the host answers twice alike, asked with zeros; None where it cannot be asked so."""
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
