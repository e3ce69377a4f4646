"""What notebook 02's second exercise says of names is what a traced model keeps and computes."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmem
import llamem
from jaxmem.compiling import matmul_flops
from llamem_course.exercises.n02_checkpoint_policies import priced


@pytest.mark.parametrize(
    "names", [("q",), ("k",), ("attn",), ("attn_out",), ("gate",), ("v", "attn", "attn_out", "up")]
)
def test_the_table_of_notebook_02_says_what_saved_names_keep_and_spare(names):
    config = llamem.LlamaConfig.from_name("tiny").replace(n_layers=3, head_dim=24)

    def flops_and_bytes(remat):
        plan = llamem.Plan(remat=remat, attention="xla")
        graphdef, params = nnx.split(nnx.eval_shape(lambda: llamem.Llama(config, rngs=nnx.Rngs(0), plan=plan)))
        tokens_BT = jax.ShapeDtypeStruct((1, 40), jnp.int32)

        def loss(params, tokens_BT):
            return jnp.sum(nnx.merge(graphdef, params).hidden(tokens_BT))

        flops = matmul_flops(jax.make_jaxpr(jax.grad(loss))(params, tokens_BT).jaxpr)
        return flops, jaxmem.saved_residuals(loss, params, tokens_BT).bytes

    nothing, saved = flops_and_bytes("nothing"), flops_and_bytes(llamem.Policy(save=names))
    n_bytes, spared = (sum(priced(config, 40)[name][column] for name in names) for column in (0, 1))
    assert nothing[0] - saved[0] == spared
    assert saved[1] - nothing[1] == n_bytes
