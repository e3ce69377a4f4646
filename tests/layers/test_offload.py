import jax
import jax.numpy as jnp
import numpy as np
import pytest

import llamem
from llamem.layers.offload import name_in_pieces
from llamem.memory.jaxprs import names_in


@pytest.mark.parametrize(("most", "pieces"), [(2**32, 1), (840, 1), (839, 2), (300, 4), (100, 10)])
def test_large_arrays_are_named_in_pieces_below_the_limit(most, pieces):
    x = jax.random.normal(jax.random.key(0), (1, 10, 3 * 7))
    jaxpr = jax.make_jaxpr(lambda x: name_in_pieces(x, "block_in", most))(x)
    named = [eqn.outvars[0].aval for eqn in jaxpr.eqns if eqn.primitive.name == "name"]
    assert (
        len(named) == pieces
        and sum(aval.shape[1] for aval in named) == 10
        and set(names_in(jaxpr.jaxpr)) == {"block_in"}
    )
    assert all(aval.size * 4 <= most for aval in named)
    np.testing.assert_array_equal(name_in_pieces(x, "block_in", most), x)


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.skipif(not llamem.available("v5p-1"), reason="needs libtpu")
def test_layer_inputs_of_four_gib_go_to_the_host():
    """In one piece this ends libtpu 0.0.51."""
    shape = jax.ShapeDtypeStruct((1, 131_072, 16_384), jnp.bfloat16)
    scales = jax.ShapeDtypeStruct((2, 16_384), jnp.bfloat16)

    def loss(scales, x):
        def layer(scale, x):
            return jnp.sin(name_in_pieces(x, "block_in") * scale)

        policy = llamem.Policy(offload=("block_in",))
        return jnp.sum(llamem.apply_stack(layer, scales, x, remat=policy).astype(jnp.float32))

    report = llamem.compile_report(jax.grad(loss), scales, shape, target="v5p-1", depth="code")
    assert report.host_bytes >= 2 * 2**32
