"""Proof that rematerialisation is on, right and worth it, for any loss: what was asked for, compiled and computed."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamem.memory.show import Table
from llamem.verify.case import BothWays, CannotGo, Proof, Title
from llamem.verify.proofs import PROOFS

_MUST = (Title.LOSS, Title.GRADIENTS, Title.RUNS)  # without these proved, a test has shown nothing


@dataclasses.dataclass(frozen=True)
class Verification:
    """All proofs of one `verify_remat`; printed as a list, and as a table in notebooks."""

    proofs: tuple[Proof, ...]

    @property
    def holds(self) -> bool:
        """Whether no proof failed, but for those waived."""
        return not self.failed

    @property
    def failed(self) -> tuple[Proof, ...]:
        """The proofs that failed, without those waived."""
        return tuple(proof for proof in self.proofs if proof.failed)

    def __str__(self) -> str:
        return "\n".join(map(str, self.proofs))

    def _repr_html_(self) -> str:
        rows = [(p.mark, p.name, p.seen, f"waived: {p.waived}" if p.waived else p.cause) for p in self.proofs]
        return Table(("", "proof", "seen", "usual cause"), rows)._repr_html_()


def verify_remat(
    loss_fn: Callable[[Any, Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    remat: Any = "nothing",
    baseline: Any = None,
    chip: str = "local",
    evaluate: Callable[[Any, Any, Any], Any] | None = None,
    proofs: Sequence[Callable[[BothWays], Proof | None]] = PROOFS,
    waive: Mapping[str, str] | None = None,
) -> Verification:
    """Compares `loss_fn(params, batch, remat)` with `loss_fn(params, batch, baseline)`: is the first rematerialised?

    `loss_fn` returns a scalar, or a scalar and other results (hidden states, updated batch statistics, experts chosen),
    which must then be the same too. Its third argument is how it shall be computed, anything: a policy's name, a flag,
    a model. `params` is a pytree of arrays, `batch` whatever changes from step to step, keys for dropout included. Both
    ways are run once here, forward and backward, and compiled for `chip` (see `llamem.find_chip`): for an absent chip
    with the same shapes, so make them large enough to matter there. `evaluate(params, batch, how)`, if given, is the
    model at evaluation, which no checkpoint may touch; it returns any arrays, a KV cache for instance.

    Proved: a checkpoint reaches the program; its policy and place are sound; loss, other results and gradients are
    those without, and no gradient is lost; the layer runs again in the backward pass, and draws and chooses the same
    again; the compiler leaves it; residuals and memory fall; what is offloaded arrives on the host; random numbers are
    fresh in every step and layer; stacked layers differ and tied weights are one. A failure says what was seen and what
    usually causes it. `proofs` takes some of them alone, as in `proofs=[llamem.verify.layer_runs_again]`; those that a
    program gives no occasion for are left out of the answer. What a proof could not see is "not proved", with the
    reason. `waive={"random numbers are fresh": "one mask for all time steps, as Gal and Ghahramani do"}` accepts a
    failure that is meant; the answer shows it with its reason, and says where nothing had to be waived.

    Raises what `loss_fn(params, batch, baseline)` raises, and ValueError for a waiver of no known proof or without a
    reason.
    Source: the test battery of Hugging Face transformers (PR 41818), extended to compiled programs.
    """
    _check_waivers(waive or {})
    both = BothWays(loss_fn, params, batch, remat, baseline, chip, evaluate)
    found: list[Proof] = []
    try:
        for prove in proofs:
            if (proof := prove(both)) is not None:
                found.append(proof)
    except CannotGo as stop:
        found.append(stop.proof)
    return Verification(tuple(_waived(proof, (waive or {}).get(proof.name, "")) for proof in found))


def assert_remat(loss_fn: Callable[[Any, Any, Any], Any], params: Any, batch: Any, **options: Any) -> None:
    """`verify_remat` for a test: raises AssertionError with each proof that failed.

    Loss, gradients and the layer's second run must be proved: where one of them is "not proved", say because the loss
    is not finite or the layer is hidden in a Pallas kernel, that is raised too. Others that are "not proved" pass.
    """
    verification = verify_remat(loss_fn, params, batch, **options)
    missing = [proof for proof in verification.proofs if proof.failed or (proof.holds is None and proof.name in _MUST)]
    if missing:
        raise AssertionError("rematerialisation failed, or is not proved:\n" + "\n".join(map(str, missing)))


def _check_waivers(waive: Mapping[str, str]) -> None:
    names = [title.value for title in Title if title not in (Title.TRACED, Title.COMPUTED)]
    for name, reason in waive.items():
        if name not in names:
            raise ValueError(f"waive={{{name!r}: ...}}: there is no such proof. Known: {'; '.join(names)}.")
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(
                f"waive={{{name!r}: {reason!r}}}: expected the reason, in words, for whoever reads the report."
            )


def _waived(proof: Proof, reason: str) -> Proof:
    if not reason:
        return proof
    if proof.holds is False:
        return dataclasses.replace(proof, waived=reason)
    return dataclasses.replace(
        proof, seen=f"{proof.seen} (waived, {reason!r}, and nothing failed: take the waiver out)"
    )
