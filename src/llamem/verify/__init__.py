"""Proofs that rematerialisation is on and right, for anyone's loss."""

from llamem.verify.case import BothWays, CannotGo, Proof
from llamem.verify.proofs import (
    PROOFS,
    checkpoints_are_there,
    choices_are_the_same,
    compiler_leaves_them,
    evaluation_is_untouched,
    gradients_are_the_same,
    layer_runs_again,
    loss_is_the_same,
    memory_falls,
    offloaded_bytes_arrive,
    options_are_sound,
    parameters_are_sound,
    randomness_is_fresh,
    results_are_the_same,
)
from llamem.verify.runs import Runs, count_runs
from llamem.verify.verification import Verification, assert_remat, verify_remat

__all__ = [
    "PROOFS",
    "BothWays",
    "CannotGo",
    "Proof",
    "Runs",
    "Verification",
    "assert_remat",
    "checkpoints_are_there",
    "choices_are_the_same",
    "compiler_leaves_them",
    "count_runs",
    "evaluation_is_untouched",
    "gradients_are_the_same",
    "layer_runs_again",
    "loss_is_the_same",
    "memory_falls",
    "offloaded_bytes_arrive",
    "options_are_sound",
    "parameters_are_sound",
    "randomness_is_fresh",
    "results_are_the_same",
    "verify_remat",
]
