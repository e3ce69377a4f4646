"""What a run is told beside its model, its text and its plan."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything about a run but the model and the text.

    A step reads `batch_size` sequences of `seq_len` tokens, in `accumulate` equal parts one after the other. AdamW's
    rate rises linearly for `warmup_steps`, at most all steps but the last, then falls along a cosine to a tenth. Counts
    of steps are updates; 0 turns the regular evaluation or snapshot off. How a step is computed is not said here: see
    `llamem.Plan`.
    """

    steps: int = 100
    batch_size: int = 8
    seq_len: int = 512
    accumulate: int = 1
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 8
    snapshot_every: int = 50

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
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and name != "weight_decay"):
                limit = "of at least 0" if name == "weight_decay" else "above 0"
                raise ValueError(f"{name}={value!r}: expected a finite number (a Python float) {limit}.")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide into accumulate={self.accumulate} equal parts: "
                "choose a divisor, so that no sequence is dropped."
            )
