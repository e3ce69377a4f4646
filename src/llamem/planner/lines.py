"""The lines of an estimate."""

import dataclasses

LINES = (
    "weights",
    "moments",
    "batch",
    "gradients",
    "residuals",
    "head gradient",
    "loss tiles",
    "attention",
    "feed-forward",
    "layer weights",
    "stream",
    "gaps",
)


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of an estimate: bytes on one device, and why so many."""

    name: str
    bytes: int
    why: str
