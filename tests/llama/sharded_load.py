"""Loads a folder onto eight CPU devices, the first large axis of every parameter shared out, and compares logits."""

import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import llamem  # noqa: E402
from llamem import LlamaConfig  # noqa: E402


def main(folder: str, expected: str) -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    abstract = nnx.eval_shape(lambda: llamem.Llama(LlamaConfig.from_hf(folder), rngs=nnx.Rngs(0)))

    def share(leaf):
        axis = next(i for i, size in enumerate(leaf.shape) if size % 8 == 0)
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp"))

    shardings = jax.tree.map(share, nnx.to_pure_dict(nnx.state(abstract)))
    model = llamem.load_pretrained(folder, sharding=shardings)
    for leaf, sharding in zip(
        jax.tree.leaves(nnx.to_pure_dict(nnx.state(model))), jax.tree.leaves(shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert leaf.addressable_shards[0].data.size == leaf.size // 8
    tokens = jax.random.randint(jax.random.key(1), (2, 37), 0, model.config.vocab_size)
    logits = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(logits, np.load(expected), rtol=2e-4, atol=2e-4)


if __name__ == "__main__":
    main(*sys.argv[1:])
