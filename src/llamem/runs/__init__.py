"""One run, as a plan says: on one device, on a mesh, with parts of it on the host; of a model or of adapters."""

from llamem.runs.loop import Run, train
from llamem.runs.step_of_plan import (
    abstract_lora_step,
    abstract_state,
    abstract_step,
    init_state,
    loss_fn,
    make_train_step,
    place_of,
)

__all__ = [
    "Run",
    "abstract_lora_step",
    "abstract_state",
    "abstract_step",
    "init_state",
    "loss_fn",
    "make_train_step",
    "place_of",
    "train",
]
