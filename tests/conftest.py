import jax
import jaxtyping
import pytest


@pytest.fixture
def as_a_user():
    """Without the tests' run-time type checks, so that bad input meets the error a user would meet."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(params=[None, 96], ids=["rows", "columns"])
def columns(request, monkeypatch):
    """How the losses work on a tile of tokens: on whole rows as on accelerators, or 96 columns at a time."""
    monkeypatch.setattr("llamem.losses.cross_entropy.cache_columns", lambda: request.param)
    return request.param


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def remat3(request):
    """JAX's coming way to rematerialise, off and on."""
    if request.param and not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this JAX has no jax_remat3")
    if hasattr(jax.config, "jax_remat3"):
        old = jax.config.jax_remat3
        jax.config.update("jax_remat3", request.param)
        jax.clear_caches()
        yield
        jax.config.update("jax_remat3", old)
        jax.clear_caches()
    else:
        yield
