"""Checks of the exercises of notebook 07."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from llamem.course.exercises import grade
from llamem.llama.config import LlamaConfig
from llamem.memory.compiling import compile_report
from llamem.memory.report import GiB
from llamem.memory.targets import available
from llamem.train.step import TrainSettings, abstract_step


def check_standing_bytes(fn: Callable[..., Any]) -> None:
    """Exercise 1: weights, gradients and AdamW's moments."""

    def body() -> str:
        for name, sizes in (("tiny", (4, 2)), ("llama3.1-8b", (2, 4)), ("llama3.2-1b", (2, 2))):
            config = LlamaConfig.from_name(name)
            got = fn(config, *sizes)
            weights, moment = (config.n_params * size for size in sizes)
            if got == 2 * weights + 2 * moment:
                continue
            assert got != weights, "That is the weights alone: what else has one number for each parameter?"
            assert got != weights + 2 * moment, "Every weight has a gradient, too."
            assert got != 2 * weights + moment, "AdamW keeps two moments for each parameter."
            assert got != 4 * weights, "Moments may be stored in another type than weights."
            raise AssertionError(f"For {name} and {sizes} bytes, {got:,} is not all of it, or too much.")
        return "All of it stands before the first activation, whatever remat and tiling do."

    grade(1, body)


def check_rate(fn: Callable[..., Any]) -> None:
    """Exercise 2: warm-up and cosine decay, compared with optax."""

    def body() -> str:
        peak, warmup, steps = 3e-3, 20, 120
        schedule = optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, steps, peak / 10)
        for step, hint in (
            (0, "step 0 is the foot of the warm-up: peak / warmup"),
            (7, "the warm-up is a straight line from peak / warmup to peak"),
            (20, "the warm-up ends at the peak"),
            (70, "half-way down the cosine is the mean of peak and peak / 10"),
            (95, "the decay is half a cosine from warmup to steps"),
            (120, "the end is a tenth of the peak"),
        ):
            assert np.isclose(fn(step, peak, warmup, steps), schedule(step), rtol=1e-5), f"At step {step}: {hint}."
        return "This is the schedule that the notebook trained with."

    grade(2, body)


def check_settings(fn: Callable[..., Any]) -> None:
    """Exercise 3: 65,536 tokens per step of Llama 3.2 1B on a v5e, by its compiler."""

    def body() -> str:
        settings = fn()
        assert isinstance(settings, TrainSettings), "Return llamem.TrainSettings(...)."
        tokens = settings.batch_size * settings.seq_len
        assert settings.seq_len == 8192, f"The sequences have 8,192 tokens; yours have {settings.seq_len:,}."
        assert tokens == 65_536, f"One step should read 65,536 tokens; yours reads {tokens:,}."
        if not available("v5e-1"):
            return "(Not compiled: there is no TPU compiler here, so the peak is not checked.)"
        config = LlamaConfig.from_name("llama3.2-1b", param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
        step, state, batch = abstract_step(config, settings)
        report = compile_report(step, state, batch, donate=(0,), target="v5e-1")
        peak = report.peak_bytes / GiB
        assert report.fits, f"The peak is {peak:.1f} GiB. Which setting decides how many sequences are alive at once?"
        return (
            f"Peak {peak:.1f} GiB. Eight sequences one after the other cost one f32 sum of the gradients, and the "
            "activations of a single one."
        )

    grade(3, body)
