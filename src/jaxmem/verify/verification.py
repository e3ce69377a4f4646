"""Proof that rematerialisation is on, right and worth it, for any loss: what was asked for, compiled and computed."""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.common.checks import show
from jaxmem.common.printing import Shown, Table
from jaxmem.verify.both_ways import FAILURES, BothWays, dtype_of
from jaxmem.verify.comparisons import Proof, Title
from jaxmem.verify.proofs import PROOFS

_MUST = (Title.LOSS, Title.GRADIENTS, Title.RUNS)  # without these proved, a test has shown nothing

_NNX = (
    "loss_fn changes an nnx object that was made outside of it, which flax refuses while it traces. Split the model, "
    "graphdef, params, rest = nnx.split(model, nnx.Param, ...), give params and rest to verify_remat in its params and "
    "batch, merge them inside loss_fn, and return the changed state beside the loss."
)

_FLAG = (
    "A flag or size became a traced value inside the checkpoint: jax.checkpoint(f, static_argnums=...), or close over "
    "it."
)

_LINEN = (
    "linen's nn.remat gives what it wraps another name, ScanCheckpointBlock_0 for ScanBlock_0, so that a model with it "
    'does not find the parameters of one without: name the module, nn.scan(nn.remat(Block), ...)(name="blocks").'
)


@dataclasses.dataclass(frozen=True, repr=False)
class Verification(Shown):
    """All proofs of one `verify_remat`; printed as a list, and as a table in notebooks."""

    proofs: tuple[Proof, ...]

    @property
    def holds(self) -> bool:
        """Whether no proof failed, and loss, gradients and the layer's second run are proved unless skipped."""
        return not self._missing

    @property
    def _missing(self) -> tuple[Proof, ...]:
        """The proofs that failed, and of those without which nothing was shown the ones that are "not proved"."""
        return tuple(
            proof
            for proof in self.proofs
            if proof.failed or (proof.holds is None and not proof.skipped and proof.name in _MUST)
        )

    @property
    def failed(self) -> tuple[Proof, ...]:
        """The proofs that failed."""
        return tuple(proof for proof in self.proofs if proof.failed)

    def __str__(self) -> str:
        return "\n".join(map(str, self.proofs))

    def parts_shown(self) -> Iterable[str | Table]:
        """Return the table of a notebook."""
        rows = [(proof.mark, proof.name, proof.seen, proof.cause) for proof in self.proofs]
        yield Table(("", "proof", "seen", "usual cause"), rows)


def verify_remat(
    loss_fn: Callable[[Any, Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    remat: Any = "nothing",
    baseline: Any = None,
    chip: str = "local",
    evaluate: Callable[[Any, Any, Any], Any] | None = None,
    step: jax.stages.Lowered | None = None,
    skip: Collection[str] = (),
) -> Verification:
    """Compare `loss_fn(params, batch, remat)` with `loss_fn(params, batch, baseline)`: is the first rematerialised?

    `loss_fn` returns a scalar, or a scalar and other results (hidden states, updated batch statistics, experts chosen),
    which must then be the same too. Its third argument is how it shall be computed, anything: a policy's name, a flag,
    a model. `params` is a pytree of arrays, `batch` whatever changes from step to step, keys for dropout included. Both
    ways are run once here, forward and backward, and compiled for `chip` (see `jaxmem.find_chip`): for an absent chip
    with the same shapes, so make them large enough to matter there. `evaluate(params, batch, how)`, if given, is the
    model at evaluation, which no checkpoint may touch; it returns any arrays, a KV cache for instance. `step`, if
    given, is the training step with its donations, `jax.jit(step, donate_argnums=(0,)).lower(state, batch)`.

    Proved: a checkpoint reaches the program; its policy and place are sound; loss, other results and gradients are
    those without, and no gradient is lost; the layer runs again in the backward pass, and draws and chooses the same
    again; the compiler leaves it; residuals and memory fall; what is offloaded arrives on the host; random numbers are
    fresh in every step and layer; stacked layers differ and tied weights are one; donated arguments are given up. A
    failure says what was seen and what usually causes it. Where gradients are zero, as in layers that begin as the
    identity, loss and gradients are compared with all parameters moved, too. What a proof could not see is "not
    proved", with the reason; proofs that a program gives no occasion for are left out of the answer. `.holds` is true
    where none failed, and loss, gradients and the layer's second run are proved. `skip`: names of proofs to leave out,
    as they are printed: `skip=["random numbers are fresh"]` where one mask for all time steps is meant, or those that
    compile, to be quick; the answer lists them as skipped.

    Not noticed: a difference below the tolerance of the type, in float32 1e-4 of loss and gradients, such as another
    epsilon of 1e-5 in a norm; keys of which layers share one word of two; a key that stays for some steps and then
    moves on, as one of `step // n` does; and numbers that NumPy drew while tracing, which are a table like any other.

    Raises what `loss_fn(params, batch, baseline)` raises, and ValueError for parameters that are shapes or have no
    floating-point array, for a name in `skip` that is no proof's, for a `step` that was not lowered, or where `loss_fn`
    changes a flax nnx object from outside.
    Source: the test battery of Hugging Face transformers (PR 41818), extended to compiled programs.
    """
    if isinstance(skip, str) or set(skip) - set(PROOFS):
        raise ValueError(f"skip={skip!r}: expected a collection of proofs' names. Known: {'; '.join(PROOFS)}.")
    if step is not None and not hasattr(step, "compile"):
        raise ValueError(f"step={show(step)}: expected jax.jit(step, donate_argnums=(0,)).lower(state, batch).")
    _check_arrays(params, batch)
    both = BothWays(loss_fn, params, batch, remat, baseline, chip, evaluate, step)
    proofs: list[Proof | None] = []
    try:
        for title, prove in PROOFS.items():
            proofs.append(Proof(title, None, "", skipped=True) if title in skip else prove(both))
    except Exception as error:
        if "trace level" in str(error):
            raise ValueError(_NNX) from error
        if "remat(" in str(error) and type(error).__module__ == "flax.errors":
            error.add_note(_LINEN)
        failure = _failure_of(both) if isinstance(error, FAILURES) else None
        if failure is None:
            raise
        proofs.append(failure)
    return Verification(tuple(proof for proof in proofs if proof is not None))


def _check_arrays(params: Any, batch: Any) -> None:
    leaves = jax.tree.leaves((params, batch))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError(
            "verify_remat computes the loss both ways, and params or batch hold shapes (jax.ShapeDtypeStruct). Give "
            "arrays: of a small model, since the proof holds for its layers, or of shapes made with jax.random.normal."
        )
    if not any(jnp.issubdtype(dtype_of(leaf), jnp.inexact) for leaf in jax.tree.leaves(params)):
        types = sorted({str(dtype_of(leaf)) for leaf in jax.tree.leaves(params)})
        raise ValueError(
            f"verify_remat(params of {', '.join(types) or 'nothing'}): expected floating-point arrays to take "
            "gradients of. Give integers, such as blocks of four bits, in batch, and what is trained in params."
        )


def _failure_of(both: BothWays) -> Proof | None:
    """Return why the rematerialised program cannot be traced or run, None where it can.

    Raises what the plain program raises: that is no failure of the other.
    """
    both.plain.results  # noqa: B018
    for title, attempt in (
        (Title.TRACED, lambda: both.rematerialised.traced),
        (Title.COMPUTED, lambda: both.rematerialised.results),
    ):
        try:
            attempt()
        except FAILURES as error:
            first, _, _ = str(error).partition("\n")
            became_traced = isinstance(error, jax.errors.ConcretizationTypeError)
            seen = f"{type(error).__name__}: {first}" if first else type(error).__name__
            return Proof(title, False, seen, _FLAG if became_traced else "")
    return None


def assert_remat(loss_fn: Callable[[Any, Any, Any], Any], params: Any, batch: Any, **options: Any) -> None:
    """Call `verify_remat` for a test: raise AssertionError with each proof that failed.

    Loss, gradients and the layer's second run must be proved unless they are skipped: where one of them is "not
    proved", say because the loss is not finite, that is raised too. Others that are "not proved" pass.
    """
    if missing := verify_remat(loss_fn, params, batch, **options)._missing:
        raise AssertionError("rematerialisation failed, or is not proved:\n" + "\n".join(map(str, missing)))
