import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from models import MOE, model_of, tokens_of
from norms import relative_error

import llamem
from llamem import Policy
from llamem.layers.experts import MAX_GROUP, grouped_matmul, mixture
from llamem.memory import matmul_flops
from llamem.train import loss_fn


def arrays(N, E, D=7, F=9, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(N + E), 5)
    shapes = [(1, N, D), (D, E), (E, D, F), (E, D, F), (E, F, D)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(
    ("N", "E", "k", "dtype"),
    [
        (1, 4, 2, jnp.float32),
        (13, 5, 1, jnp.float32),
        (64, 8, 2, jnp.float32),
        (50, 3, 3, jnp.bfloat16),
        (2 * MAX_GROUP + 9, 2, 1, jnp.float32),
    ],
)
def test_values_and_gradients_equal_float64(N, E, k, dtype):
    args = arrays(N, E, dtype=dtype)
    weights = np.asarray(jax.random.normal(jax.random.key(0), args[0].shape))

    def value(mixture, *args):
        out = mixture(*args, k)
        return jnp.sum(out * weights), out

    def run(mixture, args):
        fn = jax.value_and_grad(functools.partial(value, mixture), argnums=range(5), has_aux=True)
        (_, out), grads = jax.tree.map(np.asarray, jax.jit(fn)(*args))
        return out, grads

    got, grads = run(mixture, args)
    with reference.float64():
        expected, wanted = run(reference.mixture, [jnp.asarray(np.asarray(a, np.float64)) for a in args])
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    assert got.dtype == dtype
    assert relative_error(got, expected) < tolerance
    for a, b in zip(grads, wanted, strict=True):
        # With one expert per token its share is 1 whatever the router says.
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == dtype
        assert np.linalg.norm(np.float64(a) - b) <= tolerance * np.linalg.norm(b) + 2e-5 * N**0.5


def test_every_token_to_one_expert_drops_none():
    x, router, gate, up, down = arrays(40, 4)
    router = router.at[:].set(0).at[0, 2].set(100.0)
    x = x.at[..., 0].set(1.0)
    alone = (jax.nn.silu(x @ gate[2]) * (x @ up[2])) @ down[2]
    np.testing.assert_allclose(mixture(x, router, gate, up, down, 1), alone, rtol=1e-5, atol=1e-5)


def test_grouped_matmul_accumulates_in_float32():
    """256 groups of one expert: in bf16 the gradient would stop growing at 256 times the first."""
    x, w = jnp.ones((1024, 1, 2), jnp.bfloat16), jnp.ones((2, 2, 3), jnp.bfloat16)
    expert = jnp.zeros(1024, jnp.int32)
    dw = jax.grad(lambda w: jnp.sum(grouped_matmul(x, w, expert).astype(jnp.float32)))(w)
    np.testing.assert_array_equal(dw[0], 1024)
    np.testing.assert_array_equal(dw[1], 0)


def test_the_routers_logits_can_be_saved():
    """Saved, they are not computed again: one product less in the backward pass, and the same experts for certain."""

    def products(remat):
        graphdef, params = nnx.split(model_of(MOE, remat=remat, loss_tiles=1))
        grad = jax.grad(lambda p: loss_fn(graphdef, p, tokens_of(MOE), tokens_of(MOE)))
        return matmul_flops(jax.make_jaxpr(grad)(params).jaxpr)

    tokens = tokens_of(MOE).size
    assert products("nothing") - products(Policy(save=("router",))) == MOE.n_layers * 2 * tokens * 24 * MOE.n_experts


def test_experts_cost_what_the_chosen_compute():
    """Eight times the experts: more groups to pad, at most as many as there are full, and no copy of the weights."""

    def report(E):
        def S(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        args = S(1, 2048, 64), S(64, E), S(E, 64, 128), S(E, 64, 128), S(E, 128, 64)

        def value(x, router, gate, up, down):
            return jnp.sum(mixture(x, router, gate, up, down, 2) ** 2)

        return llamem.compile_report(jax.grad(value, argnums=(0, 1, 2, 3, 4)), *args)

    few, many = report(4), report(32)
    one_product = 2 * 2048 * 2 * 64 * 128
    assert few.matmul_flops < 9 * one_product * 1.55 and many.matmul_flops < 9 * one_product * 2.1
    weights = 3 * 32 * 64 * 128 * 4
    padded = (4096 + 32 * 128) / (4096 + 4 * 512)
    assert many.temp_bytes < padded * few.temp_bytes + weights


def test_a_mixture_of_no_token_is_refused():
    with pytest.raises(ValueError, match="at least one token to route"):
        x_BTD, router_DE, gate_EDF, up_EDF, down_EFD = arrays(0, 4)
        mixture(x_BTD, router_DE, gate_EDF, up_EDF, down_EFD, 2)
