"""One thing to be proved: its name, whether it holds, what was seen."""

import dataclasses
import enum


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
