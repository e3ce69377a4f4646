"""Proof that rematerialisation is on, right and worth it, for any loss: what was asked for, compiled and computed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from llamem.checkpoints import faults, find_checkpoints, placements
from llamem.memory import compile_report
from llamem.randomness import key_faults
from llamem.remat import inner_jaxprs
from llamem.residuals import saved_residuals
from llamem.tables import html_table

_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
_FUNCTIONS = {"tanh", "sin", "cos", "exp", "log", "logistic", "erf", "rsqrt", "sqrt", "max", "integer_pow", "div"}


@dataclasses.dataclass(frozen=True)
class Proof:
    """One thing to be proved: whether it holds (None: could not be told here), what was seen, and the usual cause."""

    name: str
    holds: bool | None
    seen: str
    cause: str = ""

    def __str__(self) -> str:
        mark = {True: "ok    ", False: "FAILED", None: "      "}[self.holds]
        return f"{mark} {self.name}: {self.seen}" + (f"\n       {self.cause}" if self.cause else "")


@dataclasses.dataclass(frozen=True)
class Verification:
    """All proofs of one `verify_remat`; printed as a list, and as a table in notebooks."""

    proofs: tuple[Proof, ...]

    @property
    def holds(self) -> bool:
        """Whether no proof failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Proof, ...]:
        """The proofs that failed."""
        return tuple(proof for proof in self.proofs if proof.holds is False)

    def __str__(self) -> str:
        return "\n".join(map(str, self.proofs))

    def _repr_html_(self) -> str:
        mark = {True: "ok", False: "FAILED", None: "not told"}
        return html_table(
            ("", "proof", "seen", "usual cause"), [(mark[p.holds], p.name, p.seen, p.cause) for p in self.proofs]
        )


def verify_remat(
    loss_fn: Callable[[Any, Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    with_: Any = "nothing",
    without: Any = None,
    target: str = "local",
) -> Verification:
    """Compares `loss_fn(params, batch, with_)` with `loss_fn(params, batch, without)`: is the first rematerialised?

    `loss_fn` returns a scalar; its third argument is how it shall be computed, anything: a policy's name, a flag, a
    model. `params` is a pytree of arrays, `batch` whatever changes from step to step, keys for dropout included. Both
    are run once here, forward and backward, and compiled for `target` (see `llamem.target`): for an absent chip with
    the same shapes, so make them large enough to matter there.

    Proved: a checkpoint reaches the program; its policy and place are sound; loss and gradients are those without,
    and no gradient is lost; products run again in the backward pass; the compiler leaves them; residuals and peak fall;
    random numbers are fresh in every step and layer; stacked layers differ and tied weights are one. A failure says
    what was seen and what usually causes it. Raises what `loss_fn(params, batch, without)` raises.
    Source: the test battery of Hugging Face transformers (PR 41818), extended to compiled programs.
    """

    def gradient(how: Any) -> Callable[[Any, Any], Any]:
        return jax.value_and_grad(lambda params, batch: loss_fn(params, batch, how), allow_int=True)

    plain = jax.make_jaxpr(lambda p, b: loss_fn(p, b, without))(params, batch)
    try:
        traced = jax.make_jaxpr(lambda p, b: loss_fn(p, b, with_))(params, batch)
    except (TypeError, ValueError, jax.errors.JAXTypeError) as error:
        told = str(error).splitlines()[0]
        cause = ""
        if isinstance(error, jax.errors.ConcretizationTypeError):
            cause = (
                "A flag or size became a traced value inside the checkpoint: jax.checkpoint(f, static_argnums=...), "
                "or close over it."
            )
        return Verification((Proof("it can be traced", False, f"{type(error).__name__}: {told}", cause),))
    checkpoints = list(find_checkpoints(traced.jaxpr))
    extra = len(checkpoints) - len(list(find_checkpoints(plain.jaxpr)))
    cause = (
        "The flag does not reach the layer: filtered by a caller, or the model is in eval mode. "
        + " ".join(placements(traced.jaxpr))
        if extra <= 0
        else ""
    )
    seen = f"{len(checkpoints)} of them with {with_!r}"
    proofs = [Proof("checkpoints reach the program", extra > 0, seen, cause.strip())]
    wrong = faults(traced.jaxpr)
    proofs.append(Proof("policies and options mean what they say", not wrong, _first(wrong, "nothing odd")))
    expected = jax.jit(gradient(without))(params, batch)
    try:
        found = jax.jit(gradient(with_))(params, batch)
    except (TypeError, ValueError, jax.errors.JaxRuntimeError) as error:
        told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return Verification((*proofs, Proof("it can be computed", False, told, " ".join(wrong))))
    proofs += _same_numbers(found, expected, params)
    proofs += _worth_it(loss_fn, params, batch, with_, without, gradient, target, placements(traced.jaxpr))
    wrong = key_faults(traced)
    proofs.append(Proof("random numbers are fresh", not wrong, _first(wrong, "no key used twice")))
    wrong = _parameter_faults(params)
    proofs.append(Proof("parameters are what they seem", not wrong, _first(wrong, "layers differ, nothing is double")))
    return Verification(tuple(proofs))


def assert_remat(loss_fn: Callable[[Any, Any, Any], Any], params: Any, batch: Any, **options: Any) -> None:
    """`verify_remat` for a test: raises AssertionError with what failed."""
    verification = verify_remat(loss_fn, params, batch, **options)
    if not verification.holds:
        raise AssertionError("rematerialisation is not proved.\n" + "\n".join(map(str, verification.failed)))


def _same_numbers(found: tuple[Any, Any], reference: tuple[Any, Any], params: Any) -> list[Proof]:
    (loss, grads), (expected, wanted) = found, reference
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    tolerance = max(_TOLERANCE.get(dtype, 1e-4) for dtype in {*dtypes, str(loss.dtype)})
    close = abs(float(loss) - float(expected)) <= tolerance * abs(float(expected)) + 1e-30
    cause = "" if close else "Dropout drawn anew, state updated twice, or another computation altogether."
    proofs = [Proof("the loss is the same", bool(close), f"{float(loss):.6g} and {float(expected):.6g}", cause)]

    lost, off, zero, worst = [], [], [], 0.0
    for (path, want), got in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(grads), strict=True):
        if want.dtype == jax.dtypes.float0:
            continue
        name = jax.tree_util.keystr(path)
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        size = np.linalg.norm(want)
        if not size:  # an expert without a token, a layer that is not used
            zero.append(name)
        elif not np.linalg.norm(got):
            lost.append(name)
        else:
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
    return [*proofs, Proof("every gradient is the same", not (lost or off), seen, cause)]


def _worth_it(
    loss_fn: Callable,
    params: Any,
    batch: Any,
    with_: Any,
    without: Any,
    gradient: Callable[[Any], Callable],
    target: str,
    places: list[str],
) -> list[Proof]:
    mine, plain = (compile_report(gradient(how), params, batch, target=target) for how in (with_, without))
    again = mine.matmul_flops - plain.matmul_flops
    elements = [_elements(jax.make_jaxpr(gradient(how))(params, batch).jaxpr) for how in (with_, without)]
    seen = f"{again:,} more FLOPs of products, {elements[0] - elements[1]:,} more elements of functions"
    runs = again > 0 or elements[0] > elements[1]
    cause = "" if runs else "A policy that saves everything, or a checkpoint around what costs nothing."
    proofs = [Proof("the layer runs again in the backward pass", runs, seen, cause)]

    left = None
    if mine.compiled_matmul_flops is not None and plain.compiled_matmul_flops is not None:
        left = mine.compiled_matmul_flops - plain.compiled_matmul_flops
    undone = left is not None and again > 0 and left < 0.5 * again
    seen = "not counted in this compiler's program" if left is None else f"{left:,} of them in the compiled program"
    cause = (
        f"The program asked for them, and the compiler of {mine.target.name} merged both computations: checkpoints "
        "outside a loop on a CPU, or prevent_cse=False. Scan over the layers, or judge on a TPU or GPU."
        if undone
        else ""
    )
    proofs.append(Proof("the compiler leaves them", None if left is None or again <= 0 else not undone, seen, cause))

    def kept(how: Any) -> int:
        # Those of the parameters alone: what the batch needs is an argument anyway.
        return saved_residuals(lambda p: loss_fn(p, batch, how), params).bytes

    less = kept(without) - kept(with_)
    fell = plain.parts["temporaries"] - mine.parts["temporaries"]
    # Compilers recompute cheap residuals by themselves, so that less falls than was kept.
    holds = less > 0 and fell > 0.1 * less
    if 0 < less < 2**20 and not holds:
        holds = None  # so small that a compiler's own workspace covers it
    seen = f"residuals less by {less:,} bytes, temporaries on {mine.target.name} by {fell:,}"
    cause = ""
    if holds is False:
        cause = " ".join(places) or "The policy saves as much as no policy, or what it drops is not at the peak."
    return [*proofs, Proof("memory falls", holds, seen, cause)]


def _elements(jaxpr: jex_core.Jaxpr) -> int:
    """How many values of functions a program computes, loops multiplied out: what runs again without any product."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _FUNCTIONS:
            total += eqn.outvars[0].aval.size  # pyrefly: ignore[missing-attribute]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(map(_elements, inner_jaxprs(eqn)))
    return total


def _parameter_faults(params: Any) -> list[str]:
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
    found = []
    if alike:
        found.append(
            f"all layers are identical in {', '.join(alike)}: made by a vmap that did not split the key "
            "(nnx.split_rngs), they begin as one layer."
        )
    if double:
        found.append(f"equal: {', '.join(double)}. A tied weight was split in two, and each gets half of the gradient.")
    return found


def _first(faults: list[str], otherwise: str) -> str:
    return " ".join(faults) if faults else otherwise
