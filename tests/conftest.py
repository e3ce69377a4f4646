import jaxtyping
import pytest


@pytest.fixture
def as_a_user():
    """Without the tests' run-time type checks, so that bad input meets the error a user would meet."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
