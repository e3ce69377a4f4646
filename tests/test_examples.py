"""What a reader copies is what the package computes."""

import ast
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import llama3_in_one_file as example
import numpy as np
import pytest
from flax import nnx
from models import SMALL, model_of
from norms import errors_by_name

from llamem.runs import loss_fn

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

CONFIG = SMALL.replace(n_layers=2, max_seq_len=32)
SIZES = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "rope_theta", "norm_eps")


def test_it_is_one_short_file_of_three_libraries():
    text = (EXAMPLES / "llama3_in_one_file.py").read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [])
    }
    assert imported - set(sys.stdlib_module_names) == {"jax", "flax", "optax"}
    assert len(text.splitlines()) <= 300


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_its_loss_and_gradients_are_the_package_s(dtype):
    """Of random weights, with a count of tokens that the tiles do not divide, and targets that do not count."""
    config = example.Config(**{name: getattr(CONFIG, name) for name in SIZES}, num_tiles=4, compute_dtype=dtype)
    model = model_of(CONFIG.replace(compute_dtype=dtype), scale=1.0, loss_tiles=3)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, 12))
    inputs, targets = jnp.asarray(tokens[:, :-1]), jnp.asarray(np.where(tokens[:, 1:] % 5, tokens[:, 1:], -100))
    graphdef, params = nnx.split(model)
    expected, expected_grads = jax.value_and_grad(lambda params: loss_fn(graphdef, params, inputs, targets))(params)
    plain = nnx.to_pure_dict(params)
    loss, grads = jax.value_and_grad(lambda params: example.loss_fn(config, params, inputs, targets))(plain)
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    assert float(loss) == pytest.approx(float(expected), rel=tolerance)
    errors = errors_by_name(grads, nnx.to_pure_dict(expected_grads))
    assert len(errors) == 12 and max(errors.values()) < tolerance, errors


def test_it_learns():
    config = example.Config(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=64)
    optimizer, params = example.make_optimizer(1e-2, 30), example.init_params(config, jax.random.key(0))
    state = example.TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    text = b"def learn(self, text):\n    return text.split()\n" * 40
    tokens = jnp.asarray(list(text))
    losses = []
    for step in range(30):
        state, loss = example.train_step(
            config, optimizer, state, example.batch_of(tokens, 4, 32, jax.random.key(step))
        )
        losses.append(float(loss))
    assert losses[0] > 5 and losses[-1] < 2
