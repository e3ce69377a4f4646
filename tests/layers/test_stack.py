from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
import llamem
from llamem import Policy, apply_stack, stack_layers, unstack_layers
from llamem.layers.stack import group_count

untyped: Any = llamem  # for what is wrong on purpose
MODES = ("scan", "unroll", "nested")
REMATS = (None, "nothing", Policy(save=("pre",)), Policy(save_all_but=("pre",)), "dots_saveable", "everything_saveable")


def layer(params, x):
    pre = checkpoint_name(x @ params["w"], "pre")
    return x + checkpoint_name(jnp.tanh(pre + params["b"]), "post")


def stacked_params(n_layers, size=5, dtype=jnp.float32):
    w, b = jax.random.split(jax.random.key(n_layers))
    return {
        "w": jax.random.normal(w, (n_layers, size, size), dtype) * 0.5,
        "b": jax.random.normal(b, (n_layers, size), dtype),
    }


def inputs(size=5, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(7), (3, size), dtype)


def in_float64(params, x):
    """The stack, its hidden states and the gradients of its mean square, in numpy, written out by hand."""
    w, b, x = np.asarray(params["w"], np.float64), np.asarray(params["b"], np.float64), np.asarray(x, np.float64)
    hidden, acts = [x], []
    for wl, bl in zip(w, b, strict=True):
        acts.append(np.tanh(hidden[-1] @ wl + bl))
        hidden.append(hidden[-1] + acts[-1])
    dx, dw, db = 2 * hidden[-1] / hidden[-1].size, np.zeros_like(w), np.zeros_like(b)
    for i in reversed(range(len(w))):
        d = dx * (1 - acts[i] ** 2)
        dw[i], db[i] = hidden[i].T @ d, d.sum(0)
        dx = dx + d @ w[i].T
    return hidden, {"w": dw, "b": db}, dx


# Every policy at a depth that nests; other depths, a prime among them, with one.
CASES = [(6, mode, remat) for mode in MODES for remat in REMATS]
CASES += [(n_layers, mode, "nothing") for n_layers in (0, 1, 7) for mode in MODES]


@pytest.mark.parametrize(("n_layers", "mode", "remat"), CASES, ids=str)
def test_values_hidden_states_and_gradients(n_layers, mode, remat):
    params, x = stacked_params(n_layers), inputs()
    hidden, grads, dx = in_float64(params, x)

    def loss(params, x):
        out, states = apply_stack(layer, params, x, mode=mode, remat=remat, return_hidden=True)
        return jnp.mean(out**2), (out, states)

    (_, (out, states)), got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    np.testing.assert_allclose(out, hidden[-1], rtol=1e-5, atol=1e-6)
    assert states.shape == (n_layers + 1, *x.shape)
    np.testing.assert_allclose(states, hidden, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves((grads, dx)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_per_layer_inputs_aux_and_pytree_carry(mode):
    params, x = stacked_params(6), inputs()
    keys = jax.random.split(jax.random.key(3), 6)

    def noisy(p, carry, key):
        x, count = carry
        noise = jax.random.normal(key, x.shape)
        return (layer(p, x) + noise, count + 1), {"noise": noise, "index": count}

    def run(p, remat):
        return apply_stack(noisy, p, (x, jnp.int32(0)), keys, mode=mode, remat=remat, has_aux=True, return_hidden=True)

    (out, count), aux, hidden = jax.jit(run, static_argnums=1)(params, "nothing")
    expected = x
    for i in range(6):
        noise = jax.random.normal(keys[i], x.shape)
        np.testing.assert_allclose(hidden[0][i], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(aux["noise"][i], noise, rtol=1e-5, atol=1e-6)  # drawn in a program and out of it
        expected = layer(jax.tree.map(lambda leaf, i=i: leaf[i], params), expected) + noise
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert count == 6
    np.testing.assert_array_equal(aux["index"], range(6))
    # Every layer drew noise of its own, and the recomputation drew the same again.
    assert len({float(noise[0, 0]) for noise in aux["noise"]}) == 6
    grads = [jax.grad(lambda p, r=r: jnp.mean(run(p, r)[0][0] ** 2))(params) for r in (None, "nothing")]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def count_executions(mode, remat, differentiate=True):
    """How often the layer's body really runs, counted on the host."""
    calls = []

    def counted(p, x):
        # The argument differs from layer to layer: a callback without one is hoisted out of the loop.
        jax.debug.callback(lambda _: calls.append(1), x[0, 0])
        return layer(p, x)

    def loss(p):
        return jnp.mean(apply_stack(counted, p, inputs(), mode=mode, remat=remat) ** 2)

    jax.block_until_ready((jax.grad(loss) if differentiate else loss)(stacked_params(6)))
    jax.effects_barrier()
    return len(calls)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "remat", "times"),
    [
        ("scan", None, 6),
        ("scan", "nothing", 12),
        ("unroll", None, 6),
        ("unroll", "nothing", 11),  # the last layer is left alone
        ("nested", None, 6),
        ("nested", "nothing", 18),  # the group runs again, then each of its layers again
    ],
)
def test_the_layer_runs_again_in_the_backward_pass(mode, remat, times):
    assert count_executions(mode, remat) == times
    assert count_executions(mode, remat, differentiate=False) == 6


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_dropout_is_the_same_in_both_passes_where_its_key_is_an_input(mode):
    params, keys = stacked_params(6), jax.random.split(jax.random.key(9), 6)

    def dropped(p, x, key):
        return layer(p, x) * jax.random.bernoulli(key, 0.6, x.shape) / 0.6

    def grads(remat):
        def loss(p):
            return jnp.mean(apply_stack(dropped, p, inputs(), keys, mode=mode, remat=remat) ** 2)

        return jax.jit(jax.grad(loss))(params)

    def one_by_one(p):
        x = inputs()
        for i in range(6):
            x = dropped(jax.tree.map(lambda leaf, i=i: leaf[i], p), x, keys[i])
        return jnp.mean(x**2)

    expected = jax.tree.leaves(jax.jit(jax.grad(one_by_one))(params))
    for remat in (None, "nothing"):
        for a, b in zip(jax.tree.leaves(grads(remat)), expected, strict=True):
            assert np.abs(a - b).max() <= 2e-6 * np.abs(b).max()


def stored_bytes(mode, remat, n_layers):
    def loss(params, x):
        return jnp.mean(apply_stack(layer, params, x, mode=mode, remat=remat) ** 2)

    _, pull = jax.vjp(lambda params: loss(params, inputs(64)), stacked_params(n_layers, 64))
    return sum(leaf.nbytes for leaf in jax.tree.leaves(pull))


@pytest.mark.quick
def test_what_is_stored_grows_as_each_mode_promises():
    x_bytes = inputs(64).nbytes
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(stacked_params(1, 64)))

    def slope(mode, remat):
        return (stored_bytes(mode, remat, 16) - stored_bytes(mode, remat, 4)) / 12

    assert slope("scan", "nothing") == pytest.approx(x_bytes + weights, rel=0.02)
    assert slope("unroll", "nothing") == pytest.approx(x_bytes + weights, rel=0.02)
    assert slope("scan", Policy(save=("pre",))) == pytest.approx(2 * x_bytes + weights, rel=0.02)
    # The weights outweigh x: 16 layers in 8 groups of two store 8 inputs, 4 layers in 2 groups store 2.
    assert slope("nested", "nothing") == pytest.approx(x_bytes * 6 / 12 + weights, rel=0.02)
    assert slope("scan", None) > 2.5 * x_bytes


def program_size(mode, n_layers):
    return len(str(jax.make_jaxpr(lambda p: apply_stack(layer, p, inputs(), mode=mode))(stacked_params(n_layers))))


def test_program_of_a_scan_does_not_grow_with_depth():
    assert program_size("scan", 32) < 1.05 * program_size("scan", 4)
    assert program_size("nested", 64) < 1.05 * program_size("nested", 4)
    assert program_size("unroll", 32) > 4 * program_size("unroll", 4)


def test_nested_groups_its_own_layers_by_that_count():
    def groups(rows, width):
        x, params = jnp.ones((rows, width)), stacked_params(12, width)
        jaxpr = jax.make_jaxpr(lambda p, x: apply_stack(layer, p, x, mode="nested"))(params, x)
        (outer,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        return outer.params["length"], group_count(12, x.nbytes, 4 * width * (width + 1))

    assert groups(300, 2) == (4, 4) and groups(3, 64) == (6, 6)


def test_stack_and_unstack_are_inverse():
    params = stacked_params(5)
    layers = unstack_layers(params)
    assert len(layers) == 5
    np.testing.assert_array_equal(layers[3]["w"], params["w"][3])
    jax.tree.map(np.testing.assert_array_equal, stack_layers(layers), params)


def test_shapes_are_unstacked_as_arrays_are():
    params = stacked_params(3)
    shapes = unstack_layers(jax.eval_shape(lambda: params))
    assert shapes == [jax.eval_shape(lambda layer=layer: layer) for layer in unstack_layers(params)]
    assert stack_layers(shapes) == jax.eval_shape(lambda: params)


def test_works_under_vmap_and_second_derivatives():
    params, x = stacked_params(4), jnp.stack([inputs(), 2 * inputs()])

    def loss(params, x, remat):
        return jnp.mean(apply_stack(layer, params, x, remat=remat) ** 2)

    plain, again = (jax.vmap(jax.grad(loss), (None, 0, None))(params, x, r) for r in (None, "nothing"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, again)
    plain, again = (jax.hessian(loss, argnums=1)(params, x[0], r) for r in (None, "nothing"))
    np.testing.assert_allclose(plain, again, rtol=1e-4, atol=1e-6)


MISTAKES = [
    ({"mode": "loop"}, ValueError, "mode='loop'"),
    ({"remat": "nothin"}, ValueError, "'nothin'.*Known: nothing"),
    ({"remat": Policy(save=("pst",))}, ValueError, r"\['pst'\].*\['post', 'pre'\]"),
    ({"remat": jax.checkpoint_policies.save_only_these_names}, TypeError, "Callables are not taken"),
    ({"has_aux": True}, TypeError, r"returns \(x, aux\)"),
    ({"layer": lambda p, x: (x @ p["w"]).astype(jnp.bfloat16)}, TypeError, "must return x as it came"),
    ({"stacked": [stacked_params(3)] * 2}, TypeError, r"llamem\.stack_layers\("),
    ({"stacked": {"w": jnp.ones((3, 5, 5)), "b": jnp.ones((2, 5))}}, ValueError, "common first axis"),
    ({"stacked": {**stacked_params(3), "scale": jnp.float32(1)}}, ValueError, r"scale.*: \(\).*scalar array"),
]


@pytest.mark.parametrize(("changes", "error", "words"), MISTAKES)
@pytest.mark.usefixtures("as_a_user")
def test_mistakes_meet_a_sentence_with_the_remedy(changes, error, words):
    with pytest.raises(error, match=words):
        untyped.apply_stack(**{"layer": layer, "stacked": stacked_params(3), "x": inputs(), **changes})


@pytest.mark.usefixtures("as_a_user")
def test_what_is_no_list_of_layers_is_refused():
    for call, error, words in (
        (lambda: unstack_layers(None), ValueError, "a stack without an array, None: nothing says how many layers"),
        (lambda: stack_layers([]), ValueError, "no layer"),
        (lambda: untyped.stack_layers(stacked_params(3)), TypeError, r"stack_layers\(dict\)"),
        (lambda: stack_layers([jnp.ones(2), jnp.ones(3)]), ValueError, r"has the shapes \(2,\), \(3,\)"),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("mode", MODES)
def test_numpy_s_wide_types_are_taken_as_a_scan_takes_them(mode):
    params, x = stacked_params(4), inputs()
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x))
    out = apply_stack(layer, *wide, mode=mode)
    np.testing.assert_array_equal(out, apply_stack(layer, params, x, mode=mode))
    counted: Any = apply_stack(lambda p, i: i + p, np.arange(4), np.asarray(3), mode=mode)
    assert counted == 9 and jnp.result_type(counted) == jnp.int32


def test_layers_of_two_kinds_in_turn():
    """Five with a window and one without, as a list of layers computes them; nothing but their inputs is kept."""
    kinds, params, x = [0, 0, 0, 0, 0, 1] * 2, stacked_params(12, 6), jax.random.normal(jax.random.key(3), (9, 6))

    def mix(params, x, window):
        scores = x @ params["w"] @ x.T
        near = jnp.abs(jnp.arange(9)[:, None] - jnp.arange(9)) < window
        return x + jnp.tanh(jax.nn.softmax(jnp.where(near, scores, -1e9)) @ x + params["b"])

    branches = [lambda p, x: mix(p, x, 3), lambda p, x: mix(p, x, 9)]

    def stack(params, remat="nothing"):
        def layer(p, x, kind):
            return jax.lax.switch(kind, branches, p, x)

        return jnp.mean(apply_stack(layer, params, x, jnp.asarray(kinds), remat=remat) ** 2)

    def loop(params):
        y = x
        for kind, one in zip(kinds, unstack_layers(params), strict=True):
            y = branches[kind](one, y)
        return jnp.mean(y**2)

    (loss, grads), (expected, wanted) = jax.value_and_grad(stack)(params), jax.value_and_grad(loop)(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name in params:
        error = np.linalg.norm((grads[name] - wanted[name]).reshape(12, -1), axis=1)
        assert (error < 1e-2 * np.linalg.norm(wanted[name].reshape(12, -1), axis=1)).all(), (name, error)
    kept = [row for row in jaxmem.saved_residuals(stack, params).rows if not row.argument]
    assert sum(row.bytes for row in kept) <= 4 * 12 * 9 * 6 + 4 * 9 * 6 + 64
