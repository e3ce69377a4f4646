"""The picture of a layer: its bytes are those of the arrays that a layer makes, and all of them are written in it."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from flax import nnx

import llamem
from jaxmem.tracing.residuals import saved_residuals
from llamem_course.block_figure import block, block_alt, block_flows

CONFIG = llamem.LlamaConfig.from_name("llama3.1-8b", param_dtype=jnp.bfloat16, compute_dtype=jnp.float32)


def test_weights_have_the_bytes_of_the_models_own():
    model = nnx.eval_shape(lambda: llamem.Llama(CONFIG, rngs=nnx.Rngs(0)))
    flows = block_flows(CONFIG, 100)
    state = nnx.to_pure_dict(nnx.state(model.blocks))
    for name in ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"):
        leaf = state[name]
        assert flows[name].bytes == leaf.size * leaf.dtype.itemsize // CONFIG.n_layers, name


def test_activations_have_the_bytes_that_a_policy_keeps_of_them():
    def kept(names, n_layers=2):
        plan = llamem.Plan(remat=llamem.Policy(save=names) if names else "nothing", attention="xla")
        config = CONFIG.replace(n_layers=n_layers)
        graphdef, params = nnx.split(nnx.eval_shape(lambda: llamem.Llama(config, rngs=nnx.Rngs(0), plan=plan)))
        tokens_BT = jax.ShapeDtypeStruct((1, 96), jnp.int32)
        return saved_residuals(lambda p, t: nnx.merge(graphdef, p).hidden(t).sum(), params, tokens_BT).bytes

    flows, nothing = block_flows(CONFIG, 96), kept(())
    for name in ("q", "k", "v", "attn", "gate", "up"):
        assert kept((name,)) - nothing == 2 * flows[name].bytes, name
    assert kept((), 4) - nothing == 2 * flows["x"].bytes
    assert flows["hidden"].bytes == flows["gate"].bytes and flows["normed"].bytes == flows["x"].bytes


def test_the_picture_and_its_words_name_every_array():
    fig, flows = block(CONFIG, 8192), block_flows(CONFIG, 8192)
    words = "\n".join(text.get_text() for ax in fig.axes for text in ax.texts)
    for name, flow in flows.items():
        assert str(flow) in words, name
        assert f"{name} {flow}" in block_alt(CONFIG, 8192)
    assert str(flows["gate"]) == "[T, F] 448 MiB" and str(flows["scores"]) == "[H, T, S] 8.0 GiB"
    plt.close(fig)
