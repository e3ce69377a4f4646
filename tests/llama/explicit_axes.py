"""The model and its attention on a mesh whose axes are Explicit, JAX's default since 0.9, under plain `jax.jit`."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxmem  # noqa: E402
import llamem  # noqa: E402
from llamem.layers.attention_tiles import flash_attention  # noqa: E402

MESH = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def put(array, *axes):
    return jax.device_put(array, NamedSharding(MESH, P(*axes)))


def agree(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * np.abs(other).max())


def attention_in_tiles():
    q_BTHh, k_BTKh, v_BTKh = (
        jax.random.normal(jax.random.key(i), (4, 600, heads, 8)) for i, heads in enumerate((4, 2, 2))
    )
    step = jax.jit(jax.grad(lambda *qkv: jnp.sum(flash_attention(*qkv) ** 2), argnums=(0, 1, 2)))
    expected = step(q_BTHh, k_BTKh, v_BTKh)
    for axes in (("data",), ("data", None, "tensor"), (None, None, "tensor")):
        placed = [put(a, *axes) for a in (q_BTHh, k_BTKh, v_BTKh)]
        assert jax.typeof(flash_attention(*placed)).sharding == jax.typeof(placed[0]).sharding
        agree(step(*placed), expected)
        report = jaxmem.compile_report(step, *placed)
        devices = 4 if "data" in axes else 1
        devices *= 2 if "tensor" in axes else 1
        assert report.compiled_matmul_flops == report.matmul_flops / devices


def model():
    config = llamem.LlamaConfig(
        vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, max_seq_len=32
    )
    graphdef, state = nnx.split(llamem.Llama(config, rngs=nnx.Rngs(0)))
    tokens_BT = jax.random.randint(jax.random.key(1), (4, 32), 0, 64)

    @jax.jit
    def step(state, tokens_BT):
        def loss(state):
            x_BTD, entered = nnx.merge(graphdef, state).hidden(tokens_BT, tokens_BT // 40, return_hidden=True)
            return jnp.sum(jnp.sin(x_BTD)) + jnp.mean(entered**2), x_BTD

        return jax.value_and_grad(loss, has_aux=True)(state)

    expected = step(state, tokens_BT)
    whole = jax.tree.map(put, state)
    split = jax.tree.map(lambda a: put(a, None, "data") if a.ndim > 2 else put(a), state)
    for axes in (("data",), ("data", "tensor")):
        for weights in (whole, split):
            (loss, x_BTD), gradients = step(weights, put(tokens_BT, *axes))
            agree(((loss, x_BTD), gradients), expected)
            assert x_BTD.sharding.spec[: len(axes)] == axes


attention_in_tiles()
model()
