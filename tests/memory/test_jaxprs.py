"""Canaries: what this package reads in JAX's traced programs, and JAX does not promise. Each says what broke."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from llamem.memory import jaxprs
from llamem.memory.chips import compiling_for
from llamem.memory.control_flow import OnDevices
from llamem.memory.flops import matmul_flops

X = jax.ShapeDtypeStruct((8, 8), "float32")


def traced(fn, *shapes):
    return jax.make_jaxpr(fn)(*shapes).jaxpr


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_every_device_runs_is_found_and_counted_for_all(check_vma):
    mesh = jax.sharding.AbstractMesh((4, 2), ("rows", "other"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"in_specs": (P("rows"), P()), "out_specs": P("rows")}

    def local(x, w):
        return jax.lax.psum(jnp.sin(x @ w), "other") if not check_vma else jnp.sin(x @ w)

    mapped = jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)
    (eqn,) = (eqn for eqn in traced(mapped, X, X).eqns if eqn.primitive.name == "shard_map")
    flow = jaxprs.control_flow(eqn)
    assert isinstance(flow, OnDevices) and flow.axes == ("rows", "other") and flow.devices == 8
    assert flow.in_specs == specs["in_specs"]
    program = traced(mapped, X, X)
    assert matmul_flops(program) == 8 * 2 * 2 * 8 * 8
    partly = jax.shard_map(local, mesh=mesh, axis_names={"rows"}, **specs) if check_vma else mapped
    (eqn,) = (eqn for eqn in traced(partly, X, X).eqns if eqn.primitive.name == "shard_map")
    found = jaxprs.control_flow(eqn)
    assert isinstance(found, jaxprs.OnDevices) and found.devices == (4 if check_vma else 8)
    evaluations = {
        of_all: [
            times for eqn, times in jaxprs.equations(program, of_all_devices=of_all) if eqn.primitive.name == "sin"
        ]
        for of_all in (True, False)
    }
    assert evaluations == {True: [8], False: [1]}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, jax.remat])
def test_names_are_found_in_calls_and_checkpoints(wrap, remat3):
    def fn(x):
        return wrap(lambda x: jnp.sin(checkpoint_name(x * 2, "given")))(x).sum()

    assert set(jaxprs.names_in(traced(jax.grad(fn), X))) == {"given"}


def test_moves_to_the_host_name_their_destination():
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        pytest.skip(f"this device has no pinned_host memory, only {kinds}")
    assert jaxprs.moved_to_host(traced(lambda x: jax.device_put(x, host), X)) == 4 * 64
    assert jaxprs.moved_to_host(traced(lambda x: jax.device_put(x, jax.devices()[0]), X)) == 0
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("hosts",))  # an axis is no memory
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("hosts"))
    assert jaxprs.moved_to_host(traced(lambda x: jax.device_put(x, there), X)) == 0


def test_a_mesh_of_an_absent_chip_says_for_which_chip_one_traces():
    from llamem.memory.chips import CHIPS

    assert compiling_for() == jax.devices()[0].device_kind
    with jax.sharding.use_abstract_mesh(CHIPS["v6e-1"].mesh(x=1)):
        assert compiling_for() == "TPU v6 lite"


def test_what_changes_no_result_and_what_is_closed_over():
    constant = np.arange(5.0)
    inner = jax.jit(lambda x: x[:5] * constant)

    def fn(used, lost, in_loop):
        def body(carry, _):
            used, lost = carry
            return (jax.jit(jnp.sin)(used), lost * 2 + used), None

        return jax.lax.scan(body, (used + in_loop, lost), None, length=3)[0][0], jax.lax.map(inner, used)

    closed = jax.make_jaxpr(fn)(X, X, X)
    assert jaxprs.inputs_used(closed) == [True, False, True]
    ((value, line),) = jaxprs.constants_in(closed)
    assert np.asarray(value).tolist() == constant.tolist() and line.startswith("test_jaxprs.py:")
