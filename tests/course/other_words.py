"""Right answers that are written otherwise than the solutions: each check takes them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamem_course.exercises import vocabulary_tiling, where_the_memory_goes


def every_step(schedule):
    held = np.zeros(1 + max(last for _, last, _ in schedule), int)
    for first, last, size in schedule:
        held[first : last + 1] += size
    return held.max(), held.argmax()


def by_operation(*sizes):
    rows = where_the_memory_goes.check_step_schedule.right(*sizes)
    operations = range(2 * len(sizes[0]) + sizes[3] + 1)
    return [(at, at, sum(size for first, last, size in rows if first <= at <= last)) for at in operations]


def with_last_output(config, batch_size, seq_len, parts):
    tokens = batch_size * seq_len // parts
    named = 3 * config.param_dtype.itemsize + 4 * (parts > 1)
    inputs = (config.n_layers + 1) * config.compute_dtype.itemsize * config.d_model
    return named * config.n_params + tokens * (inputs + 8 * config.vocab_size)


def of_x_alone(sweep):
    def loss_of_x(x, head, targets):
        @jax.custom_vjp
        def loss(x):
            return sweep(x, head, targets)[0]

        def forward(x):
            value, dx = sweep(x, head, targets)
            return value, dx.astype(x.dtype)

        loss.defvjp(forward, lambda dx, g: ((g * dx).astype(dx.dtype),))
        return loss(x)

    return loss_of_x


OTHER_WORDS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (where_the_memory_goes.check_peak_and_operation, every_step),
    (where_the_memory_goes.check_peak_and_operation, lambda s: np.array(every_step(s))),
    (where_the_memory_goes.check_peak_in_parts, with_last_output),
    (where_the_memory_goes.check_step_schedule, by_operation),
    (
        where_the_memory_goes.check_step_schedule,
        lambda *sizes: np.array(where_the_memory_goes.check_step_schedule.right(*sizes))[::-1],
    ),
    (vocabulary_tiling.check_crossing, lambda d, v, n: jnp.array(2 * d * n / (n - 2))),
    (vocabulary_tiling.check_smoothed_gradient, vocabulary_tiling.check_smoothed_gradient.right),
    (vocabulary_tiling.check_frozen_loss, of_x_alone),
]
