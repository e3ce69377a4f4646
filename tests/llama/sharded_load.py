"""Loads a folder onto eight CPU devices and compares logits: every parameter shared out by hand, and by a plan."""

import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

import llamem  # noqa: E402
from llamem import LlamaConfig  # noqa: E402
from llamem.llama.sharding import MeshShape, parameter_specs  # noqa: E402
from llamem.train import loss_fn  # noqa: E402


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
    by_plan(folder, tokens, logits)


def by_plan(folder: str, tokens: jax.Array, logits: jax.Array) -> None:
    """Into the mesh of a plan, where the model can be evaluated and can write."""
    mesh = MeshShape(fsdp=2, tensor=2)
    graphdef, params = nnx.split(llamem.load_pretrained(folder, plan=llamem.Plan(mesh=mesh)))
    specs = parameter_specs(params, mesh)
    for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True):
        parts = leaf.size // leaf.addressable_shards[0].data.size
        assert leaf.sharding.spec == spec
        over = [axis for axes in spec if axes for axis in ((axes,) if isinstance(axes, str) else axes)]
        assert parts == np.prod([mesh.axes[axis] for axis in over])
    loss = jax.jit(loss_fn, static_argnums=0)(graphdef, params, tokens[:, :-1], tokens[:, 1:])
    rows = np.asarray(jax.nn.log_softmax(logits[:, :-1]))
    wanted = -np.take_along_axis(rows, np.asarray(tokens[:, 1:, None]), 2).mean()
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    text = llamem.generate(nnx.merge(graphdef, params), tokens[:, :5], 1, temperature=0)
    assert (np.asarray(text)[:, -1] == np.argmax(logits[:, 4], -1)).all()


if __name__ == "__main__":
    main(*sys.argv[1:])
