"""Modules as arguments: what flax's and equinox's documentation writes, against the same step written with arrays."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxmem
from jaxmem.tracing.arguments import with_arrays_alone

NAMES = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes", "matmul_flops")
X = jax.ShapeDtypeStruct((96, 300), jnp.float32)
TX = optax.adamw(1e-3)


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.wide, self.narrow = nnx.Linear(300, 700, rngs=rngs), nnx.Linear(700, 300, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(300, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.narrow(jnp.tanh(self.wide(x)))))


def make():
    model = Mlp(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def train_step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


def numbers(report):
    return [getattr(report, name) for name in NAMES]


@pytest.fixture(scope="module")
def explicit():
    """The same step on the modules' state, which goes in and comes out by hand."""
    graph, state = nnx.split(make())

    def step(state, x):
        modules = nnx.merge(graph, state)
        loss = train_step(*modules, x)
        return nnx.state(modules), loss

    return jaxmem.compile_report(step, state, X, donate_argnums=(0,))


@pytest.mark.parametrize("fn", [train_step, nnx.jit(train_step)], ids=["plain", "nnx.jit"])
def test_what_a_step_changes_in_place_is_given_back(fn, explicit):
    shapes, arrays = nnx.eval_shape(make), make()
    report = jaxmem.compile_report(fn, *shapes, X, donate_argnums=(0, 1))
    assert numbers(report) == numbers(explicit) and not report.warnings
    assert report.alias_bytes > 3 * 4 * 2 * 300 * 700  # weights and both moments
    if fn is train_step:
        assert numbers(jaxmem.compile_report(fn, *arrays, X, donate_argnums=(0, 1))) == numbers(explicit)
        names = {span.operation for span in report.timeline.buffers} if report.timeline else {"model['norm']['mean']"}
        assert "model['norm']['mean']" in names  # the arguments are called as the user calls them


def test_the_changed_modules_are_those_of_nnx_jit():
    """In numbers, with statistics and a dropout counter that move, and a module that is returned as well."""

    def step(model, optimizer, x):
        return train_step(model, optimizer, x), model

    x = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
    mine, theirs = make(), make()
    fn, args = with_arrays_alone(step, (*mine, x))
    after, (loss,) = jax.jit(fn)(*args)
    expected, _ = nnx.jit(step)(*theirs, x)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    changed = jax.tree.leaves(nnx.to_pure_dict(nnx.state(theirs)))
    # The state of what was returned, which is an argument, is there once.
    assert len(jax.tree.leaves(after)) == len(changed)
    for a, b in zip(jax.tree.leaves(nnx.to_pure_dict(after[0])), changed, strict=True):
        a, b = (jax.random.key_data(z) if jnp.issubdtype(z.dtype, jax.dtypes.prng_key) else z for z in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_equinox_modules_whole():
    """`filter_jit` of a whole model, whose activation is a function: as its arrays alone."""
    eqx = pytest.importorskip("equinox")

    def update(model, opt_state, x):
        loss, gradients = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        updates, opt_state = TX.update(gradients, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    model = eqx.nn.MLP(300, 300, 700, 2, activation=jnp.tanh, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    opt_state = TX.init(arrays)

    def of_arrays(arrays, opt_state, x):
        model, opt_state, loss = update(eqx.combine(arrays, static), opt_state, x)
        return eqx.filter(model, eqx.is_array), opt_state, loss

    expected = jaxmem.compile_report(of_arrays, arrays, opt_state, X, donate_argnums=(0, 1))
    whole = jaxmem.compile_report(eqx.filter_jit(update), model, opt_state, X, donate_argnums=(0, 1))
    assert numbers(whole) == numbers(expected) and not whole.warnings and whole.alias_bytes > 3 * 4 * 700 * 1300
    if whole.timeline:  # whose arguments' names say nothing of moments
        moments = sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state))
        assert max(whole.timeline.by_category()["optimizer"]) == moments
    shapes = eqx.filter_eval_shape(lambda: model)
    assert numbers(jaxmem.compile_report(update, shapes, opt_state, X, donate_argnums=(0, 1))) == numbers(expected)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_state_that_is_not_given_back_is_noted():
    params = {"w": jax.ShapeDtypeStruct((700, 700), jnp.float32)}
    opt_state = jax.eval_shape(TX.init, params)

    def step(params, opt_state, x, *, give):
        loss, gradients = jax.value_and_grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"]) ** 2))(params)
        updates, opt_state = TX.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return {"loss": loss, "params": (params, loss), "all": (params, opt_state, loss)}[give]

    def noted(give, donate_argnums=(0, 1)):
        x = jax.ShapeDtypeStruct((50, 700), jnp.float32)
        fn = jax.jit(lambda params, opt_state, x: step(params, opt_state, x, give=give))
        return " ".join(jaxmem.compile_report(fn, params, opt_state, x, donate_argnums=donate_argnums).warnings)

    assert noted("all") == "" and "given back" not in noted("all", ())
    nothing = noted("loss")
    assert "`params` is donated (1.87 MiB), and nothing of it is given back" in nothing
    assert "3.74 MiB of `opt_state` reach no result" in nothing and "of `params` reach" not in nothing
    assert "reach no result" not in noted("params") and "`opt_state` is donated" not in noted("params", (0,))


def test_a_weight_that_names_an_axis_is_whole_where_its_user_has_no_mesh():
    """As nanodo writes it: flax cuts such a weight wherever it sees a mesh, and a chip alone has none."""
    initial = nn.initializers.lecun_normal()

    def numbers_with(kernel_init):
        model = nn.Dense(700, kernel_init=kernel_init)
        params = jax.eval_shape(model.init, jax.random.key(0), X)

        def loss(params, x):
            out: Any = model.apply(params, x)
            return jnp.mean(out**2)

        return numbers(jaxmem.compile_report(jax.value_and_grad(loss), params, X, chip="v5e-1"))

    assert numbers_with(nn.with_partitioning(initial, (None, "data"))) == numbers_with(initial)


def test_a_model_that_asks_for_a_mesh_finds_the_one_around_it():
    """As bonsai's models do, whose constraints are without a meaning outside of a mesh."""

    def gradient(x, place=lambda array: array):
        return jax.grad(lambda x: jnp.sum(place(jnp.tanh(x)) ** 2))(x)

    placed = partial(gradient, place=lambda array: jax.lax.with_sharding_constraint(array, jax.P(None, "model")))
    with pytest.raises((RuntimeError, ValueError), match="mesh"):
        jaxmem.compile_report(placed, X, chip="v5e-1")
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])):
        report = jaxmem.compile_report(placed, X, chip="v5e-1")
    assert numbers(report) == numbers(jaxmem.compile_report(gradient, X, chip="v5e-1"))
