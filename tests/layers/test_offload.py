from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
import llamem
from jaxmem.tracing.arguments import on_host
from jaxmem.tracing.jaxprs import equations, names_in, scan_parts
from llamem.layers.host_memory import name_in_pieces
from llamem.layers.stack import group_count


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


def test_nested_the_inputs_of_groups_wait_on_the_host_too():
    """Of six layers, the inputs of two or three groups, and those of one group's layers."""
    scales, x = jnp.linspace(0.5, 1.5, 6 * 7).reshape(6, 7), jax.random.normal(jax.random.key(0), (2, 10, 7))

    def gradient(**options):
        def layer(scale_D, x_BTD):
            return jnp.sin(name_in_pieces(x_BTD, "block_in") * scale_D)

        return jax.grad(lambda s, x: jnp.sum(llamem.apply_stack(layer, s, x, **options) ** 2), argnums=(0, 1))

    nested = gradient(mode="nested", remat=llamem.Policy(offload=("block_in",)))
    for got, expected in zip(nested(scales, x), gradient()(scales, x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    kept = [aval for aval in stacks(jax.make_jaxpr(nested)(scales, x).jaxpr) if aval.shape[1:] == x.shape]
    groups = group_count(6, x.nbytes, scales[0].nbytes)
    assert {aval.shape[0] for aval in kept} == {groups, 6 // groups} and all(map(on_host, kept))


def stacks(jaxpr: Any) -> list[Any]:
    """What the loops of a program stack up."""
    scans = [eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == "scan"]
    return [out.aval for eqn in scans for out in eqn.outvars[scan_parts(eqn)[1] :]]


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_layer_inputs_of_four_gib_go_to_the_host():
    """In one piece this ends libtpu 0.0.51."""
    shape = jax.ShapeDtypeStruct((1, 131_072, 16_384), jnp.bfloat16)
    scales = jax.ShapeDtypeStruct((2, 16_384), jnp.bfloat16)

    def loss(scales, x):
        def layer(scale, x):
            return jnp.sin(name_in_pieces(x, "block_in") * scale)

        policy = llamem.Policy(offload=("block_in",))
        return jnp.sum(llamem.apply_stack(layer, scales, x, remat=policy).astype(jnp.float32))

    report = jaxmem.compile_report(jax.grad(loss), scales, shape, chip="v5p-1", depth="code")
    assert report.host_bytes >= 2 * 2**32
