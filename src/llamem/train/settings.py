"""What a run is told beside its model, its text and its plan."""

import dataclasses
from typing import Literal, get_args

from jaxmem.common.checks import check_number, check_one_of, check_whole

Clip = Literal["global", "layer"]
Rounding = Literal["auto", "nearest", "stochastic"]


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything about a run but the model and the text.

    A step reads `batch_size` sequences of `seq_len` tokens, in `accumulate` equal parts one after the other. AdamW's
    rate rises linearly for `warmup_steps`, at most all steps but the last, then falls along a cosine to a tenth. Counts
    of steps are updates; 0 turns the regular evaluation or snapshot off. An evaluation reads each held-out sequence
    once, `eval_batches` batches at most. How a step is computed is not said here: see `llamem.Plan`.

    `accumulate` saves activations and costs sums: between parts the gradients of all weights wait in f32, 4 bytes a
    weight beside those of the part. So 2 parts can need more memory than 1 where bf16 weights are large beside a part's
    activations; every further part saves: 1B, 8 x 4,096 tokens, a v6e: 14.7 GiB, in 2 parts 17.0, in 8 14.6.

    Gradients are clipped to `clip_norm`, None for not at all: all of them by the norm of all, or with `clip="layer"`
    those of each layer by their own norm, and each array that is in no layer by its own.

    `rounding`: how new weights are rounded; "auto" is "stochastic" for bf16 and "nearest" for other types. Of a bf16
    weight the nearest number is the old one wherever an update is below a 512th of it, as most are at small rates: it
    stands still. "stochastic" lets it follow such updates on average, in the same memory (1B, a v5e and an H100).
    """

    steps: int = 100
    batch_size: int = 8
    seq_len: int = 512
    accumulate: int = 1
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 8
    snapshot_every: int = 50
    clip: Clip = "global"
    rounding: Rounding = "auto"

    def __post_init__(self):
        for name in ("steps", "batch_size", "seq_len", "accumulate", "eval_batches"):
            self._set(name, check_whole(name, getattr(self, name)))
        for name in ("warmup_steps", "seed", "eval_every", "snapshot_every"):
            self._set(name, check_whole(name, getattr(self, name), at_least=0))
        self._set("learning_rate", check_number("learning_rate", self.learning_rate, above=0))
        self._set("weight_decay", check_number("weight_decay", self.weight_decay, at_least=0))
        if self.clip_norm is not None:
            self._set("clip_norm", check_number("clip_norm", self.clip_norm, above=0))
        check_one_of("clip", self.clip, get_args(Clip))
        check_one_of("rounding", self.rounding, get_args(Rounding))
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide into accumulate={self.accumulate} equal parts: "
                "choose a divisor, so that no sequence is dropped."
            )

    def _set(self, name: str, value: float) -> None:
        """Keep a number as Python's own: it is stored beside snapshots, as JSON."""
        object.__setattr__(self, name, value)
