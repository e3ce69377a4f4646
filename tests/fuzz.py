"""Wrong arguments for public functions: what they refuse, they refuse themselves, in a sentence of their own."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

PACKAGE = str(Path(__file__).resolve().parent.parent / "src" / "llamem")
# The same examples in every run, and none written down. `as_a_user` is set for all examples of a test at once.
FUZZ = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def refused(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message with which the package refuses a call; "" where it takes it. What any other code raises, escapes."""
    try:
        fn(*args, **kwargs)
    except (TypeError, ValueError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        if not place.filename.startswith(PACKAGE) or "raise" not in (place.line or "raise"):
            raise
        return str(error)
    return ""


def junk() -> st.SearchStrategy[Any]:
    """Values of all sorts: nothing, words, numbers out of range, arrays of other ranks and types, functions."""
    dtypes = ("float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64")
    shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), max_size=3)
    arrays = st.builds(lambda shape, dtype: jnp.ones(shape, dtype), shapes, st.sampled_from(dtypes))
    plain = [
        None,
        True,
        "auto",
        "vocab",
        "",
        0,
        -1,
        1,
        3,
        10**12,
        2.5,
        -0.5,
        float("nan"),
        float("inf"),
        1j,
        [],
        (),
        {},
    ]
    odd = [[1.0, 2.0], {"a": 1}, object(), jnp.sin, np.array(["a"]), np.int64(2), np.float32(0.5), jax.random.key(0)]
    return st.one_of(arrays, st.sampled_from([*plain, *odd]))
