"""The untiled loss that tiled ones are compared with is right, and holds no logits in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import llamem
from llamem.runs import abstract_step
from llamem.train import TrainSettings
from llamem_course.baseline import abstract_step_with, exact_loss, lean_loss, relative_error


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.01)])
def test_loss_and_gradients_are_those_of_float64_and_logits_have_the_inputs_type(dtype, tolerance):
    keys = jax.random.split(jax.random.key(3), 3)
    x_ND, head_VD = jax.random.normal(keys[0], (37, 24), dtype), jax.random.normal(keys[1], (101, 24), dtype)
    targets_N = jax.random.randint(keys[2], (37,), 0, 101)
    value, found = jax.value_and_grad(lambda x, w: -3 * lean_loss(x, w, targets_N), (0, 1))(x_ND, head_VD)
    exact, *gradients = exact_loss(x_ND, head_VD, targets_N)
    plain = jax.grad(
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x @ head_VD.T.astype("float32"), targets_N).mean()
    )(x_ND.astype("float32"))
    assert relative_error(plain, gradients[0]) < 1e-5, "the float64 reference itself is off"
    np.testing.assert_allclose(value, -3 * exact, rtol=tolerance)
    for actual, wanted, array in zip(found, gradients, (x_ND, head_VD), strict=True):
        assert actual.dtype == array.dtype
        assert relative_error(actual, -3 * wanted) < tolerance
    kept = jax.tree.leaves(
        jax.eval_shape(lambda x, w: jax.vjp(lambda x, w: lean_loss(x, w, targets_N), x, w)[1], x_ND, head_VD)
    )
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in kept if leaf.shape == (37, 101)) == 37 * 101 * x_ND.itemsize


def test_a_step_with_a_loss_of_ones_own_has_the_losses_of_the_plans_step():
    config = llamem.LlamaConfig.from_name("tiny", n_layers=2, vocab_size=300)
    settings = TrainSettings(batch_size=3, seq_len=16, steps=5)
    step, state, batch = abstract_step(config, settings)
    own, own_state, _ = abstract_step_with(lean_loss, config, settings)
    params = jax.tree.map(lambda leaf: 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), state.params)
    ids_BT = jax.random.randint(jax.random.key(0), batch[0].shape, 0, 300)
    zeros = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)  # noqa: E731
    _, metrics = jax.jit(step)(type(state)(jnp.int32(0), params, zeros(state.opt_state)), (ids_BT, ids_BT))
    _, loss = jax.jit(own)((params, zeros(own_state[1])), (ids_BT, ids_BT))
    np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-5)
