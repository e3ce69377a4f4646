"""Canaries: what this package reads in JAX's traced programs, and JAX does not promise. One that fails says what
to mend in `memory/jaxprs.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxmem.chips.chip import CHIPS, compiling_for
from jaxmem.tracing import jaxprs
from jaxmem.tracing.flops import matmul_flops
from jaxmem.tracing.jaxprs import OnDevices

SQUARE = jax.ShapeDtypeStruct((8, 8), "float32")
POLICIES = jax.checkpoint_policies
W, X = jnp.full((3, 4, 4), 0.1), jnp.linspace(0.0, 1.0, 8).reshape(2, 4)


def layer(w, x):
    return jnp.sin(checkpoint_name(x @ w, "h"))


def loss(w, x, policy=None, **options):
    body = jax.checkpoint(layer, policy=policy, **options)
    return jnp.sum(jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0])


def traced(fn, *shapes):
    return jax.make_jaxpr(fn)(*shapes).jaxpr


def found(fn, *args):
    return [eqn for eqn, _ in jaxprs.equations(traced(fn, *args))]


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_every_device_runs_is_found_and_counted_for_all(check_vma):
    mesh = jax.sharding.AbstractMesh((4, 2), ("rows", "other"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"in_specs": (P("rows"), P()), "out_specs": P("rows")}

    def local(x, w):
        return jax.lax.psum(jnp.sin(x @ w), "other") if not check_vma else jnp.sin(x @ w)

    mapped = jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)
    (eqn,) = (eqn for eqn in traced(mapped, SQUARE, SQUARE).eqns if eqn.primitive.name == "shard_map")
    flow = jaxprs.control_flow(eqn)
    assert isinstance(flow, OnDevices) and flow.axes == ("rows", "other") and flow.devices == 8
    assert flow.in_specs == specs["in_specs"]
    program = traced(mapped, SQUARE, SQUARE)
    assert matmul_flops(program) == 8 * 2 * 2 * 8 * 8
    partly = jax.shard_map(local, mesh=mesh, axis_names={"rows"}, **specs) if check_vma else mapped
    (eqn,) = (eqn for eqn in traced(partly, SQUARE, SQUARE).eqns if eqn.primitive.name == "shard_map")
    found = jaxprs.control_flow(eqn)
    assert isinstance(found, jaxprs.OnDevices) and found.devices == (4 if check_vma else 8)
    evaluations = {
        of_all: [
            times for eqn, times in jaxprs.equations(program, of_all_devices=of_all) if eqn.primitive.name == "sin"
        ]
        for of_all in (True, False)
    }
    assert evaluations == {True: [8], False: [1]}


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_names_are_found_in_calls_and_checkpoints(wrap, remat3):
    def fn(x):
        return wrap(lambda x: jnp.sin(checkpoint_name(x * 2, "given")))(x).sum()

    assert set(jaxprs.names_in(traced(jax.grad(fn), SQUARE))) == {"given"}


def test_inputs_that_come_back_as_they_went_in_are_told():
    """Through every kind of program inside a program; what one turn, branch or swap changes is computed."""

    def swapped(a, b):
        return b, a

    def counted(state):
        i, a, b = state
        return i + 1, a, b + 1

    mesh = jax.sharding.AbstractMesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(lambda a, b: (a, b), mesh=mesh, in_specs=(P("rows"), P()), out_specs=(P("rows"), P("rows")))
    cases = {
        (0, 1): [lambda a, b: (a, b), jax.jit(lambda a, b: (a, b)), jax.checkpoint(lambda a, b: (a, b))],
        (1, 0): [swapped, jax.jit(jax.checkpoint(swapped)), lambda a, b: swapped(*swapped(*swapped(a, b)))],
        (0, None): [
            lambda a, b: (a, b + 1),
            lambda a, b: jax.lax.while_loop(lambda state: state[0] < 3, counted, (0, a, b))[1:],
            lambda a, b: jax.lax.scan(lambda carry, x: ((carry[0], carry[1] + x), None), (a, b), b)[0],
            lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda a, b: (a, b), lambda a, b: (a, a), a, b),
            sharded,
        ],
        (None, None): [lambda a, b: jax.lax.fori_loop(0, 3, lambda i, state: swapped(*state), (a, b))],
        (None, 1): [lambda a, b: jax.lax.scan(lambda i, x: (i + 1, x), 0, b, reverse=True)],
    }
    for expected, functions in cases.items():
        for function in functions:
            assert tuple(jaxprs.inputs_passed_on(traced(function, SQUARE, SQUARE))) == expected, function


def test_moves_to_the_host_name_their_destination():
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        pytest.skip(f"this device has no pinned_host memory, only {kinds}")
    assert jaxprs.moved_to_host(traced(lambda x: jax.device_put(x, host), SQUARE)) == 4 * 64
    assert jaxprs.moved_to_host(traced(lambda x: jax.device_put(x, jax.devices()[0]), SQUARE)) == 0
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("hosts",))  # an axis is no memory
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("hosts"))
    assert jaxprs.moved_to_host(traced(lambda x: jax.device_put(x, there), SQUARE)) == 0


def test_a_mesh_of_an_absent_chip_says_for_which_chip_one_traces():
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

    closed = jax.make_jaxpr(fn)(SQUARE, SQUARE, SQUARE)
    assert jaxprs.inputs_used(closed) == [True, False, True]
    ((value, line),) = jaxprs.constants_in(closed)
    assert np.asarray(value).tolist() == constant.tolist() and line.startswith("test_jaxprs.py:")


def test_a_checkpoint_is_recognised_with_its_options(remat3):
    policy = POLICIES.save_only_these_names("h")
    calls = [jaxprs.checkpoint_call(eqn) for eqn in found(lambda w, x: loss(w, x, policy), W, X)]
    (call,) = [call for call in calls if call is not None]
    assert call.policy is policy, "the option `policy` of a checkpoint has another name or form now"
    assert call.prevent_cse, "the option `prevent_cse` of a checkpoint has another name now"
    names = [eqn.primitive.name for eqn, _ in jaxprs.equations(call.body)]
    assert "dot_general" in names and "sin" in names, "the program under a checkpoint stands elsewhere now"
    assert list(jaxprs.names_in(call.body)) == ["h"], "checkpoint_name is another operation now"


def test_prevent_cse_is_read():
    if getattr(jax.config, "jax_remat3", False):
        pytest.skip("with jax_remat3 there is no such option")
    calls = [jaxprs.checkpoint_call(eqn) for eqn in found(lambda w, x: loss(w, x, prevent_cse=False), W, X)]
    assert [call.prevent_cse for call in calls if call] == [False], "`prevent_cse` has another name now"


def test_what_is_computed_again_is_marked(remat3):
    eqns = found(jax.grad(loss), W, X)
    marked = [eqn for eqn in eqns if jaxprs.computed_again(eqn)]
    inside = [eqn for outer in marked for inner in jaxprs.inner_jaxprs(outer) for eqn, _ in jaxprs.equations(inner)]
    again = [eqn.primitive.name for eqn in (*marked, *inside)]
    assert "dot_general" in again or "cos" in again, "the mark of rematerialised operations has another name now"
    assert not any(jaxprs.computed_again(eqn) for eqn in found(loss, W, X)), "the forward pass bears the mark too"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (POLICIES.save_only_these_names("a", "b"), {"a", "b"}),
        (POLICIES.save_from_both_policies(POLICIES.save_only_these_names("a"), POLICIES.dots_saveable), {"a"}),
        (
            POLICIES.save_and_offload_only_these_names(
                names_which_can_be_saved=["a"],
                names_which_can_be_offloaded=["b"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            {"a", "b"},
        ),
        (POLICIES.dots_saveable, set()),
    ],
)
def test_what_a_policy_was_made_of_is_read(policy, expected):
    values = jaxprs.policy_arguments(policy).values()
    names = {name for value in values if jaxprs.is_names(value) for name in value}
    assert names == expected, "policies keep their names elsewhere now: closures, attributes?"
    if expected == {"a", "b"} and "offload" in getattr(policy, "__qualname__", ""):
        assert jaxprs.policy_arguments(policy)["offload_dst"] == "pinned_host"


def test_prints_are_told_from_callbacks():
    def printing(x):
        jax.debug.print("{}", x)
        return x

    def counting(x):
        jax.debug.callback(lambda x: None, x)
        return x

    assert not any(map(jaxprs.tells_the_host, found(printing, X))), "jax.debug.print looks like a callback now"
    assert any(map(jaxprs.tells_the_host, found(counting, X))), "jax.debug.callback is another operation now"


def test_names_in_the_forward_rule_of_a_custom_derivative_are_found():
    @jax.custom_vjp
    def square(x):
        return checkpoint_name(x**2, "only here")

    def forward(x):
        doubled = checkpoint_name(2 * x, "doubled")
        return x**2, doubled

    square.defvjp(forward, lambda doubled, g: (doubled * g,))

    def mixed(x, i, key):
        return square(x) + i + jax.random.normal(key, x.shape)

    program = jax.make_jaxpr(mixed)(X, jnp.arange(4), jax.random.key(0))
    assert not set(jaxprs.names_in(program.jaxpr)), "JAX shows forward rules now: names_in alone would do"
    assert jaxprs.names_when_differentiated(program) == {"doubled"}
    saved = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(loss_of(square, x))))(X)
    assert "doubled" in set(jaxprs.names_in(saved.jaxpr)), "JAX no longer keeps names given in a forward rule"


def test_what_vmap_and_a_host_function_leave_in_a_trace():
    def drawn(key, x):
        return jax.random.normal(key, x.shape) + jax.pure_callback(lambda a: a + 1, X, X)

    shared = jax.make_jaxpr(jax.vmap(jax.jit(drawn), in_axes=(None, 0)))(jax.random.key(0), jnp.stack([X, X]))
    (call,) = [eqn for eqn in shared.jaxpr.eqns if jaxprs.inner_jaxprs(eqn)]
    assert jaxprs.vmaps_around(call) == 1, "JAX no longer writes vmap into the names of operations"
    (asked,) = [f for eqn, _ in jaxprs.equations(shared.jaxpr) if (f := jaxprs.host_function(eqn))]
    np.testing.assert_array_equal(asked(np.asarray(X))[0], np.asarray(X) + 1)


def loss_of(square, x):
    return jax.checkpoint(square, policy=POLICIES.save_only_these_names("doubled"))(x)


def with_everything(w, x, n):
    x = jax.jit(lambda x: jnp.where(x > 0, x, -x))(x)
    x = jax.lax.scan(lambda x, w: (layer(w, x), x), x, w)[0]
    x = jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] + x), (0, x))[1]
    return jax.lax.cond(n > 1, jnp.sin, jnp.cos, x) + jnp.cumsum(x, 0).at[0].add(jax.nn.relu(x)[1])


def test_loops_and_branches_are_read():
    program = jax.make_jaxpr(with_everything)(W, X, 3)
    flows = [jaxprs.control_flow(eqn) for eqn in program.jaxpr.eqns]
    (scan,) = [flow for flow in flows if isinstance(flow, jaxprs.Scan)]
    assert (scan.n_consts, scan.n_carry, scan.length) == (0, 1, 3), "a scan's operands moved"
    assert [n for eqn, n in jaxprs.equations(program.jaxpr) if eqn.primitive.name == "dot_general"] == [3]
    (loop,) = [flow for flow in flows if isinstance(flow, jaxprs.While)]
    consts = loop.n_condition_consts, loop.n_body_consts
    assert consts == (1, 1), "the operands of a while loop moved"
    (cond,) = [flow for flow in flows if isinstance(flow, jaxprs.Branches)]
    assert len(cond.branches) == 2
    assert any(isinstance(flow, jaxprs.Call) for flow in flows)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_draws_have_the_names_expected(impl):
    key = jax.random.key(0, impl=impl)
    draws = [lambda key: jax.random.normal(key, (8,)), jax.random.bernoulli, lambda key: jax.random.gamma(key, 2.0)]
    for draw in draws:
        names = {eqn.primitive.name for eqn in found(draw, key)}
        assert names & set(jaxprs.DRAWS), f"random numbers come from {names} now"
