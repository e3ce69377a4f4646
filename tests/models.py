"""Small models that several tests share, in every variant that the package computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference
from flax import nnx

from llamem import Llama, LlamaConfig, Plan
from llamem.llama import RopeScaling

SMALL = LlamaConfig(
    vocab_size=101, d_model=24, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=8, d_ff=40, max_seq_len=512
)
VARIANTS = {
    "untied": SMALL,
    "tied": SMALL.replace(tied_head=True),
    "one kv head": SMALL.replace(n_kv_heads=1),
    "mha": SMALL.replace(n_kv_heads=6),
    "qwen3": SMALL.replace(qk_norm=True, tied_head=True, rope_theta=1e6, norm_eps=1e-6),
    "rope scaling": SMALL.replace(rope_theta=100.0, rope_scaling=RopeScaling(8.0, original_max_seq_len=64)),
    "no layers": SMALL.replace(n_layers=0),
}

# What steps with parts of their state on the host are tried on. 96 rows of a table are cut into six pieces; 101 are not
# cut. Four layers are two groups of two, three are none.
ON_HOST = {
    "untied, 96 rows": SMALL.replace(vocab_size=96),
    "tied, 101 rows": VARIANTS["qwen3"],
    "four layers": SMALL.replace(n_layers=4),
    "no layers": VARIANTS["no layers"],
}


def model_of(config, seed=0, scale=2.0, **plan):
    """With weights far from their small initial values, and norms away from 1, so that every term counts."""
    model = Llama(config, rngs=nnx.Rngs(seed), plan=Plan(**plan))
    rng = np.random.default_rng(seed)

    def stir(leaf):
        spread = 1.0 if leaf.ndim == 1 or leaf.shape[1:] in ((config.d_model,), (config.head_dim,)) else scale
        return leaf * spread + 0.1 * rng.standard_normal(leaf.shape).astype(leaf.dtype)

    nnx.update(model, jax.tree.map(stir, nnx.state(model)))
    return model


def tokens_of(config, T=37, B=2, seed=1):
    return jax.random.randint(jax.random.key(seed), (B, T), 0, config.vocab_size)


@functools.cache
def expected_gradients(config, T=38):
    """Loss and every gradient of `model_of(config)` on `tokens_of(config, T)`, in float64, by the reference.

    However a model is computed, these are its numbers: made once for all plans.
    """
    tokens = np.asarray(tokens_of(config, T=T))

    def loss(params):
        return reference.loss(config, params, tokens[:, :-1], tokens[:, 1:])

    gradient = in_float64(lambda _, params: jax.jit(jax.value_and_grad(loss))(params), config, model_of(config))
    return jax.tree.map(np.asarray, gradient)


def in_float64(fn, config, model, *args):
    params = nnx.to_pure_dict(nnx.state(model))
    with reference.float64():
        return fn(config, jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), params), *args)
