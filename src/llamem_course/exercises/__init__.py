"""Checks of the notebooks' exercises: they reject wrong answers with a hint, and say so where nothing was tried."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jex_core

from jaxmem.tracing.jaxprs import equations


def grade(number: int, body: Callable[[], str]) -> None:
    """Run a check. `body` raises AssertionError(hint) for a wrong answer and returns what to say about a right one.

    An answer that still raises NotImplementedError was not tried, which is no error: a notebook runs to its end.
    """
    try:
        praise = body()
    except NotImplementedError:
        print(f"Exercise {number}: not tried yet.")
    except AssertionError as hint:
        raise AssertionError(f"Exercise {number}: not yet. {hint}") from None
    except (TypeError, ValueError) as error:
        raise AssertionError(f"Exercise {number}: not yet. The check could not use your answer: {error}") from error
    else:
        print(f"Exercise {number}: correct. {praise}")


def operations_written(fn: Callable[..., Any], *arguments: Any) -> int:
    """Return how many operations a traced function has, those in a loop once: what a Python loop makes grow."""
    return sum(1 for _ in equations(jax.make_jaxpr(fn)(*arguments).jaxpr))


def largest_array(program: jex_core.Jaxpr) -> int:
    """Return how many numbers the largest array has that a traced program makes, in its loops and calls too."""
    return max(getattr(var.aval, "size", 0) for eqn, _ in equations(program) for var in eqn.outvars)
