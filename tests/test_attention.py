import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from llamem.attention import QUERY_TILE, attention


def arrays(T, S=None, H=6, K=2, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(T), 4)
    S = S or T
    shapes = [(2, T, H, 8), (2, S, K, 8), (2, S, K, 8), (2, T, H, 8)]
    return [3 * jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("T", [1, 5, QUERY_TILE, QUERY_TILE + 45])
@pytest.mark.parametrize("K", [1, 2, 6])
@pytest.mark.parametrize("implementation", ["xla", "tiled", "auto"])
def test_values_and_gradients_equal_float64(T, K, implementation):
    *qkv, weights = arrays(T, K=K)

    def value(attend, *qkv):
        return jnp.sum(attend(*qkv) * weights)

    mine = lambda q, k, v: attention(q, k, v, implementation=implementation)  # noqa: E731
    got = jax.jit(jax.value_and_grad(lambda *qkv: value(mine, *qkv), argnums=(0, 1, 2)))(*qkv)
    with reference.float64():
        exact = [jnp.asarray(np.asarray(a, np.float64)) for a in qkv]
        theirs = lambda q, k, v: reference.attention(q, k, v, np.arange(T))  # noqa: E731
        expected = jax.value_and_grad(lambda *qkv: value(theirs, *qkv), argnums=(0, 1, 2))(*exact)
        out = theirs(*exact)
    np.testing.assert_allclose(mine(*qkv), out, rtol=1e-5, atol=5e-5)
    for a, b in zip(got[1], expected[1], strict=True):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) < 1e-5 * np.linalg.norm(b) + 1e-5


@pytest.mark.parametrize("implementation", ["xla", "tiled"])
def test_queries_at_given_positions(implementation):
    q, k, v, _ = arrays(7, S=20)
    positions = jnp.array([3, 4, 9, 0, 19, 5, 6])
    got = attention(q, k, v, q_positions=positions, implementation=implementation)
    expected = reference.attention(q, k, v, positions)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_tiled_attention_stores_no_square():
    def temporaries(implementation, T):
        shape = jax.ShapeDtypeStruct((1, T, 4, 16), jnp.float32)
        loss = lambda q, k, v: jnp.sum(attention(q, k, v, implementation=implementation) ** 2)  # noqa: E731
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporaries("xla", 4096) > 3.5 * temporaries("xla", 2048)
    assert temporaries("tiled", 4096) < 2.5 * temporaries("tiled", 2048)
    assert temporaries("tiled", 4096) < temporaries("xla", 4096) / 8


@pytest.mark.usefixtures("as_a_user")
def test_what_an_implementation_cannot_do_is_said():
    q, k, v, _ = arrays(7)
    with pytest.raises(ValueError, match="multiple of 512, got T=7"):
        attention(q, k, v, implementation="splash")
    with pytest.raises(ValueError, match="whole sequences"):
        attention(q, k, v, q_positions=jnp.arange(7), implementation="cudnn")
    with pytest.raises(ValueError, match="implementation='flash'"):
        attention(q, k, v, implementation="flash")  # pyrefly: ignore[bad-argument-type]
