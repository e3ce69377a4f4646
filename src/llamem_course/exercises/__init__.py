"""Exercises of the notebooks, a module for each. What several of them ask of a traced answer stands here."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxmem.tracing.jaxprs import equations


def operations_written(fn: Callable[..., Any], *arguments: Any) -> int:
    """Return how many operations a traced function has, those in a loop once: what a Python loop makes grow."""
    return sum(1 for _ in equations(jax.make_jaxpr(fn)(*arguments).jaxpr))


def largest_array(program: jex_core.Jaxpr) -> int:
    """Return how many numbers the largest array has that a traced program makes, in its loops and calls too."""
    return max(getattr(var.aval, "size", 0) for eqn, _ in equations(program) for var in eqn.outvars)
