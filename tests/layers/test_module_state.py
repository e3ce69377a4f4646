"""Modules with state in a stack: what their list would do, they do; what cannot be kept is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from norms import relative_errors

import llamem
from llamem import apply_stack, stack_layers, unstack_layers

L, D = 6, 8
untyped: Any = llamem
as_list: Any = getattr(nnx, "List", list)  # before flax 0.12 a plain list


class Layer(nnx.Module):
    """Dropout's counters, BatchNorm's statistics, and a variable of its own."""

    def __init__(self, rngs: nnx.Rngs):
        # Without a bias: BatchNorm takes it out again, and what is left of its gradient is rounding.
        self.linear = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.largest = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        out = self.dropout(jnp.sin(self.norm(self.linear(x))))
        self.largest[...] = jnp.maximum(self.largest[...], jnp.max(jax.lax.stop_gradient(out)))
        return x + out


def layers():
    return [Layer(nnx.Rngs(i)) for i in range(L)]


def in_a_list(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def trained(module, forward, steps=3):
    """Losses, gradients and the last state of some steps, as flax's documentation writes them."""
    graphdef, params, state = nnx.split(module, nnx.Param, ...)

    @jax.jit
    def step(params, state, x):
        def loss(params):
            merged = nnx.merge(graphdef, params, jax.tree.map(lambda a: a, state))
            return jnp.mean(forward(merged, x) ** 2), nnx.state(merged, nnx.Not(nnx.Param))

        (value, state_), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, grads, state_

    x, found = jax.random.normal(jax.random.key(9), (16, D)), []
    for _ in range(steps):
        value, grads, state = step(params, state, x)
        found.append((value, nnx.to_pure_dict(grads)))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return found, nnx.merge(graphdef, params, state)


@pytest.fixture(scope="module")
def expected():
    found, blocks = trained(as_list(layers()), in_a_list)
    return [(v, stack_layers([g[i] for i in range(L)])) for v, g in found], stack_layers(list(blocks))


@pytest.mark.parametrize(
    ("mode", "remat"), [("scan", "nothing"), ("scan", None), ("nested", "nothing"), ("unroll", "nothing")]
)
def test_a_stack_has_the_masks_statistics_and_gradients_of_its_list(expected, mode, remat):
    steps, last = expected
    found, stacked = trained(
        stack_layers(as_list(layers())),
        lambda module, x: apply_stack(lambda layer, x: layer(x), module, x, mode=mode, remat=remat),
    )
    for mine, theirs in zip(found, steps, strict=True):
        assert max(relative_errors(mine, theirs)) < 2e-5
    assert len({float(value) for value, _ in found}) == 3
    assert max(relative_errors(nnx.state(stacked, nnx.BatchStat), nnx.state(last, nnx.BatchStat))) < 2e-5
    np.testing.assert_array_equal(stacked.dropout.rngs.count[...], np.full(L, 3))
    np.testing.assert_allclose(stacked.largest[...], last.largest[...], rtol=1e-5)
    assert np.all(stacked.largest[...] > 0)


class Transformed(Layer):
    """The same through a transform of nnx's own, which sets every variable anew."""

    transform: Any = staticmethod(nnx.remat)

    def __call__(self, x):
        return self.transform(Layer.__call__)(self, x)


@pytest.mark.quick
@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
@pytest.mark.parametrize("mode", ["scan", "unroll", "nested"])
def test_transforms_inside_a_layer_hand_out_what_it_changes_and_no_weights(expected, mode, transform, monkeypatch):
    monkeypatch.setattr(Transformed, "transform", staticmethod(transform))
    transformed = stack_layers([Transformed(nnx.Rngs(i)) for i in range(L)])

    def forward(module, x):
        return apply_stack(lambda layer, x: layer(x), module, x, mode=mode, remat="nothing")

    if mode == "scan":
        graphdef, state = nnx.split(transformed)
        traced = jax.make_jaxpr(lambda state, x: forward(nnx.merge(graphdef, state), x))(state, jnp.ones((2, D)))
        (loop,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "scan")
        # x, the count of draws, both statistics and the variable of its own: no kernel [L, D, D] and no key.
        assert sorted(var.aval.shape for var in loop.outvars) == [(2, D), (L,), (L,), (L, D), (L, D)]
    steps, last = expected
    found, stacked = trained(transformed, forward)
    for mine, theirs in zip(found, steps, strict=True):
        assert max(relative_errors(mine, theirs)) < 2e-5
    assert max(relative_errors(nnx.state(stacked, nnx.BatchStat), nnx.state(last, nnx.BatchStat))) < 2e-5
    np.testing.assert_array_equal(stacked.dropout.rngs.count[...], np.full(L, 3))


def test_a_parameter_that_a_layer_really_sets_is_set(as_a_user):
    """Through a transform, where every variable is set, and two that it swaps, which come back as they went in."""

    class Setting(nnx.Module):
        def __init__(self, i):
            self.old, self.new, self.still = (nnx.Param(jnp.full((2,), 10.0 * i + j)) for j in range(3))

        def __call__(self, x):
            self.old[...], self.new[...] = self.new[...], self.old[...]
            return x + self.still[...]

    for through in (lambda layer, x: layer(x), nnx.remat(Setting.__call__), nnx.jit(nnx.remat(Setting.__call__))):
        module = stack_layers([Setting(i) for i in range(3)])
        np.testing.assert_array_equal(apply_stack(through, module, jnp.zeros(2)), [36.0, 36.0])
        for variable, j in ((module.old, 1), (module.new, 0), (module.still, 2)):
            np.testing.assert_array_equal(variable[...][:, 0], [j, 10.0 + j, 20.0 + j])


def test_masks_differ_from_step_to_step_and_layer_to_layer_without_jit_too():
    module, x = stack_layers(layers()), jnp.ones((4, D))

    def masks():
        def layer(module, x):
            return x, module.dropout(jnp.ones((4, D))) == 0

        return apply_stack(layer, module, x, has_aux=True)[1]

    first, second = masks(), masks()
    assert np.any(first != second) and len({mask.tobytes() for mask in np.asarray(first)}) == L
    assert [int(one.dropout.rngs.count[...]) for one in unstack_layers(module)] == [2] * L
    module.eval()
    np.testing.assert_array_equal(apply_stack(lambda layer, x: layer.dropout(x), module, x), x)
    np.testing.assert_array_equal(module.dropout.rngs.count[...], np.full(L, 2))


def test_keys_among_the_inputs_of_layers_move_on_too():
    params, streams = jnp.ones((L, 1)), stack_layers([nnx.Rngs(dropout=i) for i in range(L)])
    draw = lambda p, x, rngs: x + p * jax.random.normal(rngs.dropout(), x.shape)  # noqa: E731
    one, other = (apply_stack(draw, params, jnp.zeros(3), streams) for _ in range(2))
    assert np.any(one != other)


def merged(graphdef):
    """A layer that makes variables of its own out of the stack's: what it sets, the stack does not see."""
    return lambda state, x: nnx.merge(graphdef, jax.tree.map(lambda a: a, state))(x)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.usefixtures("as_a_user")
def test_state_that_would_be_lost_is_refused():
    module, x = stack_layers(layers()), jnp.ones((4, D))
    graphdef, state = nnx.split(module)
    with pytest.raises(ValueError, match=r"computes new values of .*count.*the stacked module itself"):
        apply_stack(merged(graphdef), state, x)
    inside = lambda state, x: nnx.remat(Layer.__call__)(nnx.merge(graphdef, jax.tree.map(lambda a: a, state)), x)  # noqa: E731
    with pytest.raises(ValueError, match=r"computes new values of .*count.*the stacked module itself"):
        apply_stack(inside, state, x)
    module.eval()
    graphdef, state = nnx.split(module)  # in evaluation a variable of its own moves on alone
    with pytest.raises(ValueError, match=r"computes new values of \['largest'\], which"):
        apply_stack(merged(graphdef), state, x)
    frozen = lambda layer, x: layer.norm(layer.linear(x))  # noqa: E731
    still = apply_stack(lambda state, x: frozen(nnx.merge(graphdef, state), x), state, x)
    np.testing.assert_allclose(still, apply_stack(frozen, module, x), rtol=1e-6)

    def sowing(layer, x):
        layer.sow(nnx.Intermediate, "seen", x)
        return x

    with pytest.raises(ValueError, match="changes the structure"):
        apply_stack(sowing, stack_layers(layers()), x)
    shared = nnx.Rngs(0)

    class Sharing(nnx.Module):
        def __init__(self):
            self.rngs = shared

    with pytest.raises(ValueError, match=r"layers 0 and 1 share an nnx.*rngs\.fork"):
        stack_layers([Sharing(), Sharing()])


@pytest.mark.usefixtures("as_a_user")
def test_python_values_stay_and_those_that_differ_are_named():
    matrices = jax.random.normal(jax.random.key(0), (3, D, D)) / D
    x = jnp.ones((2, D))
    stacked = stack_layers([{"w": w, "rate": 0.5, "on": True, "f": jnp.sin} for w in matrices])
    assert (stacked["rate"], stacked["on"], stacked["f"]) == (0.5, True, jnp.sin)

    def layer(p, x):
        return p["f"](x @ p["w"]) * p["rate"] if p["on"] else x

    expected = x
    for w in matrices:
        expected = jnp.sin(expected @ w) * 0.5
    np.testing.assert_allclose(apply_stack(layer, stacked, x, remat="nothing"), expected, rtol=1e-5)
    assert unstack_layers(stacked)[1]["rate"] == 0.5
    shapes = stack_layers([jax.eval_shape(lambda w: {"w": w}, w) for w in matrices])
    assert shapes["w"].shape == (3, D, D)
    modules = [nnx.eval_shape(lambda i=i: Layer(nnx.Rngs(i))) for i in range(2)]
    assert stack_layers(modules).linear.kernel.shape == (2, D, D)
    assert stack_layers([nnx.state(one) for one in layers()])["linear"]["kernel"].shape == (L, D, D)
    with pytest.raises(ValueError, match=r"\['rate'\] is 0\.1 in layer 0 and 0\.2 in layer 1.*jnp\.asarray.*per_layer"):
        stack_layers([{"rate": 0.1, "w": x}, {"rate": 0.2, "w": x}])
    one, other = Layer(nnx.Rngs(0)), Layer(nnx.Rngs(1))
    other.dropout.rate = 0.1
    with pytest.raises(ValueError, match=r"\.dropout\.rate is 0\.4 in layer 0 and 0\.1 in layer 2") as error:
        stack_layers([one, Layer(nnx.Rngs(2)), other])
    told = str(error.value)
    assert "as an array in per_layer" in told and "each group of layers" in told and "\n" not in told
    without = Layer(nnx.Rngs(3))
    without.linear = nnx.Linear(D, D, rngs=nnx.Rngs(3))
    with pytest.raises(ValueError, match=r"\.linear\.bias is None in layer 0 and Param in layer 1"):
        stack_layers([one, without])
    with pytest.raises(ValueError, match=r"\['v'\] is not there in layer 0 and 2 in layer 1"):
        stack_layers([{"w": x}, {"w": x, "v": 2}])
    with pytest.raises(ValueError, match=r"a stack without an array, \(\{\}, None\): nothing says how many"):
        apply_stack(lambda p, x: x, {}, x)
    with pytest.raises(ValueError, match=r"\['rate'\]\": \(\).*eqx\.partition"):
        jax.jit(lambda p: apply_stack(layer, p, x))({**stacked, "f": x})


def test_equinox_layers_of_one_static_half_and_their_state():
    eqx = pytest.importorskip("equinox")

    class Dropping(eqx.Module):
        linear: eqx.nn.Linear
        drop: eqx.nn.Dropout
        activation: Any

        def __init__(self, key, rate=0.3):
            self.linear, self.drop = eqx.nn.Linear(D, D, key=key), eqx.nn.Dropout(rate)
            self.activation = jax.nn.gelu

        def __call__(self, x, key):
            return x + self.drop(self.activation(jax.vmap(self.linear)(x)), key=key)

    keys, x = jax.random.split(jax.random.key(1), 3), jax.random.normal(jax.random.key(2), (4, D))
    blocks = [Dropping(key) for key in keys]
    params, static = eqx.partition(stack_layers(blocks), eqx.is_array)
    assert params.drop.p is None and static.drop.p == 0.3

    def loss(params, how):
        out = apply_stack(lambda p, x, key: p(x, key), eqx.combine(params, static), x, keys, **how)
        return jnp.mean(out**2)

    def by_list(arrays):
        out = x
        for block, key in zip(arrays, keys, strict=True):
            out = eqx.combine(block, static)(out, key)
        return jnp.mean(out**2)

    expected = jax.value_and_grad(by_list)([eqx.filter(block, eqx.is_array) for block in blocks])
    expected = expected[0], stack_layers(expected[1])
    for how in ({}, {"remat": "nothing"}, {"mode": "nested", "remat": "nothing"}):
        found = jax.jit(lambda p, how=how: jax.value_and_grad(loss)(p, how))(params)
        assert max(relative_errors(found, expected)) < 1e-5
    with pytest.raises(ValueError, match=r"\.drop\.p is 0\.0 in layer 0 and 0\.2 in layer 1"):
        stack_layers([Dropping(keys[0], 0.0), Dropping(keys[1], 0.2)])

    class Normed(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(D, axis_name="batch", mode="ema")

        def __call__(self, x, state):
            return jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    with pytest.raises(ValueError, match=r"\.norm\.ema_.* is an equinox StateIndex.*filter_vmap\(equinox"):
        stack_layers([Normed(key) for key in keys])
    stacked, state = eqx.filter_vmap(eqx.nn.make_with_state(Normed))(keys)
    out, new = apply_stack(lambda p, x, state: p(x, state), stacked, x, state, remat="nothing", has_aux=True)
    assert out.shape == x.shape and max(relative_errors(jax.tree.leaves(new)[-1], jax.tree.leaves(state)[-1])) > 0.01


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_statistics_that_the_layer_casts_and_does_not_use_are_not_lost(dtype):
    """BatchNorm casts the old mean and computes with the batch's: a read in vain, and no lost update."""

    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(D, D, rngs=rngs, dtype=dtype)
            self.norm = nnx.BatchNorm(D, rngs=rngs, dtype=dtype)

        def __call__(self, x):
            return self.norm(jnp.tanh(self.linear(x))) + x

    x = jax.random.normal(jax.random.key(3), (5, D), dtype)
    as_list, module = ([Normed(nnx.Rngs(i)) for i in range(3)] for _ in range(2))
    module = stack_layers(module)
    out, expected = apply_stack(lambda layer, x: layer(x), module, x), in_a_list(as_list, x)
    kept, wanted = nnx.state(module, nnx.BatchStat), nnx.state(stack_layers(as_list), nnx.BatchStat)
    assert max(relative_errors((out, kept), (expected, wanted))) < 4 * jnp.finfo(dtype).eps
    assert not jnp.allclose(module.norm.mean[...], 0)
    with pytest.raises(ValueError, match=r"new values of .*mean.*would be lost"):
        apply_stack(lambda layer, x: nnx.clone(layer)(x), module, x)


def test_names_of_shards_are_those_of_the_axes():
    """flax's own answer: `nnx.vmap` that is told that nothing splits the axis of layers. It comes off with a layer."""

    def one(rngs):
        named = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "tensor"))
        return nnx.Linear(8, 16, kernel_init=named, rngs=rngs)

    def of_key(key):
        return one(nnx.Rngs(key))

    def names(module: Any):
        state: Any = nnx.state(module)
        return nnx.get_partition_spec(state)["kernel"].get_value()

    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        stacked, P = stack_layers([one(nnx.Rngs(i)) for i in range(4)]), jax.sharding.PartitionSpec
        keys = jax.random.split(jax.random.key(0), 4)
        by_vmap = nnx.vmap(of_key, transform_metadata={nnx.PARTITION_NAME: None})(keys)
        assert names(stacked) == names(by_vmap) == P(None, "fsdp", "tensor")
        assert [names(layer) for layer in unstack_layers(stacked)] == [P("fsdp", "tensor")] * 4
        again = stack_layers(unstack_layers(stacked))
        assert jax.tree.structure(again) == jax.tree.structure(stacked)
        # What flax's vmap was not told about has the names of one layer, and a layer of it keeps them.
        assert names(unstack_layers(nnx.vmap(of_key)(keys))[1]) == P("fsdp", "tensor")
        seen = []
        apply_stack(lambda layer, x: (seen.append(names(layer)), x)[1], stacked, jnp.ones((2, 8)))
        assert set(seen) == {P("fsdp", "tensor")}
