"""What a run is told beside its model, its text and its plan."""

import dataclasses
import math
from typing import Literal, get_args

Clip = Literal["global", "layer"]
Rounding = Literal["nearest", "stochastic"]


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything about a run but the model and the text.

    A step reads `batch_size` sequences of `seq_len` tokens, in `accumulate` equal parts one after the other. AdamW's
    rate rises linearly for `warmup_steps`, at most all steps but the last, then falls along a cosine to a tenth. Counts
    of steps are updates; 0 turns the regular evaluation or snapshot off. How a step is computed is not said here: see
    `llamem.Plan`.

    Gradients are clipped to `clip_norm`, None for not at all: all of them by the norm of all, or with `clip="layer"`
    those of each layer by their own norm, and each array that is in no layer by its own. `rounding`: how new bf16
    weights are rounded; "stochastic" lets them follow, on average, updates below their last bit.
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
    rounding: Rounding = "nearest"

    def __post_init__(self):
        least = {"warmup_steps": 0, "seed": 0, "eval_every": 0, "snapshot_every": 0}
        for name in ("steps", "batch_size", "seq_len", "accumulate", "eval_batches", *least):
            value, at_least = getattr(self, name), least.get(name, 1)
            if type(value) is not int or not at_least <= value < 2**31:
                raise ValueError(
                    f"{name}={value!r}: expected a whole number (a Python int) of at least {at_least}, below 2**31."
                )
        for name in ("learning_rate", "clip_norm", "weight_decay"):
            value = getattr(self, name)
            if name == "clip_norm" and value is None:
                continue
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and name != "weight_decay"):
                limit = "of at least 0" if name == "weight_decay" else "above 0"
                raise ValueError(f"{name}={value!r}: expected a finite number (a Python float) {limit}.")
        for name, known in (("clip", get_args(Clip)), ("rounding", get_args(Rounding))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {' or '.join(map(repr, known))}.")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide into accumulate={self.accumulate} equal parts: "
                "choose a divisor, so that no sequence is dropped."
            )
